"""The dispatcher of one instance: it tries for the lock, holds it for a term, and tries again (PUSH-040).

    campaign            one lock session, until it ends
    └─ burials          deletes dead recipients; ends after the last attempt, and soon after a loss
       └─ attempts      outlives the lock: what is in flight finishes
          └─ loops      only while the lock is held
             ├─ keeper  proves the lock, moves the cursor
             ├─ retries, sweep, maintenance
             └─ loader

A term ends in one of four ways. Stop: no new window is begun, everything begun is sent as far as the deadline allows,
the final mark is written, and the session closes. Step-down, which an operator asks for: the same within the drain
time, and then this instance leaves the lock to others for a while. Lock loss: what is queued is forgotten unsent, for
the successor to send, what is in flight finishes and is counted, and the cursor is left alone. A bug: everything is
cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import trio
from attrs import frozen

from pushd.core.retained import Retained
from pushd.core.window import Windows
from pushd.dispatch.graves import Graves, GraveStore
from pushd.dispatch.instruments import Instruments
from pushd.dispatch.keeper import BEAT_S, Keeper, LockSession, Trust
from pushd.dispatch.loader import Boundary, Loader, PageStore
from pushd.dispatch.sender import ChannelSender, Reports, Sending
from pushd.dispatch.tally import Tally
from pushd.dispatch.upkeep import MaintenanceStore, SweepStore, run_maintenance, run_sweep
from pushd.errors import OwnershipLost, StoreError
from pushd.model import ATTEMPT_S, Channel
from pushd.stop import StopSignal
from pushd.telemetry import Event, Metrics, get_logger

SIT_OUT_INTERVALS = 20  # after a step-down; others try every interval, and with no other this is the longest gap


class Store(PageStore, GraveStore, SweepStore, MaintenanceStore, Protocol):
    """Everything the dispatcher asks of the database."""

    def open_lock_session(self) -> AbstractAsyncContextManager[LockSession]: ...


@frozen
class DispatchSettings:
    """How the dispatcher works.

    Attributes:
        poll_interval_s: least time between tries for the lock, cursor writes, maintenance requests and idle polls.
        max_attempts: attempts a delivery, 1 to 10.
        recipient_ttl_s: a recipient that has not renewed for longer is deleted.
        drain_s: longest time between the request to step down and the lock's return.
    """

    poll_interval_s: float = 0.1
    max_attempts: int = 3
    recipient_ttl_s: int = 2_592_000
    drain_s: float = 20.0


async def run_dispatcher(
    store: Store,
    senders: Mapping[Channel, ChannelSender],
    settings: DispatchSettings,
    *,
    metrics: Metrics,
    boundary: Boundary,
    stop: StopSignal,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Dispatch until stopped; returns by the stop's deadline, give or take a quarter of a second.

    Args:
        store: `pushd.store.dispatch.DispatchStore`.
        senders: the configured channels; a delivery on any other counts as failed. May be empty: the cursor then stays
            current and expiry works all the same.
        settings: intervals and bounds.
        metrics: counts and the holder's gauge.
        boundary: the instance's boundary task.
        stop: ends it.
        jitter: random numbers in [0, 1) that spread retries.
    """
    dispatcher = _Dispatcher(store, senders, settings, metrics, boundary, stop, jitter)
    while not stop.requested:
        await dispatcher.campaign()


