"""The deliveries that wait for an attempt, and the permits of those being made (PUSH-046, PUSH-049, PUSH-050).

At most 10,000 deliveries wait, whether for a first attempt, a retry that is due, or a retry that is not; at most 256 a
channel are in flight beside them. A page is loaded only when all of it would fit, so its places are reserved before
the statement runs; a retry beats a reservation, and the page is then cut when it arrives. First attempts of a channel
go before its retries. On HTTPS the waiting host with the fewest attempts in flight goes first.

Everything is one synchronous call that leaves the counts consistent; the caller does the I/O and reports back. No call
looks at all that waits, except when the whole of it is thrown away.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from attrs import frozen

from pushd.core.lanes import HostLane, Lane, PlainLane, State, Work, host_of
from pushd.core.retry import Result, Retry, next_step
from pushd.core.window import Window, Windows
from pushd.model import (
    IN_FLIGHT_PER_CHANNEL,
    PAGE_DELIVERIES,
    RETAINED_DELIVERIES,
    TIMED_OUT,
    Channel,
    Delivery,
    DeliveryConfig,
    Gone,
    Outcome,
    Transient,
)


@frozen
class Bounds:
    """The constants of spec §4.7; other values are for tests of the bounds themselves."""

    retained: int = RETAINED_DELIVERIES
    page: int = PAGE_DELIVERIES
    in_flight: int = IN_FLIGHT_PER_CHANNEL


class Retained:
    """Work that waits and work in flight.

    Invariants: what waits never exceeds `bounds.retained`; a channel never has more than `bounds.in_flight` attempts
    running; every admitted delivery ends in exactly one result, or is forgotten by `discard` or `cut`; a window is
    settled once for each of its deliveries, at the end of its first attempt or when it is given up without one.

    Args:
        max_attempts: attempts a delivery, 1 to 10.
    """

    def __init__(self, max_attempts: int, bounds: Bounds | None = None) -> None:
        self._max_attempts = max_attempts
        self._bounds = bounds or Bounds()
        self._lanes: dict[Channel, Lane] = {
            Channel.APNS: PlainLane(),
            Channel.FCM: PlainLane(),
            Channel.HTTP: HostLane(),
        }
        self._in_flight = dict.fromkeys(Channel, 0)
        self._due: list[tuple[float, int, Work]] = []
        self._due_serial = 0
        self._due_stale = 0  # entries of `_due` whose work was dropped meanwhile
        self._by_recipient: dict[bytes, set[Work]] = {}
        self._reserved = 0
        self._retry_until = math.inf
        self._is_discarded = False
        self.waiting = 0
        """Deliveries not yet sent, or to be sent again."""

    def __repr__(self) -> str:
        flying = {channel.label: count for channel, count in self._in_flight.items() if count}
        return f"<Retained waiting={self.waiting} reserved={self._reserved} in_flight={flying}>"

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self._by_recipient

    def in_flight(self, channel: Channel) -> int:
        """Attempts of `channel` that are running."""
        return self._in_flight[channel]

    def startable(self, channel: Channel) -> int:
        """How many attempts `take` would hand out now, one after the other."""
        return min(len(self._lanes[channel]), self._bounds.in_flight - self._in_flight[channel])

    # Loading

    @property
    def has_room(self) -> bool:
        """Whether one more page would fit beside what waits and what is already reserved."""
        return self.waiting + self._reserved + self._bounds.page <= self._bounds.retained

    def reserve(self) -> bool:
        """Keep places free for one page; False when it would not fit."""
        if not self.has_room:
            return False
        self._reserved += self._bounds.page
        return True

    def release(self) -> None:
        """Give back the places of one page that will not be admitted, or has been."""
        self._reserved -= self._bounds.page

    def admit(self, windows: Windows, window: Window, deliveries: Sequence[Delivery], now: float = 0.0) -> int:
        """Take as many of a page's deliveries as there is room for, in order, and say how many.

        A reservation does not keep retries out, so a page may find less room than it reserved; the caller reads the
        rest again. Its reservation is released separately. `now` is the clock of `wake`; it only dates the work.
        """
        count = 0 if self._is_discarded else min(len(deliveries), self._bounds.retained - self.waiting)
        windows.admit(window, count)
        self.waiting += count
        lanes, by_recipient = self._lanes, self._by_recipient
        for delivery in deliveries if count == len(deliveries) else deliveries[:count]:
            config = delivery.config
            work = Work(delivery, window, host_of(config.target) if config.channel is Channel.HTTP else "", now)
            siblings = by_recipient.get(delivery.recipient_id)
            if siblings is None:
                by_recipient[delivery.recipient_id] = {work}
            else:
                siblings.add(work)
            lanes[config.channel].put(work)
        return count

    # Attempts

    def take(self, channel: Channel) -> Work | None:
        """Hand out the next attempt of `channel` with a permit, or None when none is ready or every permit is taken."""
        lane = self._lanes[channel]
        if self._in_flight[channel] >= self._bounds.in_flight or not len(lane):
            return None
        work = lane.take()
        self._in_flight[channel] += 1
        self.waiting -= 1
        work.state = State.IN_FLIGHT
        return work

    def settle(self, work: Work, outcome: Outcome, now: float, jitter: float) -> Result | None:
        """Record what an attempt came to; the delivery's result, or None when it will be tried again.

        DEAD asks the caller to delete the recipient, and to call `drop` when that deleted it.

        Args:
            now: the clock that `wake` and `stop` are given, in seconds.
            jitter: random number in [0, 1).
        """
        self._land(work, timed_out=isinstance(outcome, Transient) and outcome.reason == TIMED_OUT)
        work.attempts += 1
        step = next_step(
            outcome,
            work.delivery.config.channel,
            work.attempts,
            self._max_attempts,
            all_gone=work.all_gone,
            jitter=jitter,
        )
        if work.attempts == 1:
            work.window.settle()
        if isinstance(step, Result):
            self._forget(work)
            return step
        work.all_gone = work.all_gone and isinstance(outcome, Gone)
        return self._try_again(work, step, now)

    def fail(self, work: Work) -> None:
        """End a delivery in flight for which no attempt can be made at all, with the result FAILED."""
        self._land(work)
        if work.attempts == 0:
            work.window.settle()
        self._forget(work)

    def cut(self, work: Work) -> Result | None:
        """An attempt in flight was interrupted by the end of the drain.

        A retry counts as failed, as nobody makes it again. A first attempt counts as never made: its window stays
        open, and the next holder sends it (PUSH-048).
        """
        self._land(work)
        self._forget(work)
        return Result.FAILED if work.attempts else None

    def wake(self, now: float) -> set[Channel]:
        """Make the retries that are due by `now` ready; the channels that have new ready work."""
        channels = set()
        while self._due and self._due[0][0] <= now:
            _, _, work = heapq.heappop(self._due)
            if work.state is not State.WAITING:
                self._due_stale -= 1
                continue
            work.state, work.ready_at = State.READY, now
            self._lanes[work.delivery.config.channel].put(work)
            channels.add(work.delivery.config.channel)
        return channels

    @property
    def next_due(self) -> float:
        """When `wake` may have something to do, infinite when no retry waits."""
        return self._due[0][0] if self._due else math.inf

    # Giving up

    def drop(self, recipient_id: bytes, config: DeliveryConfig, secret_hash: bytes) -> int:
        """The recipient was deleted: forget what waits for exactly this configuration and say how much (all DEAD).

        Attempts of it in flight go on but are not repeated. Work for another configuration of the same recipient, who
        may have registered anew, stays.
        """
        doomed = [
            work
            for work in self._by_recipient.get(recipient_id, ())
            if work.delivery.config == config and work.delivery.secret_hash == secret_hash
        ]
        dropped = 0
        for work in doomed:
            if work.state is State.IN_FLIGHT:
                work.barred = True
                continue
            self._withdraw(work)
            dropped += 1
        return dropped

    def stop(self, deadline: float) -> Counter[Channel]:
        """No retry later than `deadline` will be made: forget those that wait for one and count them (all FAILED)."""
        self._retry_until = min(self._retry_until, deadline)
        return self._give_up(work for due, _, work in list(self._due) if due > self._retry_until)

    def expire(self) -> Counter[Channel]:
        """The drain is over: forget all retries that wait and count them (all FAILED).

        First attempts stay where they are: they were not made, and their windows keep the mark below them.
        """
        self._retry_until = -math.inf
        waiting = (work for siblings in self._by_recipient.values() for work in siblings if work.attempts)
        return self._give_up([work for work in waiting if work.state is not State.IN_FLIGHT])

    def discard(self) -> int:
        """The lock is lost: forget all that waits, unsent and uncounted, for the successor to send; say how much.

        Attempts in flight go on; none of them is repeated. A page that arrives later finds no room.
        """
        self._is_discarded = True
        self._retry_until = -math.inf
        works = [work for lane in self._lanes.values() for work in lane.clear()]
        works += [work for _, _, work in self._due if work.state is State.WAITING]
        self._due.clear()
        self._due_stale = 0
        for work in works:
            self._forget(work)
        self.waiting = 0
        return len(works)

    # The same few moves for all of the above

    def _try_again(self, work: Work, retry: Retry, now: float) -> Result | None:
        due = now + retry.delay_s
        if work.barred or due > self._retry_until or self.waiting >= self._bounds.retained:
            self._forget(work)
            return Result.FAILED
        work.state = State.WAITING
        self.waiting += 1
        self._due_serial += 1
        heapq.heappush(self._due, (due, self._due_serial, work))
        return None

    def _land(self, work: Work, *, timed_out: bool = False) -> None:
        assert work.state is State.IN_FLIGHT
        channel = work.delivery.config.channel
        self._in_flight[channel] -= 1
        self._lanes[channel].done(work, timed_out=timed_out)

    def _withdraw(self, work: Work) -> None:
        """Take work that waits out of whatever holds it; a first attempt given up counts as made."""
        if work.state is State.READY:
            self._lanes[work.delivery.config.channel].remove(work)
        else:
            self._due_stale += 1
        if work.attempts == 0:
            work.window.settle()
        self.waiting -= 1
        self._forget(work)
        if self._due_stale > self._bounds.retained:
            # Stale entries leave when they are due, up to 300 s later. Rebuilding once in `retained` drops keeps the
            # heap bounded at constant cost a drop.
            self._due = [entry for entry in self._due if entry[2].state is State.WAITING]
            heapq.heapify(self._due)
            self._due_stale = 0

    def _give_up(self, works: Iterable[Work]) -> Counter[Channel]:
        counts: Counter[Channel] = Counter()
        for work in works:
            if work.state is not State.DONE:
                self._withdraw(work)
                counts[work.delivery.config.channel] += 1
        return counts

    def _forget(self, work: Work) -> None:
        work.state = State.DONE
        siblings = self._by_recipient[work.delivery.recipient_id]
        siblings.discard(work)
        if not siblings:
            del self._by_recipient[work.delivery.recipient_id]
