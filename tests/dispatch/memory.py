"""A database of lists and a provider with a script, for loops on a virtual clock."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio
from attrs import Factory, define, field, frozen

from pushd.core.suppression import HmacCheck, key_in_window
from pushd.core.window import Page, PageRequest
from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.errors import StoreError, StoreUnavailable
from pushd.model import (
    HMAC_EPOCH_NS,
    PAGE_DELIVERIES,
    Channel,
    Delivered,
    Delivery,
    DeliveryConfig,
    Outcome,
)
from pushd.stop import StopSignal
from pushd.store.dispatch import Grave
from pushd.telemetry import TERM_ENDS, Metrics
from tests.dispatch.seed import SECRET_HASH, SIGNING_KEY, recipient_id, target, topic

POLL_S = 0.1


@frozen
class Row:
    sequence_id: int
    topic: bytes
    epoch: int = 10
    commit: bool = False
    sender_hmac: bytes | None = None
    payload: bytes = b""


@frozen
class Subscription:
    recipient: int
    topic: bytes
    since: int = 0
    commits: bool = False
    epoch_base: int | None = None
    keys: tuple[bytes | None, ...] = ()


@define
class Stored:
    config: DeliveryConfig
    secret_hash: bytes = SECRET_HASH


@define(eq=False)
class MemoryStore:
    """What `DispatchStore` is, on lists, with places to fail, to block and to look."""

    rows: list[Row] = Factory(list)
    subscriptions: list[Subscription] = Factory(list)
    recipients: dict[bytes, Stored] = Factory(dict)
    boundary: int = 0
    cursor: int = 0
    lock_holder: object | None = None
    step_down_asked: bool = False
    """Somebody notified the session that holds the lock; it hears of it with its next statement's answer."""
    successor: object | None = None
    """Who gets the lock as soon as it is free."""
    expired_batches: list[int] = Factory(list)
    failures: dict[str, list[StoreError]] = Factory(lambda: defaultdict(list))
    """Errors that the next calls of a name raise."""
    gates: dict[str, trio.Event] = Factory(dict)
    """Calls of a name wait for this event."""
    delays: dict[str, float] = Factory(dict)
    """Calls of a name take this long."""
    is_deaf_to_cancels: bool = False
    """A page that was asked for arrives even if nobody waits for it any more."""
    calls: list[tuple[float, str]] = Factory(list)
    writes: list[tuple[float, int]] = Factory(list)
    severed: list[float] = Factory(list)
    page_boundaries: list[int] = Factory(list)
    """Boundaries of the snapshots that the next pages are read from; rows above do not show."""
    requests: list[tuple[PageRequest, int]] = Factory(list)
    payload_reads: list[list[int]] = Factory(list)

    def add_recipients(self, numbers: Iterable[int], channel: Channel = Channel.APNS) -> None:
        for number in numbers:
            key = SIGNING_KEY if channel is Channel.HTTP else None
            self.recipients[recipient_id(number)] = Stored(DeliveryConfig(channel, target(number, channel), key))

    def simple(self, rows: int, recipients: int = 1, channel: Channel = Channel.APNS, first_row: int = 1) -> None:
        """Rows on one topic of the channel's own, with recipients of the channel's own; all settled."""
        numbers = [int(channel) * 1_000_000 + n for n in range(recipients)]
        self.add_recipients(numbers, channel)
        self.subscriptions += [Subscription(n, topic(int(channel))) for n in numbers]
        self.rows += [Row(first_row + n, topic(int(channel))) for n in range(rows)]
        self.boundary = max(self.boundary, first_row + rows - 1)

    async def visit(self, name: str) -> None:
        self.calls.append((trio.current_time(), name))
        if name in self.gates:
            await self.gates[name].wait()
        else:
            await trio.sleep(self.delays.get(name, 0))
        if self.failures[name]:
            raise self.failures[name].pop(0)

    @asynccontextmanager
    async def open_lock_session(self) -> AsyncIterator[MemorySession]:
        await self.visit("connect")
        session = MemorySession(self)
        try:
            yield session
        finally:
            session.is_closed = True
            if self.lock_holder is session:
                self.lock_holder = self.successor

    @asynccontextmanager
    async def open_pages(self) -> AsyncIterator[MemoryPages]:
        await self.visit("open_pages")
        yield MemoryPages(self)

    async def needs_maintenance(self) -> bool:
        await self.visit("needs_maintenance")
        return max((row.sequence_id for row in self.rows), default=0) > self.boundary

    async def delete_dead(self, graves: Sequence[Grave]) -> list[Grave]:
        await self.visit("delete_dead")
        deleted = []
        for grave in graves:
            stored = self.recipients.get(grave.recipient_id)
            if stored is not None and (stored.config, stored.secret_hash) == (grave.config, grave.secret_hash):
                del self.recipients[grave.recipient_id]
                deleted.append(grave)
        return deleted

    async def delete_expired(self, ttl_s: int) -> int:
        await self.visit("delete_expired")
        return self.expired_batches.pop(0) if self.expired_batches else 0

    def page(self, request: PageRequest, rows: int) -> Page:
        boundary = self.page_boundaries.pop(0) if self.page_boundaries else self.boundary
        end = boundary if request.last is None else min(boundary, request.last)
        above = [
            row for row in sorted(self.rows, key=lambda row: row.sequence_id) if request.floor < row.sequence_id <= end
        ]
        window = above[:rows] if request.resume is None else above
        by_topic = defaultdict(list)
        for subscription in self.subscriptions:
            by_topic[subscription.topic].append(subscription)
        after = request.resume or (0, b"")
        deliveries: list[Delivery] = []
        checks: list[HmacCheck] = []
        for row in window:
            if row.sequence_id < after[0]:
                continue
            for subscription in sorted(by_topic[row.topic], key=lambda item: item.recipient):
                identity = recipient_id(subscription.recipient)
                stored = self.recipients.get(identity)
                if (
                    stored is None
                    or (row.sequence_id, identity) <= after
                    or subscription.since >= row.sequence_id
                    or (row.commit and not subscription.commits)
                ):
                    continue
                if len(deliveries) == PAGE_DELIVERIES:
                    break
                key = key_in_window(row.epoch * HMAC_EPOCH_NS, subscription.epoch_base, subscription.keys)
                if row.sender_hmac is not None and key is not None:
                    checks.append(HmacCheck(len(deliveries), row.sequence_id, key, row.sender_hmac))
                deliveries.append(Delivery(row.sequence_id, row.topic, identity, stored.config, stored.secret_hash))
        first, last = (None, None) if request.resume or not window else (window[0].sequence_id, window[-1].sequence_id)
        return Page(boundary, first, last, deliveries, checks, is_full=len(deliveries) == PAGE_DELIVERIES)


