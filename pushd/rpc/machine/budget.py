"""Two small counters: bytes held for peers, and patience with them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

# Whoever holds something unfinished shows with each instalment of this size that it gets on. Over the default stall of
# 30 s that is 1.1 KB/s: half of what the slowest mobile networks in use (GPRS) carry.
INSTALMENT = 32 * 1024


class ByteBudget:
    """Bytes held at this moment over all connections of a server, in one direction.

    Received bytes are counted when they arrive and given back when a handler takes the message or the call ends.
    Announced bytes are not counted: a peer that fills the budget has to send what it fills it with.

    Those who hold bytes because their peer has not finished are known by name, so that the slowest of them can make
    room. The slowest is the one whose last instalment, or beginning, is the longest ago. Sizes and averages would be
    worse measures: a peer that has sent much and then falls silent looks fast for hours, and a phone that sends little
    looks slow.
    """

    __slots__ = ("_unfinished", "held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._unfinished: OrderedDict[Any, int] = OrderedDict()  # holder -> bytes since its last instalment

    def __repr__(self) -> str:
        return f"<ByteBudget {self.held} of {self.limit} bytes>"

    def take(self, size: int) -> bool:
        """Counts `size` bytes, or returns False when they do not fit."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """Gives back bytes taken before."""
        self.held -= size

    def moved(self, holder: Any, size: int) -> None:
        """`holder` waits for its peer, which has just moved `size` bytes."""
        moved = self._unfinished.get(holder, 0) + size
        if moved < INSTALMENT:
            self._unfinished[holder] = moved
        else:
            self._unfinished[holder] = 0
            self._unfinished.move_to_end(holder)

    def done(self, holder: Any) -> None:
        """`holder` does not wait for its peer, or is gone."""
        self._unfinished.pop(holder, None)

    @property
    def slowest(self) -> Any:
        """Whose peer has not got on for the longest time; None when nothing is held on account of a peer."""
        return next(iter(self._unfinished), None)


class Patience:
    """A token bucket for frames that cost the server work and the peer nothing.

    Args:
        burst: how many may come at once.
        per_s: how many come back in a second.
    """

    __slots__ = ("_burst", "_left", "_now", "_per_s")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._left = float(burst)
        self._now: float | None = None

    def at(self, now: float) -> None:
        """Lets time pass until `now`, in seconds of any steady clock."""
        if self._now is not None:
            self._left = min(self._burst, self._left + (now - self._now) * self._per_s)
        self._now = now

    def spend(self) -> bool:
        """Takes one token; False when none is left."""
        self._left -= 1.0
        return self._left >= 0.0
