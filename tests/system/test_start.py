"""Starting and stopping for real: bad input gets one clear line, good input gets a server, signals end it."""

from __future__ import annotations

import os
import pty
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from pushd.app import descriptors_wanted
from pushd.config import load_config
from pushd.stop import stop_signals
from tests.support.server import START_S, base_config, running_server, toml


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


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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


def test_a_closed_terminal_ends_neither_the_drain_nor_the_database_half_way(folder: Path) -> None:
    """Lines about the drain cannot be written any more: the terminal they would go to is gone."""
    terminal, end = pty.openpty()
    take = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
    )
    argv = [sys.executable, "-m", "pushd", "serve", "--config", _tables()(folder), "--data-dir", str(folder / "data")]
    process = subprocess.Popen(
        [sys.executable, "-c", take, *argv], stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    try:
        os.close(end)
        said = b""
        while b'"event": "ready"' not in said:
            said += os.read(terminal, 4_096)
        os.close(terminal)
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert not (folder / "data" / "postgres" / "postmaster.pid").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_db_with_its_server(folder: Path, signum: signal.Signals) -> None:
    argv = [sys.executable, "-m", "pushd", "db", "--data-dir", str(folder / "data")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"postgresql://")
        process.send_signal(signum)
        assert process.wait(60) == 0
    assert not (folder / "data" / "postgres" / "postmaster.pid").exists()


@pytest.mark.parametrize("handling", [signal.SIG_DFL, signal.SIG_IGN])
def test_nohup_hides_the_end_of_the_terminal(handling: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handling)
    try:
        assert (signal.SIGHUP in stop_signals()) == (handling is signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("tables", "wanted"),
    [
        ({}, 1_024 + 20 + 200),
        ({"server": {"max_connections": 9_000}, "database": {"max_connections": 30}}, 9_000 + 30 + 200),
        ({"push": {"http": {}}}, 1_024 + 20 + 512 + 200),
        (
            {"database": {"url": "postgresql://127.0.0.1/a", "replica_url": "postgresql://127.0.0.1/a"}},
            1_024 + 2 * 20 + 200,
        ),
    ],
)
def test_descriptors_a_configuration_may_need(folder: Path, tables: dict[str, Any], wanted: int) -> None:
    assert descriptors_wanted(load_config(Path(_tables(**tables)(folder)), {})) == wanted


async def test_a_limit_that_is_too_low_is_told_and_running_into_it_ends_nothing(folder: Path) -> None:
    few = ("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh")
    async with running_server(folder, base_config(), before=few) as server:
        with trio.fail_after(START_S):
            short = await server.wait_event("descriptors_short")
            assert (short["level"], short["limit"], short["wanted"]) == ("warning", 128, 1_244)
            async with AsyncExitStack() as stack:
                for _ in range(200):
                    stream = await trio.open_tcp_stream("127.0.0.1", server.grpc_port)
                    stack.push_async_callback(stream.aclose)
                failed = await server.wait_event("accept_failed")
            assert (failed["level"], failed["error"]) == ("error", "EMFILE")
            assert (await trio.to_thread.run_sync(pushd, "health", server.grpc)).returncode == 0
        server.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await server.wait_exit() == 0
    assert [line for line in server.lines if not line.startswith("{")] == []


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
