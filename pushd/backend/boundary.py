"""The task that closes the allocation boundary on request (PUSH-042, PUSH-104).

Requests are one pending bit on an object that outlives whatever runs the task or asks of it. The bit falls just before
an attempt and rises again when the attempt comes to nothing, so no request is ever lost: not to a barrier that stayed
taken, not to a database that was away, not to a caller's own recovery. Any number of requests is one attempt, and
attempts start at least one poll interval apart, whoever asks and however often.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio

from pushd.errors import StoreError
from pushd.telemetry import Event, Metrics, get_logger


class BoundaryTask:
    """Advances the closed allocation boundary, and tells this instance's dispatcher when it did.

    Args:
        advance: one attempt; the new boundary, or None when the barrier was not granted in time. May raise StoreError.
        poll_interval_s: seconds from the start of one attempt to the start of the next, at least.
        metrics: counts attempts by result.
    """

    def __init__(
        self, advance: Callable[[], Awaitable[int | None]], *, poll_interval_s: float, metrics: Metrics
    ) -> None:
        self._advance = advance
        self._poll_interval_s = poll_interval_s
        self._results = metrics.boundary_advances
        self._log = get_logger()
        self._requested = trio.Event()
        self._requested.set()  # one attempt at the start, so that a boundary is known before anybody asks
        self._next_attempt = -math.inf
        self._advanced = trio.Event()
        self._last_result = "ok"
        self.closed_sequence_id = 0
        """The boundary this instance last closed; 0 until the first success. Others may have closed a higher one."""

    def __repr__(self) -> str:
        return f"<BoundaryTask closed={self.closed_sequence_id} pending={self.is_pending} last={self._last_result}>"

    @property
    def is_pending(self) -> bool:
        """Whether an attempt is due."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask for an advance. Returns at once; may be called at any time, by anyone."""
        self._requested.set()

    async def wait_above(self, sequence_id: int) -> int:
        """Wait until this instance closed the boundary above `sequence_id`; returns the boundary."""
        while self.closed_sequence_id <= sequence_id:
            await self._advanced.wait()
        return self.closed_sequence_id

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Attempt whenever asked to; started with the boundary once there is one. Never returns."""
        is_started = False
        while True:
            await self._requested.wait()
            await trio.sleep_until(self._next_attempt)
            self._requested = trio.Event()
            self._next_attempt = trio.current_time() + self._poll_interval_s
            closed = None
            try:
                closed = await self._attempt()
            finally:
                if closed is None:  # it came to nothing; a cancelled attempt may be followed by another run
                    self._requested.set()
            if closed is None:
                continue
            self._tell(closed)
            if not is_started:
                is_started = True
                task_status.started(closed)

    async def _attempt(self) -> int | None:
        try:
            closed = await self._advance()
        except StoreError as error:
            self._note("error", Event.BOUNDARY_FAILED, kind=error.kind)
            return None
        if closed is None:
            self._note("lock_timeout", Event.BOUNDARY_LOCK_TIMEOUT)
        else:
            self._note("ok")
        return closed

    def _note(self, result: str, event: Event | None = None, **fields: str) -> None:
        """Count an attempt; a failure is worth a line each time, an outage only its first one."""
        if event is not None and (result == "lock_timeout" or result != self._last_result):
            self._log.warning(event, **fields)
        self._last_result = result
        self._results.labels(result).inc()

    def _tell(self, closed: int) -> None:
        if closed > self.closed_sequence_id:
            self.closed_sequence_id = closed
            self._advanced.set()
            self._advanced = trio.Event()
