"""The database of a fault run: `pushd db` as a process of its own, durable, to be restarted, killed and filled up.

Unlike the server of the other suites it runs with fsync on, as an operator's does: what was acknowledged must survive
the end of any process. Its files lie in memory where there is room (`data_folder`); there fsync writes nowhere.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import trio
from psycopg.conninfo import conninfo_to_dict

from pushd.store import embedded
from tests.support.lifeline import lifeline

START_S = 90.0  # generous: a crashed cluster recovers first, and the machine may be busy
STOP_S = 90.0
ROOM_BYTES = 2**31  # in memory, or a folder on disk has to do
_numbers = itertools.count(1)


async def until(condition: Callable[[], object] | Callable[[], Awaitable[object]], within_s: float = 60.0) -> None:
    """Wait, on the real clock, for something another process brings about; `condition` may be sync or async."""
    with trio.fail_after(within_s):
        while True:
            met = condition()
            if await met if isinstance(met, Awaitable) else met:
                return
            await trio.sleep(0.03)


class DbProcess:
    """`pushd db` on one folder. `prefix` is put in front of the command, `environ` is added to its environment."""

    def __init__(self, folder: Path, *, prefix: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.url = ""
        self._prefix = prefix
        self._environ = dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._server_pid = -1

    @property
    def socket(self) -> Path:
        """Where the server listens."""
        return self.folder / "socket" / ".s.PGSQL.5432"

    @property
    def pid(self) -> int:
        """Of the `pushd db` process."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is over."""
        return self._process is None or self._process.poll() is not None

    @property
    def postmaster_pid(self) -> int:
        return int((self.folder / "postgres" / "postmaster.pid").read_text().splitlines()[0])

    def start_now(self) -> None:
        """Start it and return once the server takes connections."""
        self._launch()
        self._wait_url()

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "pushd", "db", "--data-dir", str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._environ},
        )
        lifeline().watch(self.pid, signal.SIGTERM)  # so that it ends its PostgreSQL too

    def _wait_url(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        self.url = self._process.stdout.readline().decode().strip() if readable else ""
        assert self.url, "the database did not start"
        # Its folder may lie in a mount namespace of its own.
        lock_file = Path(f"/proc/{self.pid}/root{self.folder.resolve()}/postgres/postmaster.pid")
        self._server_pid = int(lock_file.read_text().splitlines()[0])

    def end_now(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal that ends it, and see it end.

        Raises:
            AssertionError: it did not end; it has been killed.
        """
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.send_signal(signum)
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pushd db did not end by {signum.name}") from None
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            lifeline().forget(self.pid)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def end_server_now(self) -> None:
        """End a PostgreSQL that a killed `pushd db` left behind."""
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            deadline = time.monotonic() + STOP_S / 3
            while self._has_server():
                with suppress(ProcessLookupError):
                    os.kill(self._server_pid, signum)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)

    def _has_server(self) -> bool:
        try:
            argv = Path(f"/proc/{self._server_pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return os.fsencode(self.folder.resolve() / "postgres") in argv

    def mend(self) -> None:
        """Up again, whatever a run that failed has left."""
        if self.has_ended or not self._answers():
            with suppress(AssertionError):
                self.end_now(signal.SIGKILL)
            self.start_now()

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.url, connect_timeout=10) as conn:
                conn.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    async def start(self) -> None:
        """`start_now` beside other tasks."""
        with trio.fail_after(START_S):
            self._launch()
            await trio.to_thread.run_sync(self._wait_url, abandon_on_cancel=True)

    async def stop(self) -> None:
        """End it as an operator would."""
        await trio.to_thread.run_sync(self.end_now)

    async def kill(self) -> None:
        """Kill `pushd db` without notice; its PostgreSQL runs on, until the next start replaces it."""
        await trio.to_thread.run_sync(self.end_now, signal.SIGKILL)

    async def crash(self) -> None:
        """End PostgreSQL without a checkpoint, as a power cut does, and `pushd db` with it."""
        os.kill(self.postmaster_pid, signal.SIGQUIT)
        await until(lambda: embedded._postmaster_pid(self.folder / "postgres") is None)
        await self.kill()

    async def create(self) -> str:
        """URL of a new empty database."""
        name = f"faults_{next(_numbers)}"
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute(f"CREATE DATABASE {name}")
        return self.url.replace("///postgres?", f"///{name}?")

    def drop(self, url: str) -> None:
        """Remove a database, whoever is connected to it."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute(f"DROP DATABASE IF EXISTS {conninfo_to_dict(url)['dbname']} WITH (FORCE)")


@contextmanager
def running_db(
    folder: Path, *, prefix: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[DbProcess]:
    """A started `pushd db`; it and its PostgreSQL are gone at the end, whatever happened."""
    db = DbProcess(folder, prefix=prefix, environ=environ)
    try:
        db.start_now()
        yield db
    finally:
        try:
            db.end_now()
        finally:
            db.end_server_now()


@contextmanager
def data_folder() -> Iterator[Path]:
    """A folder for a cluster, in memory where there is room, and gone at the end, whatever happens to the run.

    An fsync that stalls for seconds would end a term that no fault of the run explains. What a crash of the server
    leaves is the same in memory as on disk: files keep what was written to them when a process ends.
    """
    memory = Path("/dev/shm")
    is_roomy = _is_tmpfs(memory) and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ROOM_BYTES
    place = Path(tempfile.mkdtemp(prefix="pushd-", dir=memory if is_roomy else None))  # short: it holds a socket
    with lifeline().folder(place):
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _is_tmpfs(place: Path) -> bool:
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    return any(mount[1:3] == [str(place), "tmpfs"] for mount in mounts)


def through(url: str, port: int) -> str:
    """The same database through a proxy on a loopback port."""
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts['user']}@127.0.0.1:{port}/{parts['dbname']}?sslmode=disable"
