"""Who is next when one channel serves many hosts and every permit is taken.

A freed permit goes to the waiting host with the fewest items in flight, so that a host which answers slowly, however
much work it has, keeps only what the others do not want. Without it a plain queue hands all permits to whoever has the
longest line, and one dead receiver holds up everybody's webhooks.

Where that leaves a choice, hosts that answered last time come before hosts that timed out. With as many dead hosts as
there are permits, every freed permit would otherwise go to one of those, as each of them has fewer in flight than a
healthy host with one; so a healthy host keeps at least the permit it gives back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Host = TypeVar("Host", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)

MAX_SLOW_HOSTS = 10_000  # remembered: as many as there are retained deliveries


class HostQueue(Generic[Host, Item]):
    """Waiting items by host, taken fairly.

    Items of one host leave in the order they came. Ranks are strict: while an item of rank 0 waits, for whatever host,
    none of rank 1 is taken (the dispatcher puts first attempts at 0 and retries at 1). The in-flight counts are shared
    by all ranks.

    Args:
        ranks: how many ranks there are.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks: list[_Rank[Host, Item]] = [_Rank() for _ in range(ranks)]
        self._in_flight: dict[Host, int] = {}
        self._slow: OrderedDict[Host, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(rank.size for rank in self._ranks)

    def __repr__(self) -> str:
        return f"HostQueue(waiting={[rank.size for rank in self._ranks]}, in_flight={sum(self._in_flight.values())})"

    def put(self, host: Host, item: Item, rank: int = 0) -> None:
        """Let `item` wait for a permit.

        Raises:
            ValueError: an equal item of this host and rank waits already.
        """
        self._ranks[rank].put(host, item, self._place(host))

    def take(self) -> tuple[Host, Item]:
        """Remove the item that gets the next permit and count it as in flight until `done(host)`.

        Of several hosts with equally few in flight, those come first that did not time out last; of these, the one
        that has waited longest at that count.

        Raises:
            IndexError: nothing waits.
        """
        for rank in self._ranks:
            if rank.size:
                host, item = rank.take()
                with self._moving(host):
                    self._in_flight[host] = self.in_flight(host) + 1
                return host, item
        raise IndexError("take from an empty HostQueue")

    def remove(self, host: Host, item: Item, rank: int = 0) -> None:
        """Let `item` wait no longer, wherever in its host's line it is.

        Raises:
            KeyError: it does not wait there.
        """
        self._ranks[rank].remove(host, item, self._place(host))

    def done(self, host: Host, *, timed_out: bool = False) -> None:
        """Give back what one `take` of this host counted.

        Args:
            timed_out: whether the host let its time run out, as opposed to an answer or an error.

        Raises:
            KeyError: nothing of this host is in flight.
        """
        if host not in self._in_flight:
            raise KeyError("no item of this host is in flight")  # the key itself may be private
        with self._moving(host):
            self._in_flight[host] -= 1
            if not self._in_flight[host]:
                del self._in_flight[host]
            self._slow.pop(host, None)
            if timed_out:
                self._slow[host] = None
        if len(self._slow) > MAX_SLOW_HOSTS:
            oldest = next(iter(self._slow))
            with self._moving(oldest):
                del self._slow[oldest]

    def in_flight(self, host: Host) -> int:
        """How many items of `host` were taken and are not done."""
        return self._in_flight.get(host, 0)

    def clear(self) -> list[Item]:
        """Forget everything that waits and hand it over; what is in flight stays counted."""
        return [item for rank in self._ranks for item in rank.clear()]

    def _place(self, host: Host) -> _Place:
        return self.in_flight(host), host in self._slow

    @contextmanager
    def _moving(self, host: Host) -> Iterator[None]:
        before = self._place(host)
        yield
        for rank in self._ranks:
            rank.move(host, before, self._place(host))


_Place = tuple[int, bool]
"""In flight, and whether the host is slow: the lower, the sooner."""


class _Rank(Generic[Host, Item]):
    """Waiting hosts in buckets by their place; a dict is the ordered set of one bucket.

    A heap was the other candidate, but each `done` would leave a stale entry in it. Finding the lowest bucket looks at
    every distinct place, and n permits allow at most sqrt(2n) distinct counts among hosts: 23 for 256.
    """

    def __init__(self) -> None:
        self.size = 0
        self._items: dict[Host, OrderedDict[Item, None]] = {}
        self._buckets: dict[_Place, dict[Host, None]] = {}

    def put(self, host: Host, item: Item, place: _Place) -> None:
        waiting = self._items.get(host)
        if waiting is None:
            waiting = self._items[host] = OrderedDict()
            self._buckets.setdefault(place, {})[host] = None
        if item in waiting:
            raise ValueError("an equal item waits already")
        waiting[item] = None
        self.size += 1

    def take(self) -> tuple[Host, Item]:
        lowest = min(self._buckets)
        host = next(iter(self._buckets[lowest]))
        waiting = self._items[host]
        item, _ = waiting.popitem(last=False)
        self._shorten(host, lowest)
        return host, item

    def remove(self, host: Host, item: Item, place: _Place) -> None:
        try:
            del self._items[host][item]
        except KeyError:
            raise KeyError("no such item waits") from None  # host and item may be private
        self._shorten(host, place)

    def move(self, host: Host, before: _Place, after: _Place) -> None:
        if host in self._items:
            self._leave(host, before)
            self._buckets.setdefault(after, {})[host] = None

    def clear(self) -> list[Item]:
        items = [item for waiting in self._items.values() for item in waiting]
        self._items.clear()
        self._buckets.clear()
        self.size = 0
        return items

    def _shorten(self, host: Host, place: _Place) -> None:
        self.size -= 1
        if not self._items[host]:
            del self._items[host]
            self._leave(host, place)

    def _leave(self, host: Host, place: _Place) -> None:
        bucket = self._buckets[place]
        del bucket[host]
        if not bucket:
            del self._buckets[place]
