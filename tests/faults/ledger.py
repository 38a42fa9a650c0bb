"""What must have arrived, what did, and which repeats the contract allows. Values only.

A term is one hold of the dispatcher lock. It begins at the persisted cursor, sends each row above it at most once to
each subscriber, and ends in one of three ways:

- drained, because its instance stopped or stepped down and had time enough: everything it sent lies at or below the
  cursor it left, nothing of it arrives afterwards, and so the next term repeats nothing;
- lost, or stopped without time to drain: the next term sends again what lies above the cursor;
- killed: the same, and it says nothing about it.

So a push may arrive as often as there were terms that began below its row. APNs is told which instance sends, by a
bundle id of its own, so its arrivals belong to terms and are judged one by one: none from outside a term, none twice
in one, and after a term's end no more than it had in flight, for as long as an attempt lasts. The other channels share
their windows with it.

An arrival is stamped by the fake once the whole request is there. Fakes are never frozen, and what a holder wrote
before it was frozen or killed is in the fake's socket by then, so ten seconds cover a machine that is slow too. What a
frozen holder begins on waking it begins before it can know of its loss, which counts as its end.

The cursor is also read by somebody who takes no part. It never goes back, every term begins where it stands, and when
it was read everything at or below it had arrived: a first attempt at least, which the next holder will not make.

Attempts whose outcome the sender could not learn are the other source of repeats. Only a provider's connection can
cause them, so a run that breaks none of those allows none.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from attrs import field, frozen

from pushd.model import ATTEMPT_S, IN_FLIGHT_PER_CHANNEL, Channel

Push = tuple[str, int]
"""A device and a row's sequence id."""

# No attempt begins later than this after the last proof of the lock, which is before anybody else can have it.
TRUST_S = 4.0


@frozen
class Row:
    """A stored envelope, as its publisher knows it. `author` is the device whose key it is tagged with."""

    topic: bytes = field(repr=False)
    eligible: bool = True
    commit: bool = False
    author: str = ""


@frozen
class Subscriber:
    """A subscription, as its owner knows it."""

    device: str
    topic: bytes
    commits: bool = False
    since: int = 0


def expected_pushes(rows: Mapping[int, Row], subscribers: Iterable[Subscriber]) -> set[Push]:
    """Every (device, row) that has to arrive: PUSH-043, PUSH-044, PUSH-052, and PUSH-025 for the start position."""
    return {push for push in _deliveries(rows, subscribers) if push[0] != rows[push[1]].author}


def own_pushes(rows: Mapping[int, Row], subscribers: Iterable[Subscriber]) -> set[Push]:
    """Every (device, row) that would arrive if it were not the device's own message."""
    return {push for push in _deliveries(rows, subscribers) if push[0] == rows[push[1]].author}


def _deliveries(rows: Mapping[int, Row], subscribers: Iterable[Subscriber]) -> set[Push]:
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
class Arrival:
    """A push at a fake.

    Attributes:
        wall_s: when, in seconds since 1970.
        sender: the bundle id of the instance that sent it, which APNs alone is told.
    """

    device: str
    row: int
    topic: bytes = field(default=b"", repr=False)
    channel: Channel = Channel.APNS
    wall_s: float = 0.0
    sender: str | None = None

    @property
    def push(self) -> Push:
        return self.device, self.row


@frozen
class Term:
    """One hold of the lock, as its instance told it.

    Attributes:
        instance: its bundle id.
        start, began_s: the cursor it began at, and when.
        end, ended_s, reason: the same of its end, None when it was killed.
        is_drained: whether it ended because it was asked to, within the time it had for that.
    """

    instance: str
    start: int
    began_s: float
    end: int | None = None
    ended_s: float | None = None
    reason: str | None = None
    is_drained: bool = False

    def line(self) -> str:
        """For people."""
        how = "killed, or holding" if self.end is None else f"{self.reason} at {self.end}"
        return f"{self.instance.rpartition('.')[2]} from {self.start}, {how}{', drained' if self.is_drained else ''}"


@frozen
class Sample:
    """The stored cursor at some moment between the two."""

    cursor: int
    asked_s: float
    answered_s: float


