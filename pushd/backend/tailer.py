"""The tailer: one reader of everything that is stored, which feeds the streams of this instance (PUSH-104).

It reads by sequence id, above the closed boundary too: what is visible is delivered, settled or not. Ids that it passed
without seeing an envelope are watched until they show one or the boundary settles them; while there are such ids it
asks for the boundary to be advanced.

It owns its session and knows no topic: the hub says which envelopes have to be loaded. When anything fails, envelopes
may have been missed, so all streams end and it starts afresh; clients subscribe again from their cursors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

from pushd.core.unread import Unread, rows_within
from pushd.errors import Code, StatusError, StoreError
from pushd.model import StoredEnvelope
from pushd.store.tailer import Poll
from pushd.telemetry import Event, Metrics, StreamEnd, get_logger

PAGE_ROWS = 1_024
PAYLOAD_BYTES = 64 * 2**20  # loaded by one poll
REPLICA_REPORT_S = 10.0
_FAILED = "streams lost the database"
_TOO_MANY_GAPS = "too many envelopes are not settled"


class Session(Protocol):
    """A session on the read database."""

    async def load_boundary(self) -> int:
        """The closed boundary there."""
        ...

    async def poll(self, unread: Unread, max_rows: int) -> Poll:
        """What of the unread ids is visible."""
        ...

    async def load(self, ids: Sequence[int]) -> list[StoredEnvelope]:
        """Envelopes by id."""
        ...


class Store(Protocol):
    """Where sessions come from."""

    async def load_primary_boundary(self) -> int:
        """The closed boundary on the primary."""
        ...

    def open(self) -> AbstractAsyncContextManager[Session]:
        """A session of the tailer's own."""
        ...


class Hub(Protocol):
    """Whom it tells; see `pushd.backend.streams.Streams`."""

    def resume(self) -> None:
        """Everything from now on is delivered."""
        ...

    def suspend(self, failure: StatusError, end: StreamEnd) -> None:
        """Something may be missing."""
        ...

    def select(self, seen: Iterable[tuple[int, bytes]]) -> set[int]:
        """Which envelopes to load."""
        ...

    async def deliver(self, envelopes: Iterable[StoredEnvelope]) -> None:
        """Hand them over."""
        ...


class Tailer:
    """Polls for new envelopes.

    Args:
        store, hub: see the Protocols.
        request_boundary: `BoundaryTask.request`; made once for the process, so a request outlives a recovery here.
        poll_interval_s: from the end of one poll to the start of the next.
        max_gap_ranges: of ids not settled; more of them end all streams RESOURCE_EXHAUSTED.
        metrics: the `xmtp_tailer_*` metrics.
    """

    def __init__(
        self,
        store: Store,
        hub: Hub,
        request_boundary: Callable[[], None],
        *,
        poll_interval_s: float,
        max_gap_ranges: int,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._hub = hub
        self._request_boundary = request_boundary
        self._poll_interval_s = poll_interval_s
        self._max_gap_ranges = max_gap_ranges
        self._metrics = metrics
        self._polls = {result: metrics.tailer_polls.labels(result) for result in ("ok", "error")}
        self._forward, self._gap = (metrics.tailer_rows.labels(source) for source in ("forward", "gap"))
        self._unread = Unread(0)
        self._is_ready = False
        self._is_failing = False
        self._log = get_logger()
        self.restarts = 0
        """How often streams were served and then ended."""

    def __repr__(self) -> str:
        return f"<Tailer {self._unread!r} ready={self._is_ready} restarts={self.restarts}>"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tail for ever, recovering from failures; started when streams are served for the first time."""
        is_started = False
        while True:
            try:
                async with self._store.open() as session:
                    await self._bootstrap(session)
                    self._begin()
                    if not is_started:
                        is_started = True
                        task_status.started()
                    await self._tail(session)
            except StoreError as error:
                self._polls["error"].inc()
                self._fail(StatusError(Code.UNAVAILABLE, _FAILED), StreamEnd.TAILER, error.kind)
            else:
                self._fail(StatusError(Code.RESOURCE_EXHAUSTED, _TOO_MANY_GAPS), StreamEnd.CAPACITY, "capacity")
            await trio.sleep(self._poll_interval_s)

    async def _bootstrap(self, session: Session) -> None:
        """Start above the primary's boundary, once the read database shows it.

        Then it shows whatever a subscriber can have read from any instance up to that boundary.
        """
        boundary = await self._store.load_primary_boundary()
        reported = trio.current_time()
        while await session.load_boundary() < boundary:
            if trio.current_time() - reported >= REPLICA_REPORT_S:
                reported = trio.current_time()
                self._log.warning(Event.REPLICA_WAIT)
            await trio.sleep(self._poll_interval_s)
        self._unread = Unread(boundary)

    async def _tail(self, session: Session) -> None:
        """Poll until there are too many gaps to watch."""
        while True:
            is_complete = await self._poll(session)
            gaps = len(self._unread.gaps)
            self._metrics.tailer_gap_ranges.set(gaps)
            if gaps:
                self._request_boundary()
            if gaps > self._max_gap_ranges:
                return
            if is_complete:
                await trio.sleep(self._poll_interval_s)

    async def _poll(self, session: Session) -> bool:
        """Deliver a page of what became visible; whether that was all."""
        poll = await session.poll(self._unread, PAGE_ROWS)
        wanted = self._hub.select((seen.sequence_id, seen.topic) for seen in poll.seen)
        sizes = [(seen.sequence_id, seen.payload_bytes) for seen in poll.seen]
        ids = [sequence_id for sequence_id, _ in sizes[: rows_within(sizes, wanted, PAYLOAD_BYTES)]]
        is_complete = poll.is_complete and len(ids) == len(sizes)
        to_load = [sequence_id for sequence_id in ids if sequence_id in wanted]
        if to_load:
            # Of a later snapshot than `poll`, but a stored envelope never changes.
            await self._hub.deliver(await session.load(to_load))
        forward = sum(sequence_id > self._unread.passed for sequence_id in ids)
        self._forward.inc(forward)
        self._gap.inc(len(ids) - forward)
        self._polls["ok"].inc()
        self._unread = self._unread.after(ids, poll.boundary, is_complete=is_complete)
        return is_complete

    def _begin(self) -> None:
        self._is_ready = True
        self._is_failing = False
        self._metrics.tailer_ready.set(1)
        self._hub.resume()

    def _fail(self, failure: StatusError, end: StreamEnd, kind: str) -> None:
        if not self._is_failing:  # an outage is worth one line
            self._log.warning(Event.TAILER_FAILED, kind=kind)
        self._is_failing = True
        if self._is_ready:
            self._is_ready = False
            self.restarts += 1
            self._metrics.tailer_restarts.inc()
        self._metrics.tailer_ready.set(0)
        self._metrics.tailer_gap_ranges.set(0)
        self._hub.suspend(failure, end)
