"""What a term does beside sending: the expiry sweep and the requests for boundary maintenance.

Neither ever ends the term: both are tried again, and nothing is lost meanwhile.
"""

from __future__ import annotations

from typing import Protocol

import trio

from pushd.dispatch.loader import Boundary
from pushd.errors import StoreError
from pushd.telemetry import Event, Metrics, get_logger

SWEEP_INTERVAL_S = 3_600.0


class SweepStore(Protocol):
    """Deletes expired recipients by the batch."""

    async def delete_expired(self, ttl_s: int) -> int: ...


class MaintenanceStore(Protocol):
    """Knows whether eligible rows wait above the boundary."""

    async def needs_maintenance(self) -> bool: ...


async def run_sweep(store: SweepStore, ttl_s: int, metrics: Metrics) -> None:
    """Delete recipients that stopped renewing, now and then once an hour (PUSH-024). Never returns.

    In batches, because a recipient may have a hundred thousand subscriptions to delete with it: one statement for all
    of a backlog would run into its time-out and never get anywhere.
    """
    log = get_logger()
    expired = metrics.push_recipients.labels("expired")
    while True:
        total = 0
        began = trio.current_time()
        result = "error"
        try:
            while count := await store.delete_expired(ttl_s):
                total += count
                expired.inc(count)
            result = "ok"
        except StoreError as error:
            log.warning(Event.SWEEP_FAILED, kind=error.kind)
        metrics.push_sweeps.labels(result).inc()
        metrics.push_sweep_seconds.observe(trio.current_time() - began)
        if total:
            log.info(Event.SWEPT, recipients=total)
        await trio.sleep(SWEEP_INTERVAL_S)


async def run_maintenance(store: MaintenanceStore, boundary: Boundary, poll_interval_s: float) -> None:
    """Ask for an advance of the boundary whenever eligible rows lie above it (PUSH-042). Never returns."""
    log = get_logger()
    is_failing = False
    while True:
        try:
            if await store.needs_maintenance():
                boundary.request()
            is_failing = False
        except StoreError as error:
            if not is_failing:
                log.warning(Event.MAINTENANCE_PROBE_FAILED, kind=error.kind)
            is_failing = True
        await trio.sleep(poll_interval_s)
