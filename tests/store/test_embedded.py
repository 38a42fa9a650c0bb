"""The embedded server: private, restartable, and harmless to everything outside its folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pushd.errors import StartError
from pushd.store import embedded

FAST = {"fsync": "off", "shared_buffers": "1MB", "max_locks_per_transaction": "64"}


@pytest.fixture
def data_dir() -> Iterator[Path]:
    # Not tmp_path: its names are longer than a socket's path may be.
    folder = Path(tempfile.mkdtemp(prefix="pushd-"))
    yield folder / "data"
    shutil.rmtree(folder)


def _modes(root: Path) -> dict[str, int]:
    places = [root, *root.parents]
    return {str(place): stat.S_IMODE(place.stat().st_mode) for place in places}


def test_survives_sigkill_of_its_owner_and_loses_nothing(data_dir: Path) -> None:
    code = (
        "import sys, time, pathlib, psycopg; from pushd.store import embedded;"
        "s = embedded.start(pathlib.Path(sys.argv[1]), {'shared_buffers': '1MB'});"
        "c = psycopg.connect(s.url, autocommit=True); c.execute('CREATE TABLE kept AS SELECT 42 AS n');"
        "print(s.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(data_dir)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        orphan = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    os.kill(orphan, 0)  # the server outlived its owner
    server = embedded.start(data_dir, FAST)
    try:
        assert server.replaced
        assert server.pid != orphan
        with psycopg.connect(server.url) as conn:
            assert conn.execute("SELECT n FROM kept").fetchone() == (42,)
    finally:
        server.stop()


def test_S098_the_server_is_not_given_the_secrets_of_its_owner(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATORS_APNS_KEY", "private-key")
    monkeypatch.setenv("PGHOST", "elsewhere.example")
    server = embedded.start(data_dir, FAST)
    try:
        with psycopg.connect(server.url) as conn:
            conn.execute("CREATE TEMP TABLE seen (line text)")
            conn.execute("COPY seen FROM PROGRAM 'env'")
            names = {line.partition("=")[0] for (line,) in conn.execute("SELECT line FROM seen").fetchall()}
        assert "PATH" in names
        assert not names & {"OPERATORS_APNS_KEY", "PGHOST"}
    finally:
        server.stop()


def test_changes_no_mode_outside_and_lets_no_other_user_in(data_dir: Path) -> None:
    program = embedded.binaries()
    before = _modes(data_dir.parent) | _modes(program)
    server = embedded.start(data_dir, FAST)
    try:
        assert _modes(data_dir.parent) | _modes(program) == before
        for folder in (data_dir, data_dir / "socket", data_dir / "postgres"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with psycopg.connect(server.url) as conn:
            assert conn.execute("SHOW listen_addresses").fetchone() == ("",)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            # The folder above is opened on purpose, so that only the server's own protection is left.
            data_dir.parent.chmod(0o755)
            attempt = subprocess.run(
                [
                    "/usr/bin/env",
                    "python3",
                    "-c",
                    "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])",
                    str(data_dir / "socket" / ".s.PGSQL.5432"),
                ],
                user=nobody.pw_uid,
                group=nobody.pw_gid,
                extra_groups=[],
                env={"PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert "PermissionError" in attempt.stderr
    finally:
        server.stop()


def test_folder_in_use_is_refused_until_it_is_free(data_dir: Path) -> None:
    first = embedded.start(data_dir, FAST)
    alias = data_dir.parent / "alias"
    alias.symlink_to(data_dir)
    assert embedded.running_url(alias) == embedded.running_url(data_dir) == first.url
    with pytest.raises(StartError, match="in use by another pushd"):
        embedded.start(data_dir, FAST)
    first.stop()
    assert embedded.running_url(data_dir) is None
    second = embedded.start(data_dir, FAST)
    assert not second.replaced
    second.stop()


def test_data_of_another_version_is_refused(data_dir: Path) -> None:
    (data_dir / "postgres").mkdir(parents=True)
    (data_dir / "postgres" / "PG_VERSION").write_text("99\n")
    with pytest.raises(StartError, match="holds PostgreSQL 99 data"):
        embedded.start(data_dir, FAST)


def test_interrupted_creation_is_begun_again(data_dir: Path) -> None:
    (data_dir / "postgres.new" / "base").mkdir(parents=True)
    server = embedded.start(data_dir, FAST)
    server.stop()
    assert not (data_dir / "postgres.new").exists()


@pytest.mark.parametrize(
    ("place", "text"),
    [("x" * 120, "too long for a Unix socket"), ("file/data", "cannot be used")],
)
def test_unusable_folder_is_named(data_dir: Path, place: str, text: str) -> None:
    (data_dir.parent / "file").write_text("")
    with pytest.raises(StartError, match=text):
        embedded.start(data_dir.parent / place, FAST)


def test_refused_namespaces_fall_back_to_nobody_or_say_so(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root needs another account")
    monkeypatch.setattr(embedded.shutil, "which", lambda _name: None)
    with pytest.raises(StartError, match="user namespaces are refused"):
        embedded.start(data_dir, FAST)  # the folder above has mode 0700
    assert sorted(os.listdir(data_dir)) == ["lock", "socket"]

    data_dir.parent.chmod(0o755)
    nobody = pwd.getpwnam("nobody")
    reachable = subprocess.run(
        ["test", "-x", str(embedded.binaries() / "postgres")], user=nobody.pw_uid, extra_groups=[], check=False
    )
    if reachable.returncode != 0:
        pytest.skip("the user nobody cannot reach this checkout")
    server = embedded.start(data_dir, FAST)
    try:
        assert Path(f"/proc/{server.pid}").stat().st_uid == nobody.pw_uid
        with psycopg.connect(server.url) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
    finally:
        server.stop()
