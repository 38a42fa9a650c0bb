"""What must have arrived, what did, and which repeats the contract allows. Values only.

A term is one hold of the dispatcher lock. It begins at the persisted cursor and sends each row above it at most once
to each subscriber. So a push may arrive as often as there were terms that began below its row, and no more: this one
sentence covers a killed holder, a lost lock and a drain that ran out of time, and after a clean drain it leaves no
repeat at all, because the next term begins above everything that was sent.

Attempts whose outcome the sender could not learn are the other source of repeats. Only a provider's connection can
cause them, so a run that breaks none of those allows none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from attrs import field, frozen

Push = tuple[str, int]
"""A device and a row's sequence id."""


@frozen
class Row:
    """A stored envelope, as its publisher knows it."""

    topic: bytes
    eligible: bool = True
    commit: bool = False


@frozen
class Subscriber:
    """A subscription, as its owner knows it."""

    device: str
    topic: bytes
    commits: bool = False
    since: int = 0


def expected_pushes(rows: Mapping[int, Row], subscribers: Iterable[Subscriber]) -> set[Push]:
    """Every (device, row) that has to arrive: PUSH-043, PUSH-052, and PUSH-025 for the start position."""
    by_topic: dict[bytes, list[Subscriber]] = {}
    for subscriber in subscribers:
        by_topic.setdefault(subscriber.topic, []).append(subscriber)
    return {
        (subscriber.device, number)
        for number, row in rows.items()
        if row.eligible
        for subscriber in by_topic.get(row.topic, ())
        if number > subscriber.since and (subscriber.commits or not row.commit)
    }


@frozen
class Ledger:
    """The account of one run.

    Attributes:
        expected: what has to arrive.
        received: what arrived, with how often.
        cursors: where each term began, in the order of the terms.
        attempts: how often one term may send one delivery, 1 unless its outcome can have been unknown.
        tolerated: pushes that may arrive and need not, such as those to a recipient deleted meanwhile.
    """

    expected: Collection[Push] = field(repr=False)
    received: Counter[Push] = field(repr=False)
    cursors: tuple[int, ...]
    attempts: int = 1
    tolerated: Collection[Push] = field(factory=frozenset, repr=False)

    @property
    def missing(self) -> set[Push]:
        return set(self.expected) - self.received.keys()

    @property
    def unexpected(self) -> set[Push]:
        return self.received.keys() - set(self.expected) - set(self.tolerated)

    @property
    def repeats(self) -> int:
        """Arrivals beyond the first of each push."""
        return self.received.total() - len(self.received)

    @property
    def forbidden(self) -> dict[Push, int]:
        """Pushes that arrived more often than the terms that began below their row explain."""
        return {push: count for push, count in self.received.items() if count > self.allowed(push[1])}

    def allowed(self, number: int) -> int:
        """How often a push of this row may arrive."""
        return self.attempts * sum(cursor < number for cursor in self.cursors)

    def faults(self) -> list[str]:
        """What is wrong, in words; nothing when the contract was kept."""
        found = []
        for name, pushes in (("lost", self.missing), ("never asked for", self.unexpected)):
            if pushes:
                found.append(f"{len(pushes)} pushes {name}, e.g. {_some(pushes)}")
        if self.forbidden:
            found.append(f"{len(self.forbidden)} pushes repeated too often, e.g. {_some(self.forbidden)}")
        if list(self.cursors) != sorted(self.cursors):
            found.append(f"the cursor went backwards: {self.cursors}")
        return found


def _some(pushes: Collection[Push]) -> str:
    rows = sorted({number for _, number in pushes})
    return f"rows {rows[:8]}{' …' if len(rows) > 8 else ''} of {len({device for device, _ in pushes})} devices"
