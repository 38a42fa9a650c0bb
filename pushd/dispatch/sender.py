"""Makes the attempts: one at a time a permit, as many permits a channel as spec §4.7 allows (PUSH-046, PUSH-050).

A permit is a task. It carries one delivery after the other of its channel for as long as one is ready and then ends,
so a busy channel starts no tasks, a quiet one holds none, and what runs is what is in flight. A new task for every
delivery would be the plainer shape; starting one costs as much as everything else here does for a delivery.

State changes in synchronous calls between two awaits; `Retained` decides, this module sends, counts and wakes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

import trio

from pushd.core.lanes import Work
from pushd.core.retained import Retained
from pushd.core.retry import Result
from pushd.dispatch.instruments import Instruments
from pushd.dispatch.keeper import Trust
from pushd.dispatch.tally import Tally
from pushd.model import ATTEMPT_S, TIMED_OUT, Channel, Delivery, DeliveryConfig, Outcome, Transient
from pushd.telemetry import Event, get_logger


class ChannelSender(Protocol):
    """One channel's way to its provider."""

    async def attempt(self, delivery: Delivery) -> Outcome:
        """Make one attempt. It may be cancelled after ATTEMPT_S."""
        ...


class Reports:
    """What is worth one line in the log of a process, and not one a delivery."""

    def __init__(self) -> None:
        self._log = get_logger()
        self._seen: set[tuple[str, ...]] = set()

    def channel_missing(self, channel: Channel) -> None:
        """A recipient is registered on a channel that is not configured any more."""
        if self._is_new(("missing", channel.label)):
            self._log.warning(Event.CHANNEL_MISSING, channel=channel.label)

    def attempt_crashed(self, channel: Channel, error: Exception) -> None:
        """A sender raised. Its text may quote what it was given, so only its type and place are told."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        if self._is_new(("crashed", channel.label, type(error).__name__, place)):
            self._log.error(Event.ATTEMPT_CRASHED, channel=channel.label, error=type(error).__name__, place=place)

    def _is_new(self, key: tuple[str, ...]) -> bool:
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


class Sending:
    """The attempts of one term.

    Args:
        nursery: where attempts run; it outlives the lock, as attempts in flight finish.
        senders: the configured channels.
        retained: the work.
        tally: counts results.
        instruments: measures attempts.
        reports: warns once a process.
        on_dead: told of each delivery whose provider named the token as dead.
        trust: whether the lock was proven recently enough to begin an attempt.
        jitter: random numbers in [0, 1).
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        senders: Mapping[Channel, ChannelSender],
        retained: Retained,
        tally: Tally,
        instruments: Instruments,
        reports: Reports,
        *,
        on_dead: Callable[[Delivery], None],
        trust: Trust,
        jitter: Callable[[], float],
    ) -> None:
        self._nursery = nursery
        self._senders = senders
        self._retained = retained
        self._tally = tally
        self._instruments = instruments
        self._reports = reports
        self._on_dead = on_dead
        self._trust = trust
        self._jitter = jitter
        self._sooner = trio.Event()
        self._armed_for = float("inf")
        self._wanted: Callable[[], bool] | None = None
        self._reached = trio.Event()

    def __repr__(self) -> str:
        return f"<Sending {self._retained!r}>"

    def kick(self) -> None:
        """Begin every attempt that may begin now."""
        if self._trust.is_valid:
            for channel in Channel:
                while (work := self._retained.take(channel)) is not None:
                    self._nursery.start_soon(self._carry, work, channel)
            self._ease()

    async def wait_room(self) -> None:
        """Return once a page fits."""
        await self._wait_for(lambda: self._retained.has_room)

    async def wait_idle(self) -> None:
        """Return once nothing waits and nothing is in flight."""
        await self._wait_for(lambda: self._retained.is_empty)

    async def run_retries(self) -> None:
        """Begin retries as they become due."""
        while True:
            self._sooner = trio.Event()
            self._armed_for = self._retained.next_due
            with trio.move_on_at(self._armed_for):
                await self._sooner.wait()
            if self._retained.wake(trio.current_time()):
                self.kick()

    def drop(self, recipient_id: bytes, config: DeliveryConfig, secret_hash: bytes) -> None:
        """The recipient was deleted: its pending work is over."""
        dropped = self._retained.drop(recipient_id, config, secret_hash)
        if dropped:
            self._tally.count(config.channel, Result.DEAD, dropped)
            self._ease()

    def stop(self, deadline: float) -> None:
        """Give up retries that would come after `deadline`, now rather than then."""
        self._tally.count_all(self._retained.stop(deadline), Result.FAILED)
        self._ease()

    def expire(self) -> None:
        """The drain is over: give up every retry."""
        self._tally.count_all(self._retained.expire(), Result.FAILED)

    async def _carry(self, work: Work, channel: Channel) -> None:
        """Make attempts with one permit until none of the channel may begin."""
        sender = self._senders.get(channel)
        if sender is None:
            self._fail_all(work, channel)
            return
        following: Work | None = work
        while following is not None:
            work = following
            try:
                # Entering a scope costs more than the rest of this loop, so one serves attempt after attempt, each with
                # a deadline of its own, until one runs out of time and uses it up.
                with trio.CancelScope() as limit:
                    while not limit.cancel_called:
                        began = trio.current_time()
                        limit.deadline = began + ATTEMPT_S
                        outcome = await self._attempt(sender, work)
                        following = self._settle(work, channel, outcome, began)
                        if following is None:
                            return
                        work = following
            except BaseException:
                if self._retained.cut(work) is not None:
                    self._tally.count(channel, Result.FAILED)
                raise
            if limit.cancelled_caught:
                following = self._settle(work, channel, Transient(TIMED_OUT, 0.0), began)

    async def _attempt(self, sender: ChannelSender, work: Work) -> Outcome:
        try:
            return await sender.attempt(work.delivery)
        except Exception as error:  # the edge of one delivery: a bug in a sender must not end the term
            self._reports.attempt_crashed(work.delivery.config.channel, error)
            return Transient("internal", 0.0)

    def _settle(self, work: Work, channel: Channel, outcome: Outcome, began: float) -> Work | None:
        """Record an outcome, and take the attempt that gets the permit next."""
        now = trio.current_time()
        self._instruments.attempted(work, channel, outcome, began, now)
        result = self._retained.settle(work, outcome, now, self._jitter())
        if result is not None:
            self._tally.count(channel, result)
            if result is Result.DEAD:
                self._on_dead(work.delivery)
        elif self._retained.next_due < self._armed_for:
            self._sooner.set()
        return self._take(channel)

    def _fail_all(self, work: Work, channel: Channel) -> None:
        """The channel is not configured any more: no attempt can be made, now or by a retry."""
        self._reports.channel_missing(channel)
        following: Work | None = work
        while following is not None:
            self._retained.fail(following)
            self._tally.count(channel, Result.FAILED)
            following = self._take(channel)

    def _take(self, channel: Channel) -> Work | None:
        work = self._retained.take(channel) if self._trust.is_valid else None
        self._ease()
        return work

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """The loader waits for room, then for the end of its work: there is one waiter at a time."""
        while not condition():
            self._wanted, self._reached = condition, trio.Event()
            try:
                await self._reached.wait()
            finally:
                self._wanted = None

    def _ease(self) -> None:
        """Work became less: wake who waits for that, once it is enough."""
        if self._wanted is not None and self._wanted():
            self._reached.set()
