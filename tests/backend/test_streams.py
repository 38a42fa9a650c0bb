"""Streams on virtual time, with rows in memory and the test as their caller."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from pushd.backend.streams import FETCH_WORKERS, HEADS_TOPICS, Stream, Streams, StreamSettings
from pushd.core.interest import TURN_ROWS, Interest, Registration
from pushd.core.outbound import FRAME_BYTES, QUEUE_BYTES, Applied, Frame, Keepalive, Messages, Ping, Pong, Started
from pushd.core.stream_updates import Update, Wanted
from pushd.errors import Code, StatusError, StoreTimeout
from pushd.model import EnvelopeMeta, StoredEnvelope
from pushd.store.streams import StreamPage
from pushd.telemetry import Metrics, StreamEnd

MIB = 2**20
DEFAULTS = StreamSettings()


def group(number: int) -> bytes:
    return b"\x00" + number.to_bytes(16, "big")


A, B, C = group(1), group(2), group(3)


def stored(sequence_id: int, topic: bytes, size: int = 10) -> StoredEnvelope:
    return StoredEnvelope(EnvelopeMeta(sequence_id, 1, None, bytes(32), topic, False), bytes(size))


@define
class MemoryStore:
    """Rows in memory; reads take `lasting_s` and fail when told to."""

    rows: list[StoredEnvelope] = field(factory=list)
    lasting_s: float = 0.0
    failure: Exception | None = None
    page_topics: int = 1_000
    pages: list[list[bytes]] = field(factory=list)
    running: int = 0
    most_running: int = 0

    async def load_heads(self, topics: Sequence[bytes]) -> list[int]:
        await self._work()
        return [max((row.meta.sequence_id for row in self._of(topic, 0)), default=0) for topic in topics]

    async def load_page(self, topics: Sequence[bytes], cursors: Sequence[int]) -> StreamPage:
        await self._work()
        self.pages.append(list(topics))
        found = [
            (place, row)
            for place, (topic, cursor) in enumerate(zip(topics, cursors, strict=True))
            for row in self._of(topic, cursor)[:TURN_ROWS]
        ]
        room = FRAME_BYTES
        kept: list[tuple[int, StoredEnvelope]] = []
        for place, row in found:
            room -= len(row.payload)
            if (room >= 0 or not kept) and place < self.page_topics:
                kept.append((place, row))
        return StreamPage(kept, is_cut=len(kept) < len(found))

    def _of(self, topic: bytes, cursor: int) -> list[StoredEnvelope]:
        return [row for row in self.rows if row.meta.topic == topic and row.meta.sequence_id > cursor]

    async def _work(self) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await trio.sleep(self.lasting_s)
        finally:
            self.running -= 1
        if self.failure is not None:
            raise self.failure


def encode(row: StoredEnvelope) -> bytes:
    return b"%d " % row.meta.sequence_id + row.payload[8:] + b"\n"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@asynccontextmanager
async def running(store: MemoryStore, metrics: Metrics, settings: StreamSettings = DEFAULTS) -> AsyncIterator[Streams]:
    streams = Streams(store, settings, encode, metrics)
    async with trio.open_nursery() as nursery:
        await nursery.start(streams.run)
        streams.resume()
        yield streams
        nursery.cancel_scope.cancel()


async def see(streams: Streams, store: MemoryStore, *rows: StoredEnvelope) -> None:
    """As the tailer: the rows have become visible."""
    store.rows += rows
    wanted = streams.select((row.meta.sequence_id, row.meta.topic) for row in rows)
    await streams.deliver(row for row in rows if row.meta.sequence_id in wanted)


def ids_of(frame: Frame | None) -> list[int]:
    assert isinstance(frame, Messages)
    return [int(line.split(b" ")[0]) for line in b"".join(frame.pieces).splitlines()]


async def next_ids(stream: Stream) -> list[int]:
    with trio.fail_after(1_000):
        return ids_of(await stream.next_frame())


async def opened(streams: Streams, **cursors: int) -> Stream:
    """A bidirectional stream with these topics (a, b, c) followed, both first frames taken."""
    stream = streams.open(is_static=False)
    stream.start()
    assert await stream.next_frame() == Started()
    topics = {"a": A, "b": B, "c": C}
    await stream.update(Update(1, [Wanted(topics[name], cursor) for name, cursor in cursors.items()], []))
    assert isinstance(await stream.next_frame(), Applied)
    return stream


def labelled(metric: object, *labels: str) -> float:
    value: float = metric.labels(*labels)._value.get()  # type: ignore[attr-defined]
    return value


async def test_streams_open_only_while_the_tailer_is_ready(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics) as streams:
        streams.suspend(StatusError(Code.UNAVAILABLE, "gone"), StreamEnd.TAILER)
        with pytest.raises(StatusError) as refusal:
            streams.open(is_static=True)
        assert refusal.value.code is Code.UNAVAILABLE
        streams.resume()
        streams.open(is_static=True).close()


async def test_suspending_ends_every_stream_with_the_reason(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics) as streams:
        first, second = await opened(streams, a=0), await opened(streams)
        streams.suspend(StatusError(Code.UNAVAILABLE, "gone"), StreamEnd.TAILER)
        for stream in (first, second):
            with pytest.raises(StatusError, match="gone"):
                await stream.next_frame()
            stream.close()
    assert labelled(metrics.stream_ended, "tailer") == 2
    assert labelled(metrics.stream_sessions, "bidi") == 0
    assert metrics.stream_topics_registered._value.get() == 0


async def test_all_streams_together_follow_so_many_topics(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics, StreamSettings(max_followed_topics=3)) as streams:
        first, second = await opened(streams, a=0), await opened(streams, a=0, b=0)
        with pytest.raises(StatusError, match="server is overloaded") as refusal:
            await second.update(Update(2, [Wanted(C, 0)], [A]))
            await first.update(Update(2, [Wanted(B, 0)], []))
        assert refusal.value.code is Code.UNAVAILABLE
        first.close()
        third = await opened(streams, b=0)  # what the ended one followed has room for it
        with pytest.raises(StatusError, match="server is overloaded"):
            await streams.open(is_static=True).start_static([Wanted(A, 0)])
        second.close()
        third.close()
        static = streams.open(is_static=True)
        await static.start_static([Wanted(A, 0), Wanted(B, 0), Wanted(C, 0)])
        static.close()
    assert labelled(metrics.stream_ended, "capacity") == 2


async def test_catch_up_then_live(store: MemoryStore, metrics: Metrics, autojump_clock: MockClock) -> None:
    store.rows = [stored(n, A) for n in range(1, 100)]
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=10)
        assert await next_ids(stream) == list(range(11, 75))
        assert await next_ids(stream) == list(range(75, 100))
        await see(streams, store, stored(100, A), stored(101, B), stored(102, A))
        assert await next_ids(stream) == [100, 102]
    assert labelled(metrics.stream_envelopes_sent, "catch_up") == 89
    assert labelled(metrics.stream_envelopes_sent, "live") == 2


async def test_what_comes_while_a_page_is_read_follows_it(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(1, A)]
    store.lasting_s = 1.0
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        await trio.sleep(0.5)  # the page's statement is under way
        await see(streams, store, stored(2, A))
        assert await next_ids(stream) == [1, 2]
        await see(streams, store, stored(3, A))
        assert await next_ids(stream) == [3]


async def test_pages_are_fetched_only_as_fast_as_frames_are_taken(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(n, A, MIB // 16) for n in range(1, 2_000)]
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        await trio.sleep(100)
        assert len(store.pages) == 1, "a full frame waits; nothing more is read"
        assert len(await next_ids(stream)) == 32
        await trio.sleep(100)
        assert len(store.pages) == 2


async def test_topics_take_turns(store: MemoryStore, metrics: Metrics, autojump_clock: MockClock) -> None:
    store.rows = [stored(n * 3 + m + 1, topic) for n in range(130) for m, topic in enumerate((A, B, C))]
    store.page_topics = 1  # a page is full after one topic
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0, b=0, c=0)
        frames = [await next_ids(stream) for _ in range(9)]
    assert [frame[0] % 3 for frame in frames] == [1, 2, 0] * 3
    assert [len(frame) for frame in frames] == [64] * 6 + [2] * 3


async def test_the_database_is_shared_by_eight_at_a_time(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.lasting_s = 1.0
    started = trio.current_time()
    async with running(store, metrics) as streams:
        async with trio.open_nursery() as nursery:

            async def open_one() -> None:
                (await opened(streams, a=0)).close()

            for _ in range(3 * FETCH_WORKERS):
                nursery.start_soon(open_one)
    assert store.most_running == FETCH_WORKERS
    assert trio.current_time() - started == pytest.approx(3.0)
    assert metrics.stream_fetch_wait_seconds._sum.get() == pytest.approx(8 * 1 + 8 * 2)


async def test_trouble_of_the_database_is_unavailable(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(1, A)]
    async with running(store, metrics) as streams:
        catching_up = await opened(streams)
        await catching_up.update(Update(2, [Wanted(A, 0)], []))
        store.failure = StoreTimeout()
        assert isinstance(await catching_up.next_frame(), Applied)
        with pytest.raises(StatusError, match="UNAVAILABLE: database operation failed"):
            await catching_up.next_frame()
        static = streams.open(is_static=True)
        with pytest.raises(StatusError, match="UNAVAILABLE: database operation failed"):
            await static.start_static([Wanted(A, 0)])
    assert labelled(metrics.stream_ended, "database") == 2
    assert labelled(metrics.db_errors, "timeout") == 2


async def test_no_envelope_of_a_topic_follows_the_answer_to_its_removal(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(1, A), stored(2, B)]
    store.lasting_s = 1.0
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0, b=0)
        await trio.sleep(0.5)  # the page of both is under way
        await stream.update(Update(2, [], [A]))
        assert await stream.next_frame() == Applied(2, [])
        assert await next_ids(stream) == [2]
        await see(streams, store, stored(3, A), stored(4, B))
        assert await next_ids(stream) == [4]


async def test_an_added_topic_is_answered_before_it_delivers(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(1, A)]
    async with running(store, metrics) as streams:
        stream = await opened(streams, b=0)
        store.lasting_s = 1.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.update, Update(2, [Wanted(A, 0), Wanted(B, 0)], []))
            await trio.sleep(0.5)
            await see(streams, store, stored(2, A), stored(3, B))
            assert await next_ids(stream) == [3], "other topics go on meanwhile"
        assert await stream.next_frame() == Applied(2, [(A, 2)])
        assert await next_ids(stream) == [1, 2]


@pytest.mark.parametrize("is_static", [True, False])
async def test_a_silent_stream_gets_a_sign_of_life(
    is_static: bool, store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    async with running(store, metrics, StreamSettings(keepalive_s=30, pong_s=90)) as streams:
        stream = streams.open(is_static=is_static)
        if is_static:
            await stream.start_static([Wanted(A, 0)])
        else:
            stream.start()
        await stream.next_frame()
        start = trio.current_time()
        for n in range(1, 4):
            frame = await stream.next_frame()
            assert frame == (Keepalive() if is_static else Ping(n))
            assert trio.current_time() - start == pytest.approx(30 * n)
            stream.pong(n)


async def test_frames_put_the_sign_of_life_off(store: MemoryStore, metrics: Metrics, autojump_clock: MockClock) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        await trio.sleep(20)
        await see(streams, store, stored(1, A))
        await next_ids(stream)
        sent = trio.current_time()
        assert isinstance(await stream.next_frame(), Ping)
        assert trio.current_time() - sent == pytest.approx(30)


@pytest.mark.parametrize(
    ("nonce", "answered_s", "lives"), [(1, 10.0, True), (1, 89.9, True), (2, 10.0, False), (None, 0.0, False)]
)
async def test_a_ping_wants_its_own_answer_in_time(
    nonce: int | None,
    answered_s: float,
    lives: bool,
    store: MemoryStore,
    metrics: Metrics,
    autojump_clock: MockClock,
) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        assert await stream.next_frame() == Ping(1)
        asked = trio.current_time()

        async def answer() -> None:
            assert nonce is not None
            await trio.sleep(answered_s)
            stream.pong(nonce)

        async with trio.open_nursery() as nursery:
            if nonce is not None:
                nursery.start_soon(answer)
            if lives:
                assert await stream.next_frame() == Ping(2)
                assert trio.current_time() - asked == pytest.approx(max(30.0, answered_s))
            else:
                with pytest.raises(StatusError, match="DEADLINE_EXCEEDED"):
                    await stream.next_frame()
                assert trio.current_time() - asked == pytest.approx(90)
                assert labelled(metrics.stream_ended, "keepalive") == 1


async def test_only_one_ping_waits_for_its_answer(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        assert await stream.next_frame() == Ping(1)
        await trio.sleep(40)
        await see(streams, store, stored(1, A))
        assert await next_ids(stream) == [1], "frames still go out"
        with pytest.raises(StatusError, match="DEADLINE_EXCEEDED"):
            await stream.next_frame()


async def test_pings_of_the_caller_are_answered(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams)
        stream.ping(2**64 - 1)
        assert await stream.next_frame() == Pong(2**64 - 1)


async def test_half_closing_ends_without_what_waits(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        await see(streams, store, stored(1, A))
        stream.finish()
        assert await stream.next_frame() is None
    assert labelled(metrics.stream_ended, "client") == 1


async def test_a_reader_that_takes_nothing_is_ended_and_nobody_else(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    interrupted: list[StatusError] = []
    async with running(store, metrics) as streams:
        slow, fast = await opened(streams, a=0), await opened(streams, a=0)
        slow.interrupt = interrupted.append
        await see(streams, store, stored(1, A))
        await next_ids(slow)  # its caller is now busy sending this
        await next_ids(fast)
        for n in range(2, 20):
            await see(streams, store, stored(n, A, MIB))
            assert await next_ids(fast) == [n]
        assert [error.code for error in interrupted] == [Code.RESOURCE_EXHAUSTED]
        with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED"):
            await slow.next_frame()
        assert "frames=0 bytes=0" in repr(slow), "nothing is kept for it"
        await see(streams, store, stored(20, A))
        assert await next_ids(fast) == [20]
    assert labelled(metrics.stream_ended, "backpressure") == 1


async def test_a_burst_beyond_the_queue_is_fetched_by_a_reader_that_keeps_up(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0, b=0)
        count = 3 * QUEUE_BYTES // MIB
        await see(streams, store, *(stored(n, (A, B)[n % 2], MIB) for n in range(1, count + 1)))
        got: list[int] = []
        while len(got) < count:
            got += await next_ids(stream)
        for parity in (0, 1):
            ids = [n for n in got if n % 2 == parity]
            assert ids == sorted(ids)
        assert sorted(got) == list(range(1, count + 1))


async def test_answers_that_nobody_takes_end_the_stream(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams)
        for n in range(65):
            stream.ping(n)
        with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED"):
            await stream.next_frame()


@pytest.mark.parametrize(
    "end",
    [
        lambda stream: stream.close(),
        lambda stream: stream.close(StreamEnd.SHUTDOWN),
        lambda stream: stream.fail(StatusError(Code.INTERNAL, "x"), StreamEnd.INVALID),
        lambda stream: stream.finish(),
    ],
)
async def test_an_ended_stream_leaves_nothing_behind(
    end: Callable[[Stream], None], store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(1, A), stored(2, B)]
    store.lasting_s = 1.0
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0, b=0)
        await trio.sleep(0.5)  # while its page is read
        end(stream)
        stream.close()
        await trio.sleep(10)
        await stream.update(Update(2, [Wanted(C, 0)], []))  # as a reader that was late may
        assert repr(streams) == "<Streams 0 topics=0 ready=True>"
        assert "frames=0 bytes=0" in repr(stream)
        assert metrics.stream_topics_registered._value.get() == 0
    ended = {reason: labelled(metrics.stream_ended, reason) for reason in StreamEnd}
    assert sum(ended.values()) == 1


async def test_a_stream_that_has_left_the_line_for_the_database_reads_nothing(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.rows = [stored(1, A)]
    async with running(store, metrics) as streams:
        store.lasting_s = 1.0
        left = [streams.open(is_static=False) for _ in range(3 * FETCH_WORKERS)]
        for stream in left:
            streams.start_soon(stream.update, Update(1, [Wanted(A, 0)], []))
        await trio.sleep(3.5)  # all heads are known, and the first pages are being read
        assert (store.running, store.pages) == (FETCH_WORKERS, [])
        for stream in left:
            stream.close()
        await trio.sleep(10)
        assert len(store.pages) == FETCH_WORKERS


async def test_a_large_update_joins_in_parts_and_leaves_nothing_behind_when_its_stream_ends(
    store: MemoryStore, metrics: Metrics, autojump_clock: MockClock
) -> None:
    store.lasting_s = 1.0
    async with running(store, metrics) as streams:
        stream = streams.open(is_static=False)
        wanted = [Wanted(group(number), 0) for number in range(3 * HEADS_TOPICS)]
        streams.start_soon(stream.update, Update(1, wanted, []))
        await trio.sleep(0.5)
        assert metrics.stream_topics_registered._value.get() == HEADS_TOPICS, "others have a turn in between"
        stream.close()
        await trio.sleep(10)
        assert metrics.stream_topics_registered._value.get() == 0
        assert repr(streams) == "<Streams 0 topics=0 ready=True>"


async def test_an_invalid_update_ends_the_stream(store: MemoryStore, metrics: Metrics) -> None:
    async with running(store, metrics) as streams:
        stream = await opened(streams)
        with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
            await stream.update(Update(1, [], []))
        with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
            await stream.next_frame()
    assert labelled(metrics.stream_updates, "applied") == 1
    assert labelled(metrics.stream_updates, "invalid") == 1


async def test_a_page_may_run_ahead_of_a_part_of_what_comes_live(store: MemoryStore, metrics: Metrics) -> None:
    store.rows = [stored(1, A), stored(2, A)]
    async with running(store, metrics) as streams:
        stream = await opened(streams, a=0)
        assert await next_ids(stream) == [1, 2]
        await see(streams, store, stored(1, A), stored(2, A), stored(3, A), stored(4, A))
        assert await next_ids(stream) == [3, 4]
    assert labelled(metrics.stream_envelopes_sent, "live") == 2


async def test_updates_done_are_answered_before_the_failure_of_a_later_one(
    store: MemoryStore, metrics: Metrics
) -> None:
    async with running(store, metrics) as streams:
        stream = streams.open(is_static=False)
        stream.start()
        await stream.update(Update(1, [], []))
        with pytest.raises(StatusError):
            await stream.update(Update(1, [], []))
        assert [await stream.next_frame() for _ in range(2)] == [Started(), Applied(1, [])]
        with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
            await stream.next_frame()


async def test_only_what_somebody_waits_for_is_loaded(store: MemoryStore, metrics: Metrics) -> None:
    store.rows = [stored(1, B)]
    async with running(store, metrics) as streams:
        assert streams.select([(1, A)]) == set()
        live = await opened(streams, a=0)
        behind = streams.open(is_static=False)
        store.lasting_s = math.inf
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behind.update, Update(1, [Wanted(B, 0)], []))
            await wait_all_tasks_blocked()
            assert streams.select([(2, A), (3, B), (4, C)]) == {2}
            nursery.cancel_scope.cancel()
        live.close()
        assert streams.select([(5, A)]) == set()


async def test_a_poll_asks_each_follower_once_a_topic(
    store: MemoryStore, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once an envelope: a thousand of them for a thousand followers would hold everything up for seconds."""
    asked: list[int] = []
    is_due = Interest.is_due

    def counting(interest: Interest, registration: Registration, sequence_id: int) -> bool:
        asked.append(sequence_id)
        return is_due(interest, registration, sequence_id)

    async with running(store, metrics) as streams:
        for cursor in (40, 20, 30):
            await opened(streams, a=cursor)
        monkeypatch.setattr(Interest, "is_due", counting)
        assert streams.select((n, A) for n in range(1, 51)) == set(range(21, 51))
        assert asked == [50, 50, 50]


async def test_an_envelope_is_encoded_once_however_many_follow_it(store: MemoryStore, metrics: Metrics) -> None:
    encoded: list[int] = []

    def encode_counting(row: StoredEnvelope) -> bytes:
        encoded.append(row.meta.sequence_id)
        return encode(row)

    async with running(store, metrics) as streams:
        streams.encode = encode_counting
        followers = [await opened(streams, a=0) for _ in range(5)]
        await see(streams, store, stored(1, A))
        for stream in followers:
            assert await next_ids(stream) == [1]
    assert encoded == [1]
