"""The account itself: it must notice what it is there to notice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.ledger import Ledger, Row, Subscriber, expected_pushes

A, B = b"\0" * 17, b"\0" * 16 + b"\1"
ROWS = {1: Row(A), 2: Row(A, commit=True), 3: Row(B, eligible=False), 4: Row(B)}


def test_expected_are_eligible_rows_above_the_start_and_commits_only_where_asked_for() -> None:
    subscribers = [
        Subscriber("plain", A),
        Subscriber("commits", A, commits=True),
        Subscriber("late", A, commits=True, since=1),
        Subscriber("other", B),
    ]
    assert expected_pushes(ROWS, subscribers) == {
        ("plain", 1),
        ("commits", 1),
        ("commits", 2),
        ("late", 2),
        ("other", 4),
    }


EXPECTED = {("d", 1), ("d", 2), ("d", 3)}
ONCE = Counter(EXPECTED)


@pytest.mark.parametrize(
    ("received", "cursors", "attempts", "word"),
    [
        pytest.param(ONCE, (0,), 1, None, id="all once"),
        pytest.param(ONCE + Counter([("d", 3)]), (0, 2), 1, None, id="repeat above the second term's start"),
        pytest.param(ONCE + Counter([("d", 3)]), (0,), 2, None, id="repeat of an unknown outcome"),
        pytest.param(ONCE - Counter([("d", 2)]), (0,), 1, "lost", id="a loss"),
        pytest.param(ONCE + Counter([("e", 2)]), (0,), 1, "never asked for", id="a stranger"),
        pytest.param(ONCE + Counter([("d", 3)]), (0,), 1, "too often", id="repeat within a term"),
        pytest.param(ONCE + Counter([("d", 2)]), (0, 2), 1, "too often", id="repeat below the second term's start"),
        pytest.param(ONCE + Counter([("d", 3)] * 2), (0, 2), 1, "too often", id="more repeats than terms"),
        pytest.param(ONCE, (2, 0), 1, "backwards", id="a cursor that went back"),
    ],
)
def test_ledger_names_every_breach(
    received: Counter[tuple[str, int]], cursors: tuple[int, ...], attempts: int, word: str | None
) -> None:
    found = Ledger(EXPECTED, received, cursors, attempts).faults()
    assert [word in fault for fault in found if word is not None] == ([] if word is None else [True])
    assert bool(found) == (word is not None)


def test_tolerated_pushes_may_arrive_and_need_not() -> None:
    gone = frozenset({("gone", 1), ("gone", 2)})
    assert Ledger(EXPECTED, ONCE + Counter([("gone", 1)]), (0,), tolerated=gone).faults() == []
    assert Ledger(EXPECTED, ONCE, (0,)).repeats == 0
