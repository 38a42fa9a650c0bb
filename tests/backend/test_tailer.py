"""The tailer on virtual time, against rows in memory and a hub that keeps what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from pushd.backend.tailer import PAGE_ROWS, PAYLOAD_BYTES, Tailer
from pushd.core.unread import Unread
from pushd.errors import Code, StatusError, StoreError, StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.model import EnvelopeMeta, StoredEnvelope
from pushd.store.tailer import Poll, Seen
from pushd.telemetry import Metrics, StreamEnd

POLL_S = 0.1
A, B = b"a", b"b"


@define
class World:
    """A store of rows, and a hub for which everything on topic A has to be loaded."""

    rows: dict[int, bytes] = field(factory=dict)
    boundary: int = 0
    replica_boundary: int | None = None
    size: int = 10
    gone: set[int] = field(factory=set)
    failure: StoreError | None = None
    polls: list[float] = field(factory=list)
    loads: list[list[int]] = field(factory=list)
    sessions: int = 0
    open_sessions: int = 0
    requests: int = 0
    events: list[object] = field(factory=list)

    # --- the store

    async def load_primary_boundary(self) -> int:
        await self._work()
        return self.boundary

    @asynccontextmanager
    async def open(self) -> AsyncIterator[World]:
        await self._work()
        self.sessions += 1
        self.open_sessions += 1
        try:
            yield self
        finally:
            self.open_sessions -= 1

    async def load_boundary(self) -> int:
        await self._work()
        return self.boundary if self.replica_boundary is None else self.replica_boundary

    async def poll(self, unread: Unread, max_rows: int) -> Poll:
        self.polls.append(trio.current_time())
        await self._work()
        ranges = unread.ranges
        found = sorted(n for n in self.rows if any(low <= n <= high for low, high in ranges))
        seen = [Seen(n, self.rows[n], self.size) for n in found[:max_rows]]
        return Poll(await self.load_boundary(), seen, is_complete=len(found) < max_rows)

    async def load(self, ids: Sequence[int]) -> list[StoredEnvelope]:
        await self._work()
        self.loads.append(list(ids))
        return [
            StoredEnvelope(EnvelopeMeta(n, 1, None, b"", self.rows[n], False), b"") for n in ids if n not in self.gone
        ]

    async def _work(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure

    # --- the hub

    def resume(self) -> None:
        self.events.append("resume")

    def suspend(self, failure: StatusError, end: StreamEnd) -> None:
        self.events.append((failure.code, end))

    def select(self, seen: Iterable[tuple[int, bytes]]) -> set[int]:
        return {n for n, topic in seen if topic == A}

    async def deliver(self, envelopes: Iterable[StoredEnvelope]) -> None:
        self.events += [stored.meta.sequence_id for stored in envelopes]

    def request(self) -> None:
        self.requests += 1

    @property
    def delivered(self) -> list[object]:
        return [event for event in self.events if isinstance(event, int)]


@pytest.fixture
def world() -> World:
    return World()


def tailer_of(world: World, metrics: Metrics, max_gap_ranges: int = 10_000) -> Tailer:
    return Tailer(world, world, world.request, poll_interval_s=POLL_S, max_gap_ranges=max_gap_ranges, metrics=metrics)


async def test_it_starts_at_the_primary_s_boundary_once_the_replica_shows_it(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world.rows = {1: A, 5: A, 6: A}
    world.boundary, world.replica_boundary = 5, 4
    tailer = tailer_of(world, metrics)
    with trio.move_on_after(10):
        await nursery.start(tailer.run)
        raise AssertionError("it must wait")
    assert world.events == []
    assert metrics.tailer_ready._value.get() == 0
    nursery.start_soon(tailer.run)
    await trio.sleep(1)
    world.replica_boundary = 5
    await trio.sleep(1)
    assert world.events == ["resume", 6]
    assert metrics.tailer_ready._value.get() == 1


async def test_the_pause_begins_when_a_poll_ends(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    await nursery.start(tailer_of(world, metrics).run)
    await trio.sleep(1.05)
    assert len(world.polls) == 11
    assert world.polls[-1] - world.polls[0] == pytest.approx(1.0)
    assert metrics.tailer_polls.labels("ok")._value.get() == 11
    assert world.requests == 0, "without a gap nothing is asked for"


async def test_everything_visible_is_delivered_above_the_boundary(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    await nursery.start(tailer_of(world, metrics).run)
    world.rows |= {2: A, 3: B, 7: A}
    await trio.sleep(0.15)
    assert world.delivered == [2, 7]
    assert world.loads == [[2, 7]], "what nobody follows is not loaded"
    assert metrics.tailer_gap_ranges._value.get() == 2
    assert world.requests >= 1
    world.rows |= {1: A, 8: A}
    await trio.sleep(0.1)
    assert world.delivered == [2, 7, 1, 8]
    rows = metrics.tailer_rows
    assert (rows.labels("forward")._value.get(), rows.labels("gap")._value.get()) == (4, 1)


async def test_maintenance_is_asked_for_every_poll_until_the_gap_is_settled(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    await nursery.start(tailer_of(world, metrics).run)
    await trio.sleep(0.05)
    world.rows |= {2: A}
    await trio.sleep(1)
    assert world.requests == 10
    world.boundary = 2
    await trio.sleep(0.1)
    asked = world.requests
    await trio.sleep(1)
    assert world.requests == asked
    assert metrics.tailer_gap_ranges._value.get() == 0


async def test_a_full_page_is_followed_at_once(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world.rows = dict.fromkeys(range(1, 2 * PAGE_ROWS + 11), A)
    start = trio.current_time()
    await nursery.start(tailer_of(world, metrics).run)
    await trio.sleep(0.01)
    assert world.delivered == list(range(1, 2 * PAGE_ROWS + 11))
    assert world.polls == [start] * 3


async def test_payloads_bound_a_poll_too(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    world.size = PAYLOAD_BYTES // 4
    world.rows = {n: A if n <= 10 else B for n in range(1, 100)}
    start = trio.current_time()
    await nursery.start(tailer_of(world, metrics).run)
    await trio.sleep(0.01)
    assert world.loads == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert world.polls == [start] * 3


async def test_rows_that_are_gone_by_the_time_they_are_loaded_are_left_out(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    await nursery.start(tailer_of(world, metrics).run)
    world.rows |= {1: A, 2: A}
    world.gone = {1}
    await trio.sleep(0.15)
    assert world.delivered == [2]


@pytest.mark.parametrize("failure", [StoreUnavailable(), StoreTimeout(), StoreInvariant()])
async def test_trouble_ends_streams_and_everything_starts_afresh(
    failure: StoreError, world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    tailer = tailer_of(world, metrics)
    await nursery.start(tailer.run)
    world.rows |= {2: A}
    await trio.sleep(0.15)
    world.failure = failure
    await trio.sleep(1)
    assert world.events[:3] == ["resume", 2, (Code.UNAVAILABLE, StreamEnd.TAILER)]
    assert metrics.tailer_ready._value.get() == 0
    assert world.open_sessions == 0
    attempts = metrics.tailer_polls.labels("error")._value.get()
    assert 5 <= attempts <= 11, "one attempt a poll interval"
    world.failure = None
    world.rows |= {3: A, 4: A}
    world.boundary = 3
    await trio.sleep(1)
    after = world.events[world.events.index("resume", 1) :]
    assert after == ["resume", 4], "the new start is the boundary of now"
    assert tailer.restarts == metrics.tailer_restarts._value.get() == 1


async def test_too_many_gaps_end_streams_and_everything_starts_afresh(
    world: World, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    tailer = tailer_of(world, metrics, max_gap_ranges=2)
    await nursery.start(tailer.run)
    world.rows |= {2: B, 4: B}
    await trio.sleep(0.15)
    assert tailer.restarts == 0
    world.rows |= {6: B}
    await trio.sleep(0.1)
    assert (Code.RESOURCE_EXHAUSTED, StreamEnd.CAPACITY) in world.events
    asked = world.requests
    await trio.sleep(1)
    assert world.requests > asked, "it keeps asking for what would settle them"
    world.boundary = 6
    await trio.sleep(1)
    assert world.events[-1] == "resume"
    assert metrics.tailer_ready._value.get() == 1
