"""The subscriptions of this instance: one hub that the tailer feeds, and a stream for each caller.

A stream is driven from two sides. Its caller's task takes frames with `next_frame` and answers for keepalives; the hub
puts in what the tailer saw and fetches what lies behind. The bounds of the queue between the two are the back-pressure:
pages are fetched only while little waits, and a stream whose reader cannot keep up with what is new is ended, which
costs nobody else anything.

Which envelope is handed over when is decided in `pushd.core.interest`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import trio
from attrs import field, frozen

from pushd.core.interest import Asked, Interest, Registration
from pushd.core.outbound import (
    FRAME_BYTES,
    Applied,
    Frame,
    Keepalive,
    Messages,
    Outbound,
    Ping,
    Pong,
    Started,
    Target,
)
from pushd.core.stream_updates import Update, UpdateLimits, Wanted, refuse_static, refuse_update
from pushd.errors import Code, StatusError, StoreError
from pushd.model import StoredEnvelope
from pushd.store.streams import StreamPage
from pushd.telemetry import Metrics, StreamEnd

FETCH_WORKERS = 8  # sessions that streams may use at once, so that queries and pushes keep theirs
HEADS_TOPICS = 10_000  # joined and read as one, about 20 ms; the largest update is ten of them
RUN_BYTES = 64 * 1024  # of one topic's envelopes that are queued as one piece
OFFERS_AT_ONCE = 500  # about 2 ms, then others have a turn
_DATABASE_TEXT = "database operation failed"
_NOT_READY = "streams are not ready"
_OVERLOADED = "server is overloaded"
_TOO_SLOW = "the reader is too slow"
_NO_PONG = "the peer did not answer a ping"
_WITHOUT_THE_REST = (StreamEnd.BACKPRESSURE, StreamEnd.KEEPALIVE)
"""Ends of a peer that takes nothing. Before any other failure what waits is sent: an update done is answered."""


class Store(Protocol):
    """Reads of the streams, from the read database."""

    async def load_heads(self, topics: Sequence[bytes]) -> list[int]:
        """The newest id of each topic, 0 for an empty one."""
        ...

    async def load_page(self, topics: Sequence[bytes], cursors: Sequence[int]) -> StreamPage:
        """Up to TURN_ROWS envelopes of each topic above its cursor, up to a frame in all, at least one."""
        ...


@frozen
class StreamSettings:
    """What an operator decides about streams; times in seconds, and the bytes of a frame of several envelopes.

    Attributes:
        max_followed_topics: of all streams together, a topic counted once for each stream that follows it.
    """

    limits: UpdateLimits = field(factory=UpdateLimits)
    keepalive_s: float = 30.0
    pong_s: float = 90.0
    frame_bytes: int = FRAME_BYTES
    max_followed_topics: int = 2_000_000


@frozen
class Run:
    """Consecutive envelopes of one topic, encoded together once for all streams they go to."""

    first_id: int
    last_id: int
    envelopes: Sequence[StoredEnvelope] = field(repr=False)
    encoded: bytes = field(repr=False)


def _run(envelopes: Sequence[StoredEnvelope], encoded: Iterable[bytes]) -> Run:
    first, last = envelopes[0].meta.sequence_id, envelopes[-1].meta.sequence_id
    return Run(first, last, envelopes, b"".join(encoded))


def _by_topic(envelopes: Iterable[StoredEnvelope]) -> dict[bytes, list[StoredEnvelope]]:
    topics: dict[bytes, list[StoredEnvelope]] = {}
    for stored in envelopes:
        topics.setdefault(stored.meta.topic, []).append(stored)
    return topics


def _targets(registrations: Iterable[Registration], heads: Iterable[int]) -> list[Target]:
    return [(one.topic, head) for one, head in zip(registrations, heads, strict=True)]


class Stream:
    """One subscription. Made by `Streams`; ends with `close`, which its caller must call in any case."""

    def __init__(self, hub: Streams, *, is_static: bool) -> None:
        self._hub = hub
        self._is_static = is_static
        self._interest = Interest(self)
        self._outbound = Outbound(hub.settings.frame_bytes)
        self._last_update_id = 0
        self._fetching = False
        self._end: StreamEnd | None = None
        self._failure: BaseException | None = None
        self._wake: trio.Event | None = None
        self._is_taken = False  # whether a frame was taken and its sending has not come back for the next one
        self._sent_at = trio.current_time()
        self._pings = 0
        self._pong_due = math.inf
        self._awaited_nonce: int | None = None
        self.interrupt: Callable[[StatusError], None] | None = None
        """Called when the stream failed while its caller is kept by a frame it was given."""

    def __repr__(self) -> str:
        return f"<Stream static={self._is_static} {self._interest!r} {self._outbound!r} end={self._end}>"

    # --- from the caller

    async def start_static(self, topics: Sequence[Wanted]) -> None:
        """Follow the topics of a static stream; its Started frame tells how far each reaches.

        Raises:
            StatusError: INVALID_ARGUMENT, or UNAVAILABLE because their heads cannot be read or too many are followed.
        """
        refusal = refuse_static(topics, self._hub.settings.limits)
        if refusal is not None:
            raise self._refused(refusal)
        followed, heads = await self._follow(topics)
        self._put(Started(_targets(followed, heads)))
        self._know_heads(followed, heads)

    def start(self) -> None:
        """Greet the caller of a stream whose topics come with updates."""
        self._put(Started())

    async def update(self, update: Update) -> None:
        """Change the topics and confirm it with an Applied frame. One at a time.

        Raises:
            StatusError: INVALID_ARGUMENT, or UNAVAILABLE because heads cannot be read or too many topics are followed;
                the stream must end.
        """
        if self._end is not None:
            return
        interest = self._interest
        refusal = refuse_update(update, self._last_update_id, interest, len(interest), self._hub.settings.limits)
        if refusal is not None:
            self._hub.metrics.stream_updates.labels("invalid").inc()
            raise self._refused(refusal)
        self._last_update_id = update.update_id
        removed = [interest.remove(topic) for topic in update.removes]
        self._hub.leave([one for one in removed if one is not None])
        added, heads = await self._follow([wanted for wanted in update.adds if wanted.topic not in interest])
        # Nothing of the new topics can be in front of this frame: until `_know_heads` they are neither live nor behind.
        self._put(Applied(update.update_id, _targets(added, heads)))
        self._know_heads(added, heads)
        self._hub.metrics.stream_updates.labels("applied").inc()

    def ping(self, nonce: int) -> None:
        """The caller asks for a sign of life."""
        self._put(Pong(nonce))

    def pong(self, nonce: int) -> None:
        """The caller gave one; only the answer to the last question counts."""
        if nonce == self._awaited_nonce:
            self._awaited_nonce = None
            self._pong_due = math.inf
            self._awake()  # it waits for this answer, and has the next silence to wait for

    def finish(self) -> None:
        """The caller wants no more: the stream ends without what still waits."""
        self._settle(StreamEnd.CLIENT, None)

    def fail(self, failure: BaseException, end: StreamEnd) -> None:
        """End the stream with `failure`, whose status the caller is told. The first end counts."""
        self._settle(end, failure)

    async def next_frame(self) -> Frame | None:
        """The next frame to send, once the one before was sent; None at the end.

        Raises:
            StatusError: the stream failed. Whatever else `fail` was given.
        """
        self._is_taken = False
        while True:
            now = trio.current_time()
            if now >= self._pong_due:
                self.fail(StatusError(Code.DEADLINE_EXCEEDED, _NO_PONG), StreamEnd.KEEPALIVE)
            taken = self._outbound.take(now)
            if taken is not None:
                return self._sent(*taken, now)
            if self._end is not None:
                break
            quiet_until = self._sent_at + self._hub.settings.keepalive_s
            if self._awaited_nonce is not None:
                quiet_until = math.inf
            elif now >= quiet_until:
                self._put(self._sign_of_life())
                continue
            await self._wait(min(quiet_until, self._pong_due))
        if self._failure is not None:
            raise self._failure
        return None

    def close(self, end: StreamEnd = StreamEnd.CLIENT) -> None:
        """Let go of everything; may be called more than once. `end` says why, if nothing else has ended it before."""
        self._settle(end, None)
        self._outbound.clear()

    # --- from the hub

    def offer(self, registration: Registration, run: Run, batch: int, now: float) -> None:
        """Envelopes of a followed topic were seen, a part of a `batch` that comes at once."""
        interest, outbound = self._interest, self._outbound
        if self._end is not None or not interest.is_due(registration, run.last_id):
            return
        is_burst = outbound.is_burst(batch)
        encoded, count = run.encoded, len(run.envelopes)
        if registration.position >= run.first_id:  # a page ran ahead of the tailer
            due = [one for one in run.envelopes if one.meta.sequence_id > registration.position]
            encoded, count = b"".join(map(self._hub.encode, due)), len(due)
        if outbound.put_live(encoded, count, now):
            interest.hand_over(registration, run.last_id)
            self._awake()
        elif is_burst:
            interest.defer(registration, run.last_id)
        else:
            self._overflow()

    def is_due(self, registration: Registration, sequence_id: int) -> bool:
        """Whether the envelope of this id, which was seen, would be handed over now; else it is noted."""
        return self._interest.is_due(registration, sequence_id)

    # --- inside

    async def _follow(self, topics: Sequence[Wanted]) -> tuple[list[Registration], list[int]]:
        """Register topics and read how far each reaches; fewer of them if the stream ends meanwhile."""
        followed: list[Registration] = []
        heads: list[int] = []
        try:
            for start in range(0, len(topics), HEADS_TOPICS):
                if self._end is not None:  # what joins now would never leave
                    break
                wanted = topics[start : start + HEADS_TOPICS]
                if not self._hub.has_room(len(wanted)):
                    full = StatusError(Code.UNAVAILABLE, _OVERLOADED)
                    self.fail(full, StreamEnd.CAPACITY)
                    raise full
                part = [self._interest.add(one.topic, one.cursor) for one in wanted]
                self._hub.join(part)
                async with self._hub.reading() as store:
                    heads += await store.load_heads([one.topic for one in part])
                followed += part
        except StatusError as failure:
            self.fail(failure, StreamEnd.DATABASE)
            raise
        return followed, heads

    def _know_heads(self, registrations: Sequence[Registration], heads: Sequence[int]) -> None:
        if self._end is None:
            self._interest.found_heads(registrations, heads)
            self._fetch_if_due()

    def _fetch_if_due(self) -> None:
        if self._interest.is_behind and not self._fetching and self._outbound.wants_page and self._end is None:
            self._fetching = True
            self._hub.start_soon(self._fetch)

    async def _fetch(self) -> None:
        """Take turns as long as pages find room. One of these runs at a time."""
        try:
            while self._interest.is_behind and self._outbound.wants_page:
                await self._take_turn()
        except StatusError as failure:
            self.fail(failure, StreamEnd.DATABASE)
        finally:
            self._fetching = False

    async def _take_turn(self) -> None:
        turn = self._interest.next_turn()
        if not turn:
            return
        page = await self._read_page(turn)
        if page is None or self._end is not None:
            return
        found = [(place, stored.meta.sequence_id) for place, stored in page.envelopes]
        wanted = self._interest.end_turn(turn, found, is_cut=page.is_cut)
        encode = self._hub.encode
        envelopes = [encode(stored) for (_, stored), is_wanted in zip(page.envelopes, wanted, strict=True) if is_wanted]
        if not envelopes:
            return
        if self._outbound.put_page(envelopes, trio.current_time()):
            self._awake()
        else:
            self._overflow()

    async def _read_page(self, turn: Sequence[Asked]) -> StreamPage | None:
        async with self._hub.reading() as store:
            if self._end is not None:  # it ended in the line for the database, which has others to serve
                return None
            return await store.load_page([one.registration.topic for one in turn], [one.position for one in turn])

    def _put(self, frame: Frame) -> None:
        if self._end is not None:
            return
        if self._outbound.put(frame, trio.current_time()):
            self._awake()
        else:
            self._overflow()

    def _sent(self, frame: Frame, waited_s: float, now: float) -> Frame:
        self._is_taken = True
        self._sent_at = now
        if isinstance(frame, Ping):
            self._awaited_nonce = frame.nonce
            self._pong_due = now + self._hub.settings.pong_s
        self._hub.count_sent(frame, waited_s)
        self._fetch_if_due()
        return frame

    def _sign_of_life(self) -> Frame:
        if self._is_static:
            return Keepalive()
        self._pings += 1
        return Ping(self._pings)

    def _overflow(self) -> None:
        self.fail(StatusError(Code.RESOURCE_EXHAUSTED, _TOO_SLOW), StreamEnd.BACKPRESSURE)

    def _refused(self, text: str) -> StatusError:
        error = StatusError(Code.INVALID_ARGUMENT, text)
        self._settle(StreamEnd.INVALID, error)
        return error

    def _settle(self, end: StreamEnd, failure: BaseException | None) -> None:
        if self._end is not None:
            return
        self._end = end
        self._failure = failure
        self._hub.left(self, self._interest.clear(), end)
        if failure is None or end in _WITHOUT_THE_REST:
            self._outbound.clear()
        self._awake()
        if self._is_taken and isinstance(failure, StatusError) and self.interrupt is not None:
            self.interrupt(failure)

    def _awake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _wait(self, deadline: float) -> None:
        self._wake = trio.Event()
        with trio.move_on_at(deadline):
            await self._wake.wait()
        self._wake = None

    @property
    def kind(self) -> str:
        """The value of the `kind` label: static or bidi."""
        return "static" if self._is_static else "bidi"


class Streams:
    """All streams of this instance.

    Args:
        store: see the Protocol.
        settings: see there.
        encode: an envelope as it goes into a frame; called once for what comes live, however many streams it goes to.
        metrics: the `xmtp_stream_*` metrics.
    """

    def __init__(
        self,
        store: Store,
        settings: StreamSettings,
        encode: Callable[[StoredEnvelope], bytes],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self.settings = settings
        self.encode = encode
        self.metrics = metrics
        self._streams: set[Stream] = set()
        # Tuples, because most topics have one follower here and reading happens far more often than changing.
        self._topics: dict[bytes, tuple[Registration, ...]] = {}
        self._followed = 0
        self._workers = trio.CapacityLimiter(FETCH_WORKERS)
        self._nursery: trio.Nursery | None = None
        self._is_ready = False
        self._batch = 0
        self._sent = _SentCounters(metrics)

    def __repr__(self) -> str:
        return f"<Streams {len(self._streams)} topics={len(self._topics)} ready={self._is_ready}>"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run what streams need beside their callers' tasks; started when streams can be opened. Never returns."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def open(self, *, is_static: bool) -> Stream:
        """A new stream.

        Raises:
            StatusError: UNAVAILABLE while the tailer is not ready.
        """
        if not self._is_ready:
            raise StatusError(Code.UNAVAILABLE, _NOT_READY)
        stream = Stream(self, is_static=is_static)
        self._streams.add(stream)
        self.metrics.stream_sessions.labels(stream.kind).inc()
        return stream

    def start_soon(self, task: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run a task that may outlive the call it belongs to by a moment, and must not raise."""
        assert self._nursery is not None, "`run` comes first"
        self._nursery.start_soon(task, *args)

    # --- from the tailer

    def resume(self) -> None:
        """Everything stored from now on will be delivered: streams may be opened."""
        self._is_ready = True

    def suspend(self, failure: StatusError, end: StreamEnd) -> None:
        """Envelopes may have been missed: end all streams with `failure`, and open none until `resume`."""
        self._is_ready = False
        self._topics.clear()
        for stream in tuple(self._streams):
            stream.fail(StatusError(failure.code, failure.message), end)

    def select(self, seen: Iterable[tuple[int, bytes]]) -> set[int]:
        """Which of the seen (id, topic), ascending, have to be delivered; the others need not be loaded."""
        ids_of: dict[bytes, list[int]] = {}
        for sequence_id, topic in seen:
            if topic in self._topics:
                ids_of.setdefault(topic, []).append(sequence_id)
        wanted: set[int] = set()
        for topic, ids in ids_of.items():
            # Every registration has to hear of the newest, so this is not to be cut short.
            positions = [one.position for one in self._topics[topic] if one.owner.is_due(one, ids[-1])]
            if positions:
                lowest = min(positions)
                wanted.update(sequence_id for sequence_id in ids if sequence_id > lowest)
        return wanted

    async def deliver(self, envelopes: Iterable[StoredEnvelope]) -> None:
        """Hand over envelopes, ascending within each topic."""
        self._batch += 1
        offers = 0
        for topic, rows in _by_topic(envelopes).items():
            for run in self._runs(rows):
                followers = self._topics.get(topic, ())
                now = trio.current_time()
                for registration in followers:
                    registration.owner.offer(registration, run, self._batch, now)
                offers += len(followers)
                if offers >= OFFERS_AT_ONCE:
                    offers = 0
                    await trio.lowlevel.checkpoint()

    def _runs(self, rows: Sequence[StoredEnvelope]) -> Iterator[Run]:
        """The envelopes of a topic in pieces of at most RUN_BYTES, and of a frame, or of one envelope."""
        most = min(RUN_BYTES, self.settings.frame_bytes)
        start = 0
        pieces: list[bytes] = []
        size = 0
        for at, stored in enumerate(rows):
            piece = self.encode(stored)
            if pieces and size + len(piece) > most:
                yield _run(rows[start:at], pieces)
                start, pieces, size = at, [], 0
            pieces.append(piece)
            size += len(piece)
        yield _run(rows[start:], pieces)

    # --- from streams

    def has_room(self, topics: int) -> bool:
        """Whether so many more may be followed."""
        return self._followed + topics <= self.settings.max_followed_topics

    def join(self, registrations: Sequence[Registration]) -> None:
        """Tell their owner of what is seen of these topics."""
        self._followed += len(registrations)
        for one in registrations:
            self._topics[one.topic] = (*self._topics.get(one.topic, ()), one)
        self.metrics.stream_topics_registered.inc(len(registrations))

    def leave(self, registrations: Sequence[Registration]) -> None:
        """Tell them nothing more."""
        self._followed -= len(registrations)
        for one in registrations:
            others = tuple(other for other in self._topics.get(one.topic, ()) if other is not one)
            if others:
                self._topics[one.topic] = others
            else:
                self._topics.pop(one.topic, None)
        self.metrics.stream_topics_registered.dec(len(registrations))

    def left(self, stream: Stream, registrations: Sequence[Registration], end: StreamEnd) -> None:
        """The stream ended."""
        self.leave(registrations)
        self._streams.remove(stream)
        self.metrics.stream_sessions.labels(stream.kind).dec()
        self.metrics.stream_ended.labels(end).inc()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Store]:
        """The store, when it is the caller's turn.

        Raises:
            StatusError: UNAVAILABLE, whatever the database's trouble is; the stream's caller subscribes again.
        """
        since = trio.current_time()
        async with self._workers:
            self.metrics.stream_fetch_wait_seconds.observe(trio.current_time() - since)
            try:
                yield self._store
            except StoreError as error:
                self.metrics.db_errors.labels(error.kind).inc()
                raise StatusError(Code.UNAVAILABLE, _DATABASE_TEXT) from error

    def count_sent(self, frame: Frame, waited_s: float) -> None:
        """A frame was handed to the transport."""
        self._sent.count(frame, waited_s)


class _SentCounters:
    """The counters of sent frames with their labels bound, because looking them up costs more than counting."""

    def __init__(self, metrics: Metrics) -> None:
        kinds = (Started, Applied, Messages, Keepalive, Ping, Pong)
        self._frames = {kind: metrics.stream_frames_sent.labels(kind.__name__.lower()) for kind in kinds}
        self._catch_up, self._live = (metrics.stream_envelopes_sent.labels(phase) for phase in ("catch_up", "live"))
        self._wait = metrics.stream_outbound_wait_seconds

    def count(self, frame: Frame, waited_s: float) -> None:
        """One frame left the queue."""
        self._frames[type(frame)].inc()
        self._wait.observe(waited_s)
        if isinstance(frame, Messages):
            self._catch_up.inc(frame.catch_up)
            self._live.inc(frame.live)
