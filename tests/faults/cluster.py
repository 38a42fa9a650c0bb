"""The database of a fault run: `pushd db` as a process of its own, durable, to be restarted, killed and filled up.

Unlike the server of the other suites it runs with fsync on: what was acknowledged must survive.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
import trio
from psycopg.conninfo import conninfo_to_dict

from pushd.store import embedded

START_S = 90.0  # generous: a crashed cluster recovers first, and the machine may be busy
_numbers = itertools.count(1)


async def until(condition: object, within_s: float = 60.0) -> None:
    """Wait, on the real clock, for something another process brings about; `condition` may be sync or async."""
    assert callable(condition)
    with trio.fail_after(within_s):
        while True:
            met = condition()
            if hasattr(met, "__await__"):
                met = await met
            if met:
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
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "pushd", "db", "--data-dir", str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._environ},
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()
        assert self.url, "the database did not start"

    def end_now(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal that ends it, and see it end."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signum)
            self._process.wait(START_S)
            if self._process.stdout is not None:
                self._process.stdout.close()

    async def start(self) -> None:
        """`start_now` beside other tasks."""
        with trio.fail_after(START_S):
            await trio.to_thread.run_sync(self.start_now, abandon_on_cancel=True)

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
        db.end_now()
        embedded._stop_leftover(folder / "postgres")


def through(url: str, port: int) -> str:
    """The same database through a proxy on a loopback port."""
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts['user']}@127.0.0.1:{port}/{parts['dbname']}?sslmode=disable"
