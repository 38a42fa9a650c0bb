"""Durable tasks, run one at a time, the earliest deadline first.

A task is a kind and a payload; adding the same pair again is the same task. It lives in the local file, so it survives
the process; its handler is code, registered at every start. Between two runs of a recurring task every other task that
is due gets its turn, which is what keeps a stalled backend from holding up the messenger's own work (PUSH-103).
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import anyio
from attrs import field, frozen

from pushd.client.database import transaction
from pushd.client.decisions import SECOND_NS
from pushd.client.errors import ClientError

LOG = logging.getLogger("pushd.client")

MAX_SLEEP_NS = 86_400 * SECOND_NS
_UNWRITABLE_S = 60.0  # as long as a first retry: what has run and could not be recorded runs again after it

Handler = Callable[[bytes], Awaitable[int | None]]
"""Gets the payload; returns when to run again, in nanoseconds since 1970, or None when the task is done.
Raises `TryAgain` to be run again after a backoff."""


class TryAgain(ClientError):
    """A task could not do its work now."""

    def __init__(self) -> None:
        super().__init__("the task is tried again later")


@frozen
class Backoff:
    """How long a failed task waits: `first_ns`, then twice as long each time, up to `longest_ns`.

    After `max_attempts` failures in a row the task is dropped; None means never.
    """

    first_ns: int = 60 * SECOND_NS
    longest_ns: int = 3_600 * SECOND_NS
    max_attempts: int | None = None

    def delay_ns(self, failures: int) -> int:
        """The wait after that many failures in a row."""
        # The shift is capped: a task that fails for a year must not double thousands of times.
        return min(self.first_ns << min(failures - 1, 64), self.longest_ns)

    def is_exhausted(self, failures: int) -> bool:
        """Whether that many failures in a row are the end of it."""
        return self.max_attempts is not None and failures >= self.max_attempts


@frozen
class _Task:
    id: int
    kind: str
    payload: bytes = field(repr=False)
    due_ns: int
    attempts: int
    expires_ns: int | None
    revision: int


class Tasks:
    """The tasks of one local file.

    Args:
        db: the file.
        now_ns: the wall clock, as deadlines outlive the process.
    """

    def __init__(self, db: sqlite3.Connection, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._db = db
        self._now_ns = now_ns
        self._handlers: dict[str, tuple[Handler, Backoff]] = {}
        self._woken: set[str] = set()
        self._changed = anyio.Event()
        self._slept_for: int | None = None
        self._running: int | None = None

    def handle(self, kind: str, handler: Handler, backoff: Backoff | None = None) -> None:
        """Register the code of a kind of task. Tasks without a handler wait in the file for one."""
        self._handlers[kind] = (handler, backoff or Backoff())
        self._changed.set()

    def add(self, kind: str, payload: bytes = b"", *, due_ns: int | None = None, expires_ns: int | None = None) -> None:
        """Store a task, or bring the same one forward unless it is waiting out a failure.

        While it runs, the same one again is a new one: it runs once more.

        Args:
            kind: the name its handler has; names that begin with "pushd." are the SDK's own.
            payload: what the handler gets.
            due_ns: when to run, in nanoseconds since 1970; now when None.
            expires_ns: when it is dropped if it has not succeeded; never when None.
        """
        with transaction(self._db):
            self._db.execute(
                """INSERT INTO task (kind, payload, due_ns, expires_ns) VALUES (:kind, :payload, :due, :expires)
                   ON CONFLICT (kind, payload) DO UPDATE SET revision = revision + 1,
                     due_ns = CASE WHEN id = :running THEN :due
                                   WHEN attempts = 0 THEN min(due_ns, :due) ELSE due_ns END""",
                {
                    "running": self._running,
                    "kind": kind,
                    "payload": payload,
                    "due": self._now_ns() if due_ns is None else due_ns,
                    "expires": expires_ns,
                },
            )
        self._changed.set()

    def restart(self, kind: str, due_ns: int) -> None:
        """Store the task without payload of a kind anew: no failures, due at `due_ns`. Inside a transaction."""
        self._db.execute(
            """INSERT INTO task (kind, payload, due_ns) VALUES (:kind, x'', :due)
               ON CONFLICT (kind, payload) DO UPDATE SET due_ns = :due, attempts = 0, revision = revision + 1""",
            {"kind": kind, "due": due_ns},
        )
        self._changed.set()  # the runner, asleep for up to a day, looks once the caller awaits: after the commit

    def record_failure(self, kind: str, attempts: int) -> None:
        """Let the task without payload of a kind wait as if it had failed that often."""
        _, backoff = self._handlers[kind]
        with transaction(self._db):
            self._db.execute(
                "UPDATE task SET attempts = ?, due_ns = ? WHERE kind = ? AND payload = x''",
                (attempts, self._now_ns() + backoff.delay_ns(attempts), kind),
            )
        self._changed.set()

    def start_now(self, kind: str) -> None:
        """Run the task without payload of a kind at once, failures or not: for the start of a process."""
        now = self._now_ns()
        with transaction(self._db):
            self._db.execute(
                """INSERT INTO task (kind, payload, due_ns) VALUES (:kind, x'', :now)
                   ON CONFLICT (kind, payload) DO UPDATE SET due_ns = :now""",
                {"kind": kind, "now": now},
            )
        self._changed.set()

    def wake(self, kind: str) -> None:
        """Run the tasks of a kind soon, except those that wait out a failure. Writes nothing and cannot fail.

        A wake during a run counts for after it. It is lost with the process, and costs one period then.
        """
        self._woken.add(kind)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Run tasks for ever."""
        while True:
            self._changed = anyio.Event()
            try:
                idle = not await self.run_due()
            except sqlite3.OperationalError:
                # A full disk. The outcome of a task is not worth the messenger's life; its next run makes up for it.
                LOG.error("the local file cannot be written")
                await anyio.sleep(_UNWRITABLE_S)
            else:
                if idle:
                    await self._sleep()

    async def run_due(self) -> bool:
        """Run the one task that is due first; False when none is due."""
        self._bring_forward()
        task = self._next()
        if task is None or (task.due_ns > self._now_ns() and task.id != self._slept_for):
            return False
        self._slept_for = None
        self._running = task.id
        try:
            await self._attempt(task)
        finally:
            self._running = None
        return True

    async def _sleep(self) -> None:
        task = self._next()
        wait = MAX_SLEEP_NS if task is None else max(task.due_ns - self._now_ns(), 0)
        with anyio.move_on_after(min(wait, MAX_SLEEP_NS) / SECOND_NS) as sleep:
            await self._changed.wait()
        # Whoever has slept its whole wait runs, even if the wall clock was set back meanwhile.
        slept_all = task is not None and sleep.cancelled_caught and wait <= MAX_SLEEP_NS
        self._slept_for = task.id if task is not None and slept_all else None

    def _bring_forward(self) -> None:
        while self._woken:
            kind = self._woken.pop()
            self._db.execute(
                "UPDATE task SET due_ns = :now WHERE kind = :kind AND attempts = 0 AND due_ns > :now",
                {"kind": kind, "now": self._now_ns()},
            )

    def _next(self) -> _Task | None:
        marks = ", ".join("?" * len(self._handlers))
        row = self._db.execute(
            f"""SELECT id, kind, payload, due_ns, attempts, expires_ns, revision FROM task
                WHERE kind IN ({marks}) ORDER BY due_ns, id LIMIT 1""",
            tuple(self._handlers),
        ).fetchone()
        return None if row is None else _Task(*row)

    async def _attempt(self, task: _Task) -> None:
        if task.expires_ns is not None and task.expires_ns <= self._now_ns():
            LOG.warning("a task of kind %s has expired", task.kind)
            self._finish(task)
            return
        handler, backoff = self._handlers[task.kind]
        try:
            due_ns = await handler(task.payload)
        except TryAgain:
            self._failed(task, backoff)
        except Exception as exc:
            # The edge of one task: a handler that breaks on its payload must not take the messenger, or the tasks
            # behind it, along. The class alone is logged, because texts and tracebacks may quote what is private.
            LOG.error("a task of kind %s broke with %s", task.kind, type(exc).__name__)
            self._failed(task, backoff)
        else:
            if due_ns is None:
                self._finish(task)
            else:
                self._reschedule(task, due_ns, 0)

    def _failed(self, task: _Task, backoff: Backoff) -> None:
        failures = task.attempts + 1
        if backoff.is_exhausted(failures):
            LOG.warning("a task of kind %s was given up after %d attempts", task.kind, failures)
            self._finish(task)
        else:
            self._reschedule(task, self._now_ns() + backoff.delay_ns(failures), failures)

    # A task that was added again while it ran is a new one in the old row: what has just ended says nothing about it.

    def _reschedule(self, task: _Task, due_ns: int, attempts: int) -> None:
        self._db.execute(
            "UPDATE task SET due_ns = ?, attempts = ? WHERE id = ? AND revision = ?",
            (due_ns, attempts, task.id, task.revision),
        )

    def _finish(self, task: _Task) -> None:
        self._db.execute("DELETE FROM task WHERE id = ? AND revision = ?", (task.id, task.revision))
