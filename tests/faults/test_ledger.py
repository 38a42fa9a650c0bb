"""The account itself: it must notice what it is there to notice."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from pushd.model import Channel
from tests.faults.ledger import (
    Arrival,
    Ledger,
    Push,
    Row,
    Sample,
    Subscriber,
    Term,
    expected_pushes,
    own_pushes,
)

A, B = b"\0" * 17, b"\0" * 16 + b"\1"
ROWS = {1: Row(A), 2: Row(A, commit=True), 3: Row(B, eligible=False), 4: Row(B), 5: Row(A, author="commits")}


def test_expected_are_eligible_rows_above_the_start_and_commits_only_where_asked_for() -> None:
    subscribers = [
        Subscriber("plain", A),
        Subscriber("commits", A, commits=True),
        Subscriber("late", A, commits=True, since=1),
        Subscriber("other", B),
    ]
    assert expected_pushes(ROWS, subscribers) == {
        ("plain", 1),
        ("plain", 5),
        ("commits", 1),
        ("commits", 2),
        ("late", 2),
        ("late", 5),
        ("other", 4),
    }
    assert own_pushes(ROWS, subscribers) == {("commits", 5)}


EXPECTED = {("d", 1), ("d", 2), ("d", 3)}


def sent(instance: str, at_s: float, *pushes: Push | int) -> list[Arrival]:
    """So many pushes over APNs, the first then and each a second later than the one before; rows are those of `d`."""
    named = [push if isinstance(push, tuple) else ("d", push) for push in pushes]
    return [Arrival(*push, wall_s=at_s + place, sender=instance) for place, push in enumerate(named)]


def hooks(*rows: int) -> list[Arrival]:
    """Webhooks, whose sender is not known."""
    return [Arrival("d", row, channel=Channel.HTTP) for row in rows]


def drained(instance: str, start: int, began_s: float, end: int, ended_s: float) -> Term:
    return Term(instance, start, began_s, end, ended_s, "stopped", is_drained=True)


def lost(instance: str, start: int, began_s: float, end: int, ended_s: float) -> Term:
    return Term(instance, start, began_s, end, ended_s, "database_connection")


ONE = [Term("a", 0, 0)]
KILLED = [Term("a", 0, 0), Term("b", 2, 10)]
ALL = sent("a", 1, 1, 2, 3)

GOOD = {
    "all once": (ALL, ONE),
    "own lock, no clock": (sent("a", -9_000, 1, 2, 3), ONE),
    "webhooks once": (hooks(1, 2, 3), ONE),
    "above the start of the term after a kill": (ALL + sent("b", 11, 3), KILLED),
    "webhooks above the start of the term after a kill": (hooks(1, 2, 3, 3), KILLED),
    "after a drain": (sent("a", 1, 1, 2) + sent("b", 11, 3), [drained("a", 0, 0, 2, 9), Term("b", 2, 10)]),
    "a few in flight when the lock was lost": (
        sent("a", 1, 1, 2) + sent("a", 20, 3) + sent("b", 11, 3),
        [lost("a", 0, 0, 2, 12), Term("b", 2, 10)],
    ),
    "two terms of one instance": (ALL + sent("a", 11, 3), [lost("a", 0, 0, 2, 9), Term("a", 2, 10)]),
    "a holder asleep when it should have told that it had begun": (
        sent("b", 11, 1, 2) + sent("b", 40, 3, ("e", 4), ("f", 4)),
        [Term("b", 0, 10), Term("a", 0, 20, 0, 21, "database_connection")],
    ),
}

BAD = {
    "a loss": (sent("a", 1, 1, 3), ONE, "lost"),
    "a stranger": ([*ALL, *sent("a", 1, ("e", 2))], ONE, "never asked for"),
    "a repeat within a term": (ALL + sent("a", 5, 3), ONE, "too many"),
    "a webhook repeated within a term": (hooks(1, 2, 3, 3), ONE, "too many"),
    "a repeat within a term although there were two": (ALL + sent("a", 5, 3), KILLED, "too many"),
    "a repeat below the second start": (ALL + sent("b", 11, 2), KILLED, "below the start|too many"),
    "a webhook repeated below the second start": (hooks(1, 2, 3, 2), KILLED, "too many"),
    "more repeats than terms": (hooks(1, 2, 3, 3, 3), KILLED, "too many"),
    "a cursor that went back": (hooks(1, 2, 3), [Term("a", 2, 0), Term("b", 0, 10)], "backwards"),
    "a start below the end before": (hooks(1, 2, 3), [drained("a", 0, 0, 3, 9), Term("b", 2, 10)], "backwards"),
    "a drain that wrote no mark": (
        ALL + sent("b", 11, 1, 2, 3),
        [drained("a", 0, 0, 0, 9), Term("b", 0, 10)],
        "above the mark",
    ),
    "a push after a drain": (
        sent("a", 1, 1, 2) + sent("a", 20, 3),
        [drained("a", 0, 0, 3, 9), Term("b", 3, 10)],
        "after the end",
    ),
    "an old holder that goes on": (
        ALL + sent("a", 13, ("e", 4), ("f", 4)) + sent("b", 11, 3, ("e", 4), ("f", 4)),
        [lost("a", 0, 0, 2, 12), Term("b", 2, 10)],
        "after the end",
    ),
    "a killed holder that goes on": (
        ALL + sent("a", 13, ("e", 4), ("f", 4)) + sent("b", 11, 3, ("e", 4), ("f", 4)),
        KILLED,
        "after the end",
    ),
    "an old holder that trusts for ever": (
        ALL + sent("a", 30, ("e", 4), ("f", 4)) + sent("b", 11, 3, ("e", 4), ("f", 4)),
        [lost("a", 0, 0, 2, 90), Term("b", 2, 10)],
        "after the end",
    ),
    "one push of a lost term when no attempt of it can go on": (
        sent("a", 1, 1, 2) + sent("a", 23, 3) + sent("b", 11, 3),
        [lost("a", 0, 0, 2, 12), Term("b", 2, 10)],
        "after the end",
    ),
    "one push of a killed term when no attempt of it can go on": (
        sent("a", 1, 1, 2) + sent("a", 21, 3) + sent("b", 11, 3),
        KILLED,
        "after the end",
    ),
    "a sender without the lock": (ALL + sent("b", 11, 3), [*ONE, Term("c", 0, 20)], "without the lock"),
}


def account(arrivals: Iterable[Arrival], terms: Iterable[Term]) -> list[str]:
    expected = EXPECTED | ({("e", 4), ("f", 4)} if any(each.device == "f" for each in arrivals) else set())
    return Ledger(expected, list(arrivals), list(terms), late=1).faults()


@pytest.mark.parametrize("case", GOOD)
def test_ledger_takes_what_the_contract_allows(case: str) -> None:
    assert account(*GOOD[case]) == []


@pytest.mark.parametrize("case", BAD)
def test_ledger_names_every_breach_and_that_alone(case: str) -> None:
    arrivals, terms, word = BAD[case]
    found = account(arrivals, terms)
    assert found
    assert all(re.search(word, fault) for fault in found), found


@pytest.mark.parametrize("old", [Term("a", 0, 0), lost("a", 0, 0, 1, 12)], ids=["killed", "lost"])
@pytest.mark.parametrize("count", [1, 250])
def test_what_was_in_flight_may_be_late_and_not_hours_late(old: Term, count: int) -> None:
    rows = range(2, 2 + count)
    by_both = [Arrival("d", row, wall_s=11, sender="b") for row in rows] + sent("a", 1, 1)

    def found(at_s: float) -> list[str]:
        late = [Arrival("d", row, wall_s=at_s, sender="a") for row in rows]
        return Ledger({("d", 1), *(("d", row) for row in rows)}, by_both + late, [old, Term("b", 1, 10)]).faults()

    assert found(19) == []
    assert ["after the end" in fault for fault in found(3_600)] == [True]


SAMPLES = [Sample(0, 1, 2), Sample(2, 3, 4), Sample(3, 5, 6)]


@pytest.mark.parametrize(
    ("samples", "terms", "word"),
    [
        pytest.param(SAMPLES, ONE, None, id="behind what arrived"),
        pytest.param([Sample(2, 3, 4), Sample(1, 5, 6)], ONE, "backwards", id="it went back"),
        pytest.param([Sample(2, 0, 1.5)], ONE, "not yet sent", id="it was ahead of what arrived"),
        pytest.param(SAMPLES, [*ONE, Term("b", 2, 9)], "where the cursor was not", id="a term began below it"),
        pytest.param(SAMPLES, [*ONE, Term("b", 3, 2.5)], "where the cursor was not", id="a term began above it"),
        pytest.param(SAMPLES, [*ONE, Term("b", 2, 4.5)], None, id="a term began at it"),
        pytest.param(SAMPLES, [*ONE, lost("b", 2, 9, 2, 9.1)], None, id="a term slept before it told where it began"),
    ],
)
def test_ledger_compares_the_cursor_seen_from_outside(
    samples: list[Sample], terms: list[Term], word: str | None
) -> None:
    found = Ledger(EXPECTED, sent("a", 1, 1, 2, 3), terms, samples).faults()
    assert [str(word) in fault for fault in found] == ([] if word is None else [True])


def test_attempts_that_failed_explain_a_cursor_ahead_of_so_many_pushes() -> None:
    ahead = [Sample(3, 0, 1.5)]  # of two rows
    assert Ledger(EXPECTED, ALL, ONE, ahead, failures=2).faults() == []
    assert len(Ledger(EXPECTED, ALL, ONE, ahead, failures=1).faults()) == 1


def test_outcomes_that_were_unknown_explain_so_many_repeats_and_no_more() -> None:
    twice = ALL + sent("a", 5, 3, 2)
    assert Ledger(EXPECTED, twice, ONE, unknown=1, refused=1).faults() == []
    assert Ledger(EXPECTED, twice, ONE, unknown=2).faults() == []
    assert len(Ledger(EXPECTED, twice, ONE, unknown=1).faults()) == 1


def test_tolerated_pushes_may_arrive_and_need_not() -> None:
    gone = frozenset({("gone", 1), ("gone", 2)})
    assert Ledger(EXPECTED, ALL + sent("a", 5, ("gone", 1)), ONE, tolerated=gone).faults() == []
    assert Ledger(EXPECTED, ALL, ONE, tolerated=gone).repeats == 0