class MemorySession:
    """One session that may hold the lock."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.is_closed = False
        self.is_asked_to_step_down = False
        self.cut = trio.Event()
        self._listens = False

    async def _visit(self, name: str) -> None:
        failure: StoreError | None = None
        async with trio.open_nursery() as nursery:

            async def fail_when_cut() -> None:
                nonlocal failure
                await self.cut.wait()
                failure = StoreUnavailable()
                nursery.cancel_scope.cancel()

            nursery.start_soon(fail_when_cut)
            try:
                await self.store.visit(name)
            except StoreError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if self._listens and self.store.step_down_asked:
            self.is_asked_to_step_down, self.store.step_down_asked = True, False

    async def listen(self) -> None:
        self._listens = True
        await self._visit("listen")

    async def try_lock(self) -> bool:
        await self._visit("try_lock")
        if self.store.lock_holder is None:
            self.store.lock_holder = self
        return self.store.lock_holder is self

    async def probe(self) -> None:
        await self._visit("probe")

    async def read_cursor(self) -> int:
        await self._visit("read_cursor")
        return self.store.cursor

    async def move_cursor(self, known: int, mark: int) -> bool:
        await self._visit("move_cursor")
        if not (self.store.cursor == known < mark):
            return False
        self.store.cursor = mark
        self.store.writes.append((trio.current_time(), mark))
        await self._visit("move_cursor_answer")
        return True

    def sever(self) -> None:
        self.store.severed.append(trio.current_time())
        self.cut.set()


class MemoryPages:
    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    async def read(self, request: PageRequest, rows: int) -> Page:
        with trio.CancelScope(shield=self.store.is_deaf_to_cancels):
            await self.store.visit("read")
        self.store.requests.append((request, rows))
        return self.store.page(request, rows)

    async def payloads(self, sequence_ids: Sequence[int], budget_bytes: int) -> list[tuple[int, bytes]]:
        await self.store.visit("payloads")
        self.store.payload_reads.append(list(sequence_ids))
        found: list[tuple[int, bytes]] = []
        for row in self.store.rows:
            if row.sequence_id in sequence_ids:
                if found and sum(len(payload) for _, payload in found) + len(row.payload) > budget_bytes:
                    break
                found.append((row.sequence_id, row.payload))
        return found


Action = Outcome | trio.Event | Exception | None
"""An answer; a gate after which the attempt is delivered; something to raise; None for an attempt that never ends."""


@define(eq=False)
class Provider:
    """Takes everything unless `script` says otherwise; remembers what came when."""

    script: Callable[[Delivery, int], Action | Awaitable[Outcome]] = lambda delivery, attempt: Delivered()
    attempts: list[tuple[float, int, bytes]] = Factory(list)
    in_flight: int = 0
    most_in_flight: int = 0
    _numbers: Counter[tuple[int, bytes]] = field(factory=Counter)

    async def attempt(self, delivery: Delivery) -> Outcome:
        key = delivery.sequence_id, delivery.recipient_id
        self._numbers[key] += 1
        self.attempts.append((trio.current_time(), *key))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await trio.lowlevel.checkpoint()
            action = self.script(delivery, self._numbers[key])
            match action:
                case None:
                    await trio.sleep_forever()
                case trio.Event():
                    await action.wait()
                case Exception():
                    raise action
                case Awaitable():
                    return await action
                case _:
                    return action
            return Delivered()
        finally:
            self.in_flight -= 1

    def rows(self) -> list[int]:
        return [sequence_id for _, sequence_id, _ in self.attempts]


@define(eq=False)
class ManualBoundary:
    """A boundary task in the test's hands."""

    requests: int = 0
    closed: int = 0
    _advanced: trio.Event = field(factory=trio.Event)

    def request(self) -> None:
        self.requests += 1

    async def wait_above(self, sequence_id: int) -> int:
        while self.closed <= sequence_id:
            await self._advanced.wait()
        return self.closed

    def advance(self, closed: int) -> None:
        self.closed = closed
        self._advanced.set()
        self._advanced = trio.Event()


