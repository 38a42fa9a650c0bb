"""A streaming replica of a fault run's database: pg_basebackup, a standby, and its lag on command."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from pushd.store import embedded
from tests.faults.cluster import START_S, DbProcess


class Replica:
    """A physical standby on a folder of its own."""

    def __init__(self, primary: DbProcess, folder: Path) -> None:
        self._primary = primary
        self._folder = folder
        self._socket_dir = folder / "socket"
        self._account = embedded._account(folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self._socket_dir / ".s.PGSQL.5432"

    def url(self, primary_url: str) -> str:
        """Where the replica shows the database of this URL."""
        return primary_url.replace(_quoted(self._primary.folder / "socket"), _quoted(self._socket_dir))

    def create(self) -> None:
        """Copy the primary while it runs."""
        self._socket_dir.mkdir(mode=0o700, parents=True)
        self._run(
            "pg_basebackup",
            f"--pgdata={self._folder / 'postgres'}",
            f"--host={self._primary.folder / 'socket'}",
            "--username=pushd",
            "--checkpoint=fast",
            "--write-recovery-conf",
        )

    def start(self) -> None:
        """Start it and return once it can be read."""
        # A standby must have room for as many locks and sessions as its primary, which `pushd db` gives so much.
        settings = embedded.SETTINGS | embedded.settings_for(20, 1_000) | {"wal_retrieve_retry_interval": "200ms"}
        self._process = embedded._launch(self._account, self._folder / "postgres", self._socket_dir, settings)
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, (self._folder / "postgres.log").read_text()
            try:
                self.ask("SELECT 1")
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self) -> None:
        """End it without ceremony; what it has replayed stays."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_S)

    def ask(self, statement: str) -> Any:
        """The first column of a statement's first row."""
        with psycopg.connect(host=str(self._socket_dir), user="pushd", dbname="postgres", autocommit=True) as conn:
            row = conn.execute(statement.encode()).fetchone()
            return row and row[0]

    def pause(self) -> None:
        """Stop replaying: from now on it shows the past."""
        self.ask("SELECT pg_wal_replay_pause()")
        deadline = time.monotonic() + START_S
        while self.ask("SELECT pg_get_wal_replay_pause_state()") != "paused":
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def resume(self) -> None:
        """Replay what has come in meanwhile, and go on."""
        self.ask("SELECT pg_wal_replay_resume()")

    def lag(self, ms: int) -> None:
        """Show every commit so much later than the primary does."""
        with (self._folder / "postgres" / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"recovery_min_apply_delay = {ms}\n")
        self.ask("SELECT pg_reload_conf()")

    def _run(self, program: str, *arguments: str) -> None:
        done = embedded._run(self._account, [str(embedded.binaries() / program), *arguments])
        assert done.returncode == 0, done.stderr.decode(errors="replace")


def _quoted(path: Path) -> str:
    return str(path).replace("/", "%2F")


@contextmanager
def running_replica(primary: DbProcess, folder: Path) -> Iterator[Replica]:
    """A replica that streams from `primary`; gone at the end."""
    replica = Replica(primary, folder)
    replica.create()
    replica.start()
    try:
        yield replica
    finally:
        replica.stop()
        shutil.rmtree(folder, ignore_errors=True)
