"""A streaming replica of a fault run's database: pg_basebackup, a standby, and its lag on command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import trio

from pushd.store import embedded
from tests.faults.cluster import START_S, DbProcess, until
from tests.support.lifeline import lifeline


class Replica:
    """A physical standby on a folder of its own. What takes a while is done beside other tasks."""

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

    def start_now(self) -> None:
        """Start it and return once it can be read."""
        # A standby must have room for as many locks and sessions as its primary, which `pushd db` gives so much.
        settings = embedded.SETTINGS | embedded.settings_for(20, 1_000) | {"wal_retrieve_retry_interval": "200ms"}
        log_fd = embedded._open_log(self._folder)
        try:
            cluster = self._folder / "postgres"
            self._process = embedded._launch(self._account, cluster, self._socket_dir, settings, log_fd)
        finally:
            os.close(log_fd)
        lifeline().watch(self._process.pid, signal.SIGINT)
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, (self._folder / "postgres.log").read_text()
            try:
                self.ask("SELECT 1")
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop_now(self) -> None:
        """End it without ceremony; what it has replayed stays."""
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_S)
        finally:
            self._process.kill()
            self._process.wait()
            lifeline().forget(self._process.pid)

    def ask(self, statement: str, *parameters: Any, url: str | None = None) -> Any:
        """The first column of a statement's first row; `url` names a database of the primary."""
        place = self.url(url) if url is not None else f"host={self._socket_dir} user=pushd dbname=postgres"
        with psycopg.connect(place, autocommit=True) as conn:
            row = conn.execute(statement.encode(), parameters or None).fetchone()
            return row and row[0]

    def settled(self, url: str) -> int:
        """The closed allocation boundary that it shows."""
        return int(self.ask("SELECT closed_sequence_id FROM allocation_boundary", url=url))

    def shown(self, url: str) -> int:
        """The highest row that a page read from it can hold."""
        return int(self.ask(_SHOWN, url=url))

    async def settled_without(self, url: str, recipient_id: bytes) -> int:
        """The boundary that it shows together with the absence of a recipient, once it shows that."""
        found: list[int] = []

        def is_gone() -> bool:
            boundary = self.ask(_SETTLED_WITHOUT, recipient_id, url=url)
            found.extend([] if boundary is None else [int(boundary)])
            return bool(found)

        await until(is_gone)
        return found[0]

    async def start(self) -> None:
        """Start it and return once it can be read."""
        await trio.to_thread.run_sync(self.start_now)

    async def stop(self) -> None:
        """End it without ceremony; what it has replayed stays."""
        await trio.to_thread.run_sync(self.stop_now)

    async def mend(self) -> None:
        """Up and up to date, whatever a run that failed has left."""
        if self._process is None or self._process.poll() is not None:
            await self.start()
        await self.lag(0)
        await self.resume()
        with psycopg.connect(self._primary.url) as conn:
            # Something new to replay: where the next record would go may lie beyond a header that nobody wrote yet.
            ((position,),) = conn.execute("SELECT pg_log_standby_snapshot()::text")
        await until(lambda: self.ask("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", position))

    async def pause(self) -> None:
        """Stop replaying: from now on it shows the past."""
        self.ask("SELECT pg_wal_replay_pause()")
        await until(lambda: self.ask("SELECT pg_get_wal_replay_pause_state()") == "paused")

    async def resume(self) -> None:
        """Replay what has come in meanwhile, and go on."""
        self.ask("SELECT pg_wal_replay_resume()")

    async def lag(self, ms: int) -> None:
        """Show every commit so much later than the primary does."""
        with (self._folder / "postgres" / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"recovery_min_apply_delay = {ms}\n")
        self.ask("SELECT pg_reload_conf()")
        # The process that replays is told by the time a new session reads it.
        await until(
            lambda: self.ask("SELECT setting FROM pg_settings WHERE name = 'recovery_min_apply_delay'") == str(ms)
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = embedded._run(self._account, [str(embedded.binaries() / program), *arguments])
        assert done.returncode == 0, done.stderr.decode(errors="replace")


def _quoted(path: Path) -> str:
    return str(path).replace("/", "%2F")


_SHOWN = (
    "SELECT max(sequence_id) FROM envelopes CROSS JOIN allocation_boundary"
    " WHERE push_eligible AND sequence_id <= closed_sequence_id"
)
_SETTLED_WITHOUT = (
    "SELECT closed_sequence_id FROM allocation_boundary"
    " WHERE NOT EXISTS (SELECT FROM push_recipient WHERE recipient_id = %s)"
)


@contextmanager
def running_replica(primary: DbProcess, folder: Path) -> Iterator[Replica]:
    """A replica that streams from `primary`; gone at the end."""
    replica = Replica(primary, folder)
    try:
        replica.create()
        replica.start_now()
        yield replica
    finally:
        replica.stop_now()
        shutil.rmtree(folder, ignore_errors=True)