@frozen
class Ledger:
    """The account of one run.

    Attributes:
        expected: what has to arrive.
        arrivals: what did.
        terms: in the order in which they began.
        samples: of the cursor, in the order in which they were taken.
        unknown: how many repeats within a term there may be in all because outcomes were unknown.
        refused: how many attempts were refused in a way that has them made again, each a further repeat.
        failures: how many attempts are known to have failed, perhaps before they arrived.
        late: how much of a term that was lost or killed may arrive after it must have ended: what it had in flight. It
            arrives within ATTEMPT_S, as no attempt goes on for longer.
        tolerated: pushes that may arrive and need not, such as those to a recipient deleted meanwhile.
    """

    expected: Collection[Push] = field(repr=False)
    arrivals: Sequence[Arrival] = field(repr=False)
    terms: Sequence[Term]
    samples: Sequence[Sample] = field(default=(), repr=False)
    unknown: int = 0
    refused: int = 0
    failures: int = 0
    late: int = IN_FLIGHT_PER_CHANNEL
    tolerated: Collection[Push] = field(factory=frozenset, repr=False)

    @cached_property
    def received(self) -> Counter[Push]:
        """What arrived, with how often."""
        return Counter(each.push for each in self.arrivals)

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

    @cached_property
    def by_term(self) -> list[list[Arrival]]:
        """The arrivals whose sender is known, by the term that sent them; last, those that no term can have sent."""
        found: list[list[Arrival]] = [[] for _ in range(len(self.terms) + 1)]
        of_instance: dict[str, list[int]] = {}
        for place, term in enumerate(self.terms):
            of_instance.setdefault(term.instance, []).append(place)
        for arrival in self.arrivals:
            if arrival.sender is not None:
                places = of_instance.get(arrival.sender, [])
                # An instance with one term needs no clock, which may have been stepped.
                began = [place for place in places if len(places) == 1 or self.terms[place].began_s <= arrival.wall_s]
                found[began[-1] if began else -1].append(arrival)
        return found

    @cached_property
    def excess(self) -> Counter[Push]:
        """By how much each push arrived more often than the terms explain."""
        starts = sorted(term.start for term in self.terms)
        found = Counter({push: count - _below(starts, push[1]) for push, count in self.received.items()})
        within = Counter[Push]()
        for arrivals in self.by_term:
            for push, count in Counter(each.push for each in arrivals).items():
                within[push] += count - 1
        return +(found | within)

    def late_of(self, place: int) -> list[Arrival]:
        """What arrived of a term that must have ended before.

        One that was drained ended when it said so. Another one's attempts may begin until it knows that it has lost the
        lock, or, when it cannot know, until it does not trust the lock any more.
        """
        over = self._over_s(place)
        return [each for each in self.by_term[place] if each.wall_s > over]

    def _over_s(self, place: int) -> float:
        """When a term had ended at the latest."""
        term = self.terms[place]
        if term.is_drained and term.ended_s is not None:
            return term.ended_s
        later = range(place + 1, len(self.terms))
        begun = next((self.terms[other].began_s for other in later if not self._slept(other)), math.inf)
        return begun if term.ended_s is None else min(max(begun, term.ended_s), begun + TRUST_S)

    def _slept(self, place: int) -> bool:
        """Whether a term was lost before it sent anything.

        Its instance may have been frozen between taking the lock and telling so. Others held the lock by then, so what
        it tells on waking says nothing about when it began.
        """
        term = self.terms[place]
        return term.ended_s is not None and not term.is_drained and not self.by_term[place]

    def faults(self) -> list[str]:
        """What is wrong, in words; nothing when the contract was kept."""
        found = []
        for name, pushes in (("lost", self.missing), ("never asked for", self.unexpected)):
            if pushes:
                found.append(f"{len(pushes)} pushes {name}, e.g. {_some(pushes)}")
        if self.excess.total() > self.unknown + self.refused:
            found.append(f"{self.excess.total()} repeats too many, e.g. {_some(self.excess)}")
        for place, term in enumerate(self.terms):
            found += self._faults_of(place, term)
        if self.by_term[-1]:
            found.append(f"{len(self.by_term[-1])} pushes sent by instances without the lock")
        return [*found, *self._cursor_faults()]

    def _faults_of(self, place: int, term: Term) -> list[str]:
        found = []
        sent = {each.push for each in self.by_term[place]}
        if below := {push for push in sent if push[1] <= term.start}:
            found.append(f"{len(below)} pushes from below the start of [{term.line()}], e.g. {_some(below)}")
        if term.is_drained and term.end is not None and (above := {push for push in sent if push[1] > term.end}):
            found.append(f"{len(above)} pushes above the mark left by [{term.line()}], e.g. {_some(above)}")
        late = self.late_of(place)
        is_too_late = any(each.wall_s > self._over_s(place) + ATTEMPT_S for each in late)
        if is_too_late or len(late) > (0 if term.is_drained else self.late):
            found.append(f"{len(late)} pushes after the end of [{term.line()}], e.g. {_some({x.push for x in late})}")
        return found

    def _cursor_faults(self) -> list[str]:
        found = []
        for one, other in itertools.combinations(self.terms, 2):
            ended_before = one.ended_s is not None and one.ended_s <= other.began_s
            least = one.end if ended_before and one.end is not None else one.start
            if other.start < least:
                found.append(f"the cursor went backwards from [{one.line()}] to [{other.line()}]")
        for one_sample, next_sample in itertools.pairwise(self.samples):
            if next_sample.cursor < one_sample.cursor:
                found.append(f"the cursor went backwards from {one_sample.cursor} to {next_sample.cursor}")
        for place, term in enumerate(self.terms):
            if self._slept(place):
                continue
            before = max((each.cursor for each in self.samples if each.answered_s < term.began_s), default=0)
            after = min((each.cursor for each in self.samples if each.asked_s > term.began_s), default=math.inf)
            if not before <= term.start <= after:
                found.append(f"[{term.line()}] began where the cursor was not: between {before} and {after}")
        if not self.unknown:  # else an attempt may be over and never have arrived
            found += self._early_cursors()
        return found

    def _early_cursors(self) -> list[str]:
        """The cursor must not be above a row before that row has arrived everywhere, or an attempt has failed."""
        first: dict[Push, float] = {}
        for arrival in self.arrivals:
            first[arrival.push] = min(arrival.wall_s, first.get(arrival.push, math.inf))
        cursors = list(itertools.accumulate((each.cursor for each in self.samples), max))
        early = {
            push
            for push in self.expected
            if push in first
            and (place := bisect_left(cursors, push[1])) < len(cursors)
            and first[push] > self.samples[place].answered_s
        }
        if len(early) <= self.failures:
            return []
        return [f"the cursor stood above {len(early)} pushes not yet sent, e.g. {_some(early)}"]


def _below(starts: Sequence[int], row: int) -> int:
    """How many of the sorted starts are below the row."""
    return bisect_right(starts, row - 1)


def _some(pushes: Collection[Push]) -> str:
    rows = sorted({number for _, number in pushes})
    return f"rows {rows[:8]}{' …' if len(rows) > 8 else ''} of {len({device for device, _ in pushes})} devices"
