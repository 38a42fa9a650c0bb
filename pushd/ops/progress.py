"""How far dispatching is, as the database tells it: asked when somebody asks for metrics or the page, not otherwise."""

from __future__ import annotations

import math

import trio

from pushd.errors import StoreError
from pushd.store.database import Database
from pushd.store.operations import DispatchStatus, load_dispatch_status
from pushd.telemetry import Metrics

DATABASE_S = 2.0  # a scrape must come back with the rest of the metrics while the database is away
FRESH_S = 1.0  # several readers at once cost one statement


class Progress:
    """The last answer, and the gauges made of it.

    Args:
        database: asked on its primary.
        metrics: `pushd_database_up`, the lag and the skipped rows.
    """

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self._one_at_a_time = trio.Lock()
        self._asked_at = -math.inf
        self.status: DispatchStatus | None = None
        """None while the database does not answer."""

    async def refresh(self) -> None:
        """Ask anew unless that was done within the last second; takes DATABASE_S at most."""
        with trio.move_on_after(DATABASE_S):
            async with self._one_at_a_time:
                if trio.current_time() - self._asked_at >= FRESH_S:
                    self._tell(await self._ask())
            return
        self._tell(None)

    async def _ask(self) -> DispatchStatus | None:
        try:
            async with self._database.primary() as connection:
                return await load_dispatch_status(connection)
        except StoreError:
            return None

    def _tell(self, status: DispatchStatus | None) -> None:
        self._asked_at = trio.current_time()
        self.status = status
        metrics = self._metrics
        metrics.database_up.set(status is not None)
        # NaN, because a number from before an outage would look like one.
        metrics.push_cursor_lag_rows.set(status.waiting_rows if status else math.nan)
        metrics.push_cursor_lag_seconds.set(lag_s(status) if status else math.nan)
        metrics.push_cursor_lag_sequences.set(max(0, status.closed_sequence_id - status.cursor) if status else math.nan)
        metrics.push_skipped_rows.set(status.skipped_rows if status else math.nan)


def lag_s(status: DispatchStatus) -> float:
    """Age of the oldest eligible envelope above the cursor in seconds; 0 when there is none."""
    if status.oldest_waiting_ns is None:
        return 0.0
    return max(0.0, (status.now_ns - status.oldest_waiting_ns) / 1e9)
