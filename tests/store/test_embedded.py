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
from contextlib import suppress
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
    [
        ("x" * 120, "too long for a Unix socket"),
        ("file/data", "cannot be used: Not a directory"),
        ("a,b/data", "holds a comma"),
        ("circle/data", "cannot be used: Too many levels of symbolic links"),
    ],
)
def test_unusable_folder_is_named(data_dir: Path, place: str, text: str) -> None:
    (data_dir.parent / "file").write_text("")
    (data_dir.parent / "circle").symlink_to(data_dir.parent / "circle")
    with pytest.raises(StartError, match=text):
        embedded.start(data_dir.parent / place, FAST)
    assert not (data_dir.parent / "a,b").exists()


@pytest.mark.parametrize("place", ["file", "circle"])
def test_a_place_that_is_no_folder_is_not_one_without_a_server(data_dir: Path, place: str) -> None:
    (data_dir.parent / "file").write_text("")
    (data_dir.parent / "circle").symlink_to(data_dir.parent / "circle")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        embedded.running_url(data_dir.parent / place)


def test_a_folder_of_another_user_is_not_one_without_a_server(data_dir: Path) -> None:
    (data_dir / "postgres").mkdir(parents=True)
    code = "import os, pathlib, sys; from pushd.store import embedded;"
    if os.geteuid() == 0:
        code += f"os.seteuid({pwd.getpwnam('nobody').pw_uid});"
    data_dir.chmod(0o700 if os.geteuid() == 0 else 0)
    code += "embedded.running_url(pathlib.Path(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", code, data_dir], capture_output=True, text=True, check=False)
    data_dir.chmod(0o700)
    assert result.stderr.splitlines()[-1].startswith("PermissionError")


PRIVATE = "topic-of-somebody"


def test_the_log_tells_why_the_server_failed_and_nothing_of_a_row(data_dir: Path) -> None:
    server = embedded.start(data_dir, FAST)
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE TABLE tokens (token text UNIQUE CHECK (length(token) < 20), n integer NOT NULL)")
            for _ in range(2):
                with suppress(psycopg.errors.UniqueViolation):
                    conn.execute("INSERT INTO tokens VALUES (%s, 1)", (PRIVATE,))
            with pytest.raises(psycopg.errors.CheckViolation):
                conn.execute("INSERT INTO tokens VALUES (%s, 1)", (PRIVATE + PRIVATE,))
            with pytest.raises(psycopg.errors.NotNullViolation):
                conn.execute("INSERT INTO tokens VALUES (%s, NULL)", (PRIVATE[:5],))
            with pytest.raises(psycopg.errors.InvalidTextRepresentation):
                conn.execute(f"SELECT '{PRIVATE}'::integer")
            with pytest.raises(psycopg.errors.SyntaxError):
                conn.execute(f"SELEC '{PRIVATE}'")
            with pytest.raises(psycopg.errors.RaiseException):
                conn.execute(f"DO $$ BEGIN RAISE LOG 'said'; RAISE EXCEPTION '{PRIVATE}'; END $$")
            with pytest.raises(psycopg.OperationalError):
                conn.execute(f"COPY (SELECT '{PRIVATE}') TO PROGRAM 'kill -SEGV $PPID; sleep 600'")
    finally:
        server.stop()
    log = (data_dir / "postgres.log").read_text()
    assert "was terminated by signal 11" in log
    assert "LOG:  said" in log  # a line written inside of a statement, which it could quote
    for private in (PRIVATE, PRIVATE[:5], "DETAIL", "STATEMENT", "CONTEXT", "tokens"):
        assert private not in log


def test_the_log_is_kept_over_restarts_and_put_away_when_it_is_long(data_dir: Path) -> None:
    log, older = data_dir / "postgres.log", data_dir / "postgres.log.1"
    for _ in range(2):
        embedded.start(data_dir, FAST).stop()
    assert log.read_text().count("ready to accept connections") == 2
    assert not older.exists()
    with log.open("a") as file:
        file.write("x" * embedded.LOG_BYTES)
    embedded.start(data_dir, FAST).stop()
    assert log.read_text().count("ready to accept connections") == 1
    assert older.read_text().count("ready to accept connections") == 2


def test_the_line_of_a_failed_start_is_this_starts(data_dir: Path) -> None:
    embedded.start(data_dir, FAST).stop()
    with pytest.raises(StartError, match=r'did not start: .*FATAL: .*"max_connections"'):
        embedded.start(data_dir, {**FAST, "max_connections": "none"})
    control = data_dir / "postgres" / "global" / "pg_control"
    control.rename(control.with_suffix(".away"))
    with pytest.raises(StartError, match=r"did not start: .*pg_control"):
        embedded.start(data_dir, FAST)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "no output"),
        ("LOG:  one\n\n", "LOG:  one"),
        ("LOG:  one\nFATAL:  two\nLOG:  database system is shut down\n", "FATAL:  two"),
        ("PANIC:  one\nLOG:  two\nFATAL:  three\nLOG:  four\n", "FATAL:  three"),
    ],
)
def test_what_is_quoted_of_the_log(log: str, line: str) -> None:
    assert embedded.why_it_ended(log) == line


@pytest.mark.parametrize(
    ("status", "patience"),
    [(None, embedded.START_S), ("starting", embedded.RECOVERY_S), ("stopping", embedded.START_S)],
)
def test_a_recovery_is_given_more_time_than_a_server_that_says_nothing(status: str | None, patience: float) -> None:
    assert embedded.patience_s(status) == patience
    assert embedded.RECOVERY_S >= 600


def test_a_start_that_takes_too_long_leaves_no_process(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.start(data_dir, FAST).stop()
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "START_S", 0.0)
        patch.setattr(embedded, "RECOVERY_S", 0.0)
        with pytest.raises(StartError, match="did not start within 0 s"):
            embedded.start(data_dir, FAST)
    assert embedded.running_url(data_dir) is None
    embedded.start(data_dir, FAST).stop()  # neither the lock nor a process is in the way


def test_a_start_can_be_given_up(data_dir: Path) -> None:
    class GivenUp(BaseException):
        pass

    def give_up() -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        embedded.start(data_dir, FAST, give_up)
    assert embedded.running_url(data_dir) is None
    embedded.start(data_dir, FAST).stop()


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