class _Dispatcher:
    def __init__(
        self,
        store: Store,
        senders: Mapping[Channel, ChannelSender],
        settings: DispatchSettings,
        metrics: Metrics,
        boundary: Boundary,
        stop: StopSignal,
        jitter: Callable[[], float],
    ) -> None:
        self._store = store
        self._senders = senders
        self._settings = settings
        self._metrics = metrics
        self._boundary = boundary
        self._stop = stop
        self._jitter = jitter
        self._tally = Tally(metrics)
        self._instruments = Instruments(metrics)
        self._reports = Reports()
        self._log = get_logger()
        self._is_unreachable = False

    async def campaign(self) -> None:
        """Open a session, wait for the lock on it, hold one term, see the term's attempts to their end."""
        step_down = StopSignal()
        with trio.CancelScope() as scope:
            self._stop.bound(scope)
            step_down.bound(scope)
            try:
                await self._campaign(step_down)
            finally:
                self._stop.release(scope)
        if step_down.requested:
            await self._pause(trio.current_time() + SIT_OUT_INTERVALS * self._settings.poll_interval_s)

    async def _campaign(self, step_down: StopSignal) -> None:
        started = trio.current_time()
        retained = Retained(self._settings.max_attempts)
        self._instruments.watch(retained)
        trust = Trust()
        graves = Graves(self._store, self._metrics)
        async with trio.open_nursery() as burials:
            async with trio.open_nursery() as attempts:
                sending = Sending(
                    attempts,
                    self._senders,
                    retained,
                    self._tally,
                    self._instruments,
                    self._reports,
                    on_dead=graves.note,
                    trust=trust,
                    jitter=self._jitter,
                )
                burials.start_soon(graves.run, sending.drop)
                await self._session(trust, retained, sending, step_down)
                ended = trio.current_time()
            graves.close()
            if not self._stop.requested and not step_down.requested:
                # The lock was lost and may be had again: what is left to delete waits no longer than attempts may take.
                burials.cancel_scope.deadline = ended + ATTEMPT_S
        await self._pause(started + self._settings.poll_interval_s)

    async def _session(self, trust: Trust, retained: Retained, sending: Sending, step_down: StopSignal) -> None:
        try:
            async with self._store.open_lock_session() as session:
                keeper = Keeper(session, trust, self._settings.poll_interval_s)
                if await self._wait_for_lock(keeper):
                    await self._hold(keeper, retained, sending, step_down)
        except StoreError as error:
            if not self._is_unreachable:
                self._log.warning(Event.DISPATCHER_UNREACHABLE, kind=error.kind)
            self._is_unreachable = True

    async def _wait_for_lock(self, keeper: Keeper) -> bool:
        """Try once a poll interval; False when stopped before. Raises StoreError."""
        while not self._stop.requested:
            next_try = trio.current_time() + self._settings.poll_interval_s
            if await keeper.win():
                return True
            self._is_unreachable = False
            while trio.current_time() < next_try and not self._stop.requested:
                # A session that falls silent for longer than this is ended by the server.
                await self._pause(min(next_try, trio.current_time() + BEAT_S))
                if trio.current_time() < next_try and not self._stop.requested:
                    await keeper.prove()
        return False

    async def _hold(self, keeper: Keeper, retained: Retained, sending: Sending, step_down: StopSignal) -> None:
        """One term, from the lock to the final mark."""
        windows = Windows(keeper.cursor)
        ended = _Ending(self._metrics, self._log)
        loader = Loader(
            self._store,
            windows,
            retained,
            sending,
            self._tally,
            boundary=self._boundary,
            poll_interval_s=self._settings.poll_interval_s,
        )

        def on_proof() -> None:
            sending.kick()
            if keeper.is_asked_to_step_down and not step_down.requested:
                ended.stepping_down(self._settings.drain_s)
                step_down.request(trio.current_time() + self._settings.drain_s)

        async def keep() -> None:
            try:
                await keeper.run(windows, on_proof)
            except (OwnershipLost, StoreError) as error:
                ended.lost(error, retained.discard())
                loops.cancel_scope.cancel(reason="lock lost")

        async def heed(signal: StopSignal) -> None:
            await signal.wait()
            loader.stop()
            sending.stop(signal.deadline)

        self._is_unreachable = False
        self._metrics.push_dispatcher.set(1)
        self._metrics.push_terms_started.inc()
        self._log.info(Event.TERM_STARTED, cursor=windows.mark)
        try:
            async with trio.open_nursery() as loops:
                loops.start_soon(keep)
                loops.start_soon(heed, self._stop)
                loops.start_soon(heed, step_down)
                loops.start_soon(sending.run_retries)
                loops.start_soon(run_sweep, self._store, self._settings.recipient_ttl_s, self._metrics)
                loops.start_soon(run_maintenance, self._store, self._boundary, self._settings.poll_interval_s)
                await loader.run()
                await sending.wait_idle()
                loops.cancel_scope.cancel(reason="drained")
            if not ended.is_lost:
                await keeper.finish(windows.mark)
        except (OwnershipLost, StoreError) as error:
            ended.lost(error, 0)
        finally:
            # Also when the deadline has cut the above: the mark is true at any moment.
            if not ended.is_lost:
                sending.expire()
                await keeper.finish_late(windows.mark)
            ended.tell(keeper.cursor)

    async def _pause(self, until: float) -> None:
        with trio.move_on_at(until):
            await self._stop.wait()


class _Ending:
    """How a term ended, told once: to the gauge at the first sign of it, to the log when it is over."""

    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._gauge = metrics.push_dispatcher
        self._ended = metrics.push_terms_ended
        self._log = log
        self._reason = "stopped"
        self._discarded = 0
        self.is_lost = False

    def stepping_down(self, drain_s: float) -> None:
        """An operator asked for it; whatever ends the term now, it would have ended."""
        self._reason = "stepped_down"
        self._log.info(Event.STEPPING_DOWN, drain_s=drain_s)

    def lost(self, error: OwnershipLost | StoreError, discarded: int) -> None:
        """The lock or the cursor is not ours any more, or nobody can tell."""
        self.is_lost = True
        self._reason = "ownership_lost" if isinstance(error, OwnershipLost) else f"database_{error.kind}"
        self._discarded = discarded
        self._gauge.set(0)

    def tell(self, cursor: int) -> None:
        """The term is over."""
        self._gauge.set(0)
        self._ended.labels(self._reason).inc()
        self._log.info(Event.TERM_ENDED, reason=self._reason, discarded=self._discarded, cursor=cursor)
