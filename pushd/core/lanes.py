"""One delivery on its way, and the lines in which a channel's ready deliveries wait for a permit."""

from __future__ import annotations

import enum
import re
from collections import OrderedDict
from typing import Protocol

from pushd.core.fairness import HostQueue
from pushd.core.window import Window
from pushd.model import Delivery

_HOST = re.compile(r"\[[^\]]*\]?|[^/?#:]+")


class State(enum.Enum):
    """Where a delivery is on its way."""

    READY = enum.auto()  # waits for a permit
    WAITING = enum.auto()  # waits for its retry to be due, without a permit
    IN_FLIGHT = enum.auto()
    DONE = enum.auto()


class Work:
    """One delivery on its way. Changed by `pushd.core.retained` alone; others read it."""

    __slots__ = ("all_gone", "attempts", "barred", "delivery", "host", "ready_at", "state", "window")

    def __init__(self, delivery: Delivery, window: Window, host: str, ready_at: float) -> None:
        self.delivery = delivery
        self.window = window
        self.host = host
        self.attempts = 0
        """Attempts that came to an outcome."""
        self.all_gone = True
        self.barred = False
        """Its recipient was deleted while it was in flight: there will be no further attempt."""
        self.ready_at = ready_at
        """Since when it has been waiting for a permit, or when it last began to."""
        self.state = State.READY

    def __repr__(self) -> str:
        return f"<Work {self.delivery.config.channel.label} {self.state.name.lower()} attempts={self.attempts}>"

    @property
    def rank(self) -> int:
        """0 for a first attempt, 1 for a retry."""
        return 1 if self.attempts else 0


class Lane(Protocol):
    """The ready work of one channel."""

    def __len__(self) -> int: ...
    def put(self, work: Work) -> None: ...
    def take(self) -> Work: ...
    def remove(self, work: Work) -> None: ...
    def done(self, work: Work, *, timed_out: bool) -> None: ...
    def clear(self) -> list[Work]: ...


class PlainLane:
    """In order of arrival. An ordered dict, because a deque cannot give up an element of its middle cheaply."""

    def __init__(self) -> None:
        self._ranks: tuple[OrderedDict[Work, None], OrderedDict[Work, None]] = (OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        return len(self._ranks[0]) + len(self._ranks[1])

    def put(self, work: Work) -> None:
        self._ranks[1 if work.attempts else 0][work] = None

    def take(self) -> Work:
        first, again = self._ranks
        return (first or again).popitem(last=False)[0]

    def remove(self, work: Work) -> None:
        del self._ranks[work.rank][work]

    def done(self, work: Work, *, timed_out: bool) -> None:
        pass

    def clear(self) -> list[Work]:
        works = [*self._ranks[0], *self._ranks[1]]
        for rank in self._ranks:
            rank.clear()
        return works


class HostLane:
    """Fair between host names, and between those that answer and those that let their time run out."""

    def __init__(self) -> None:
        self._queue: HostQueue[str, Work] = HostQueue(ranks=2)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, work: Work) -> None:
        self._queue.put(work.host, work, work.rank)

    def take(self) -> Work:
        return self._queue.take()[1]

    def remove(self, work: Work) -> None:
        self._queue.remove(work.host, work, work.rank)

    def done(self, work: Work, *, timed_out: bool) -> None:
        self._queue.done(work.host, timed_out=timed_out)

    def clear(self) -> list[Work]:
        return self._queue.clear()


def host_of(url: str) -> str:
    """The host of a stored webhook URL in lower case, as far as fairness needs it: no parser, no error.

    A stored URL was checked to start with `https://` and to hold no user name, so the host is what comes then. The port
    is left out, or one host would get as many turns as it has ports.
    """
    found = _HOST.match(url, 8)
    return found[0].lower() if found else ""
