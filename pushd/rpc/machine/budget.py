"""Two small counters: bytes held for peers, and patience with them."""

from __future__ import annotations


class ByteBudget:
    """Bytes held at this moment over all connections of a server, in one direction.

    Received bytes are counted when they arrive and given back when a handler takes the message or the call ends.
    Announced bytes are not counted: a peer that fills the budget has to send what it fills it with.
    """

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

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