@define(eq=False)
class Run:
    """One dispatcher under test."""

    store: MemoryStore
    metrics: Metrics
    stop: StopSignal
    boundary: ManualBoundary
    finished: trio.Event = field(factory=trio.Event)

    def counts(self) -> dict[str, int]:
        """Final outcomes that are not zero, summed over channels."""
        totals: Counter[str] = Counter()
        for channel in Channel:
            totals.update(self.channel_counts(channel))
        return dict(totals)

    def channel_counts(self, channel: Channel) -> dict[str, int]:
        found = {}
        for outcome in ("delivered", "failed", "rejected", "mismatch", "dead", "suppressed"):
            value = self.metrics.push_deliveries.labels(channel.label, outcome)._value.get()
            if value:
                found[outcome] = int(value)
        return found

    def recipients(self, action: str) -> int:
        return int(self.metrics.push_recipients.labels(action)._value.get())

    def term_ends(self) -> dict[str, int]:
        """Why terms ended, and how often."""
        found = {why: int(self.metrics.push_terms_ended.labels(why)._value.get()) for why in TERM_ENDS}
        return {why: count for why, count in found.items() if count}

    @property
    def holds(self) -> bool:
        return self.metrics.push_dispatcher._value.get() == 1

    async def stopped(self, grace_s: float = math.inf) -> None:
        """Request a stop and wait for it."""
        self.stop.request(trio.current_time() + grace_s)
        await self.finished.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Let virtual time pass until something is so."""
    with trio.fail_after(600):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


@asynccontextmanager
async def dispatching(
    store: MemoryStore,
    senders: Mapping[Channel, Provider],
    *,
    max_attempts: int = 3,
    poll_interval_s: float = POLL_S,
    drain_s: float = 20.0,
) -> AsyncIterator[Run]:
    """A running dispatcher; cancelled at the end if it still runs."""
    run = Run(store, Metrics(), StopSignal(), ManualBoundary())

    async def dispatch() -> None:
        await run_dispatcher(
            store,
            senders,
            DispatchSettings(poll_interval_s, max_attempts, drain_s=drain_s),
            metrics=run.metrics,
            boundary=run.boundary,
            stop=run.stop,
            jitter=lambda: 0.0,
        )
        run.finished.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatch)
        yield run
        nursery.cancel_scope.cancel()
