"""Starting and stopping for real: bad input gets one clear line, good input gets a server, signals end it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.server import base_config, running_server, toml


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: its names are longer than a socket's path may be.
    place = Path(tempfile.mkdtemp(prefix="pushd-"))
    yield place
    shutil.rmtree(place)


def pushd(*argv: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pushd", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environ},
    )


def runs(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected has no command line left."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def _unreadable(folder: Path) -> str:
    return str(folder / "absent.toml")


def _text(text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "pushd.toml").write_text(text)
        return str(folder / "pushd.toml")

    return write


def _tables(**tables: Any) -> Callable[[Path], str]:
    return _text(toml(base_config(**tables)))


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        pytest.param(_unreadable, ["absent.toml", "cannot be read"], id="unreadable-file"),
        pytest.param(_text("[server\n"), ["pushd.toml", "not valid TOML", "line 1"], id="bad-toml"),
        pytest.param(_text("[server]\nlisten_on = 1\n"), ["pushd.toml:2", "server.listen_on"], id="unknown-key"),
        pytest.param(_text('[push]\nmax_attempts = "3"\n'), ["pushd.toml:2", "push.max_attempts"], id="wrong-type"),
        pytest.param(_text("[push]\nmax_attempts = 11\n"), ["pushd.toml:2", "push.max_attempts"], id="out-of-range"),
        pytest.param(
            _text('[database]\nurl = "env:PUSHD_TEST_ABSENT"\n'),
            ["database.url", "PUSHD_TEST_ABSENT"],
            id="no-variable",
        ),
        pytest.param(
            _tables(database={"url": "postgresql://hunter2@127.0.0.1:1/none"}),
            ["database.url", "cannot be reached"],
            id="unreachable-database",
        ),
        pytest.param(
            _text("[push]\nrecipient_ttl_seconds = 9_223_372_036\n"),
            ["push.recipient_ttl_seconds"],
            id="T009-lifetime-beyond-the-database-clock",
        ),
    ],
)
def test_bad_input_gets_one_line_and_code_1(folder: Path, write: Callable[[Path], str], parts: list[str]) -> None:
    result = pushd("serve", "--config", write(folder), "--data-dir", folder / "data")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("pushd: ")]
    assert len(lines) == 1
    assert all(part in lines[0] for part in parts), lines
    assert "Traceback" not in result.stderr
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize(("table", "key"), [("server", "listen"), ("telemetry", "metrics_listen")])
def test_port_in_use_is_named(folder: Path, table: str, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        path = _tables(**{table: {key: address}})(folder)
        result = pushd("serve", "--config", path, "--data-dir", folder / "data")
    assert result.returncode == 1
    assert f"pushd: {table}.{key}: cannot listen on {address}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "data").exists()  # nothing was begun


def test_data_directory_of_a_newer_version_is_named(folder: Path) -> None:
    (folder / "data" / "postgres").mkdir(parents=True)
    (folder / "data" / "postgres" / "PG_VERSION").write_text("99\n")
    result = pushd("serve", "--config", _tables()(folder), "--data-dir", folder / "data")
    assert result.returncode == 1
    assert "pushd: the data directory holds PostgreSQL 99 data" in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_command_line_has_a_code_of_its_own() -> None:
    result = pushd("serve", "--no-such-option")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """This process, and so its children, may open fewer files than it could; yields how many it could."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1_000, hard), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_and_exits_0(folder: Path, signum: signal.Signals, few_descriptors: int) -> None:
    async with running_server(folder, base_config()) as server:
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == few_descriptors
        assert pushd("health", server.grpc).returncode == 0
        server.send_signal(signum)
        with trio.fail_after(30):
            assert await server.wait_exit() == 0
        names = [event["event"] for event in server.events]
        assert names.index("stopping") < names.index("stopped")
    assert pushd("health", server.grpc).returncode == 1


async def test_signal_ends_a_start_that_waits_for_the_database(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/none"
        async with running_server(folder, base_config(database={"url": url}), wait_ready=False) as server:
            with trio.fail_after(60):
                accepted, _ = await trio.to_thread.run_sync(silent.accept, abandon_on_cancel=True)
                with accepted:
                    server.send_signal(signal.SIGTERM)
                    assert await server.wait_exit() == 0  # and 1 had the connection run into its time-out


async def test_killed_server_starts_again_on_its_data_and_a_clean_one_leaves_nothing_running(folder: Path) -> None:
    async with running_server(folder, base_config()) as first:
        database_pid = (await first.wait_event("database_started"))["pid"]
        first.process.kill()
        await first.wait_exit()
    assert runs(database_pid)
    async with running_server(folder, base_config()) as second:
        await second.wait_event("database_replaced")
        new_pid = (await second.wait_event("database_started"))["pid"]
        second.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await second.wait_exit() == 0
    assert not runs(database_pid)
    assert not runs(new_pid)


async def test_two_servers_share_one_pushd_db(folder: Path) -> None:
    argv = [sys.executable, "-m", "pushd", "db", "--data-dir", str(folder / "shared")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as db:
        try:
            assert db.stdout is not None
            url = (await trio.to_thread.run_sync(db.stdout.readline)).strip()
            config = base_config(database={"url": url})
            async with running_server(folder / "a", config) as one, running_server(folder / "b", config) as two:
                for server in (one, two):
                    assert pushd("health", server.grpc).returncode == 0
        finally:
            db.send_signal(signal.SIGINT)
            db.wait(30)
    assert db.returncode == 0


async def test_metrics_listener_can_be_switched_off(folder: Path) -> None:
    async with running_server(folder, base_config(telemetry={"metrics_listen": ""})) as server:
        assert server.metrics is None
        server.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await server.wait_exit() == 0


async def test_second_server_on_one_data_directory_is_refused(folder: Path) -> None:
    async with running_server(folder, base_config()):
        result = pushd("serve", "--config", folder / "pushd.toml", "--data-dir", folder / "data")
    assert result.returncode == 1
    assert "in use by another pushd" in result.stderr
