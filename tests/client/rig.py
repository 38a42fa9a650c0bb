"""A client with a fault point between it and its backend, driven one run of the task at a time."""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import field, frozen

from pushd.client import Consent, NotificationConfig, fcm
from pushd.client import settings as settings_row
from pushd.client.backend import Backend
from pushd.client.client import Client
from pushd.client.database import open_database, transaction
from pushd.client.decisions import Settings
from pushd.client.errors import CallFailed
from pushd.client.groups import group_topic
from pushd.errors import Code
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire

INSTALLATION = bytes(range(32))
WELCOME = b"\x01" + INSTALLATION
TOKEN = "registration-token-1"
CONFIG = NotificationConfig(fcm(TOKEN))
ONLY_GROUPS = NotificationConfig(fcm(TOKEN), include_welcomes=False)

HOUR_NS = 3_600 * 10**9
EPOCH_NS = 30 * 24 * HOUR_NS


def gid(number: int) -> bytes:
    return number.to_bytes(16, "big")


def topic(number: int) -> bytes:
    return group_topic(gid(number))


@frozen(eq=False)
class Pause:
    """Holds a call: before the backend sees it, or (`after`) when the backend has done it and the answer is due."""

    after: bool = False
    reached: trio.Event = field(factory=trio.Event)
    released: trio.Event = field(factory=trio.Event)
    answer: Code | None = None
    """What the released call ends with, instead of what the backend says."""


Fault = Code | Pause | str
"""A status; a pause; "stall": no answer ever; "cut": the backend does it and the answer is lost."""


class FaultPoint:
    """Passes calls on to a backend, notes them, and spoils those it was told to."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._faults: dict[str, deque[Fault]] = {"register": deque(), "unregister": deque(), "update": deque()}
        self.always: dict[str, Fault] = {}
        self.edit_state: Callable[[wire.RecipientState], None] = lambda state: None
        self.calls: list[tuple[str, Any]] = []

    def next(self, method: str, *faults: Fault) -> None:
        self._faults[method].extend(faults)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def take(self) -> list[str]:
        """The names of the calls since the last take."""
        names = self.names
        self.calls.clear()
        return names

    async def register(self, request: wire.RegisterRequest) -> wire.RecipientState:
        return await self._pass("register", request, self._backend.register)

    async def unregister(self, request: wire.UnregisterRequest) -> None:
        return await self._pass("unregister", request, self._backend.unregister)

    async def update_subscriptions(self, request: wire.UpdateSubscriptionsRequest) -> wire.RecipientState:
        return await self._pass("update", request, self._backend.update_subscriptions)

    async def publish(self, request: Any) -> Any:
        return await self._backend.publish(request)

    async def query(self, request: Any) -> Any:
        return await self._backend.query(request)

    async def _pass(self, name: str, request: Any, call: Callable[[Any], Any]) -> Any:
        self.calls.append((name, request))
        queue = self._faults[name]
        fault = queue.popleft() if queue else self.always.get(name)
        match fault:
            case None:
                answer = await call(request)
            case Code():
                await trio.lowlevel.checkpoint()
                raise CallFailed(fault)
            case Pause(after=False):
                fault.reached.set()
                await fault.released.wait()
                if fault.answer is not None:
                    raise CallFailed(fault.answer)
                answer = await call(request)
            case Pause():
                answer = await call(request)
                fault.reached.set()
                await fault.released.wait()
            case "stall":
                await trio.sleep_forever()
            case "cut":
                await call(request)
                raise CallFailed(Code.UNAVAILABLE)
        if isinstance(answer, wire.RecipientState):
            self.edit_state(answer)
        return answer


@frozen
class Row:
    """One row of the uploaded set."""

    epoch_base: int | None
    fingerprint: bytes | None
    include_commits: bool
    stale: bool


class Rig:
    """A client without a running task runner, its file, and the clock both go by."""

    def __init__(self, db: sqlite3.Connection, path: Path, faults: FaultPoint, clock: Clock, *, runner: bool) -> None:
        self.db = db
        self.path = path
        self.faults = faults
        self.clock = clock
        self.client = Client(db, faults, clock.now_ns, runner=runner)

    async def step(self) -> bool:
        """One run of the task, if it is due."""
        return await self.client.tasks.run_due()

    async def settle(self) -> None:
        """Runs until nothing is due."""
        with trio.fail_after(60):
            while await self.step():
                pass

    async def enabled(self, config: NotificationConfig = CONFIG) -> None:
        """Enable and bring everything up."""
        await self.client.enable_notifications(config)
        await self.settle()
        self.faults.take()

    def groups(self, *numbers: int, consent: Consent = Consent.ALLOWED) -> None:
        with transaction(self.db):
            self.db.executemany(
                "INSERT INTO topic (topic, kind, member, consent) VALUES (?, 1, 1, ?)",
                ((topic(number), consent) for number in numbers),
            )
        self.client.wake()

    @property
    def settings(self) -> Settings:
        return settings_row.load(self.db)

    @property
    def recipient_id(self) -> bytes:
        identity = self.settings.identity
        assert identity is not None
        return identity.recipient_id

    @property
    def uploaded(self) -> dict[bytes, Row]:
        rows = self.db.execute(
            "SELECT topic, hmac_epoch_base, root_key_fingerprint, include_commits, stale FROM uploaded"
        )
        return {
            uploaded: Row(base, fingerprint, bool(commits), bool(stale))
            for uploaded, base, fingerprint, commits, stale in rows
        }

    @property
    def stale(self) -> int:
        return sum(row.stale for row in self.uploaded.values())

    @property
    def tasks(self) -> list[tuple[str, int, int]]:
        """(kind, attempts, nanoseconds from now until due) of every stored task."""
        rows = self.db.execute("SELECT kind, attempts, due_ns FROM task ORDER BY id")
        return [(kind, attempts, due_ns - self.clock.now_ns()) for kind, attempts, due_ns in rows]

    def set(self, column: str, value: object) -> None:
        """Change the settings row behind the client's back."""
        with transaction(self.db):
            self.db.execute(f"UPDATE settings SET {column} = ?", (value,))


class Clock:
    """A wall clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.time_ns = time.time_ns()  # near the server's, so that expiry times make sense

    def now_ns(self) -> int:
        return self.time_ns

    def advance(self, duration_ns: int) -> None:
        self.time_ns += duration_ns


@contextmanager
def open_rig(
    path: Path, backend: Backend, *, clock: Clock | None = None, runner: bool = True, faults: FaultPoint | None = None
) -> Iterator[Rig]:
    with open_database(path, INSTALLATION) as db:
        db.execute("PRAGMA synchronous = OFF")  # these tests are not about power cuts
        yield Rig(db, path, faults or FaultPoint(backend), clock or Clock(), runner=runner)


@contextmanager
def copied(rig: Rig, path: Path) -> Iterator[Rig]:
    """A client on a copy of the file, as after a restart of the app on a restored backup."""
    with sqlite3.connect(path) as target:
        rig.db.backup(target)
    target.close()
    with open_rig(path, rig.faults, clock=rig.clock, faults=rig.faults) as other:
        yield other
