"""The ids a reader still has to see: against a model that simulates publishers which commit and abort in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.unread import Unread, rows_within
from pushd.model import MAX_SEQUENCE_ID

TOP = MAX_SEQUENCE_ID


@pytest.mark.parametrize(
    ("before", "seen", "boundary", "is_complete", "after"),
    [
        pytest.param(Unread(0), [], 0, True, Unread(0), id="nothing there"),
        pytest.param(Unread(0), [1, 2, 3], 0, True, Unread(3), id="no gap"),
        pytest.param(Unread(0), [2, 5], 0, True, Unread(5, ((1, 1), (3, 4))), id="gaps above the boundary"),
        pytest.param(Unread(0), [2, 5], 3, True, Unread(5, ((4, 4),)), id="the boundary covers a part of a gap"),
        pytest.param(Unread(0), [2, 5], 5, True, Unread(5), id="the boundary covers all gaps"),
        pytest.param(Unread(0), [2], 7, True, Unread(7), id="the boundary is above the last envelope"),
        pytest.param(Unread(0), [2], 7, False, Unread(2), id="above an unfinished page the boundary proves nothing"),
        pytest.param(Unread(9, ((2, 4),)), [3], 0, True, Unread(9, ((2, 2), (4, 4))), id="a gap is split"),
        pytest.param(Unread(9, ((2, 4),)), [2, 3, 4], 0, True, Unread(9), id="a gap is filled"),
        pytest.param(Unread(9, ((2, 4), (6, 7))), [], 4, True, Unread(9, ((6, 7),)), id="a gap is retired"),
        pytest.param(Unread(9, ((2, 4), (6, 7))), [], 6, True, Unread(9, ((7, 7),)), id="a part of a gap is retired"),
        pytest.param(Unread(9, ((2, 4), (6, 7))), [3], 9, False, Unread(9, ((4, 4), (6, 7))), id="unprobed parts stay"),
        pytest.param(Unread(9, ((2, 4),)), [4, 12], 0, True, Unread(12, ((2, 3), (10, 11))), id="gap and forward"),
        pytest.param(Unread(9), [], 0, False, Unread(9), id="nothing was read"),
    ],
)
def test_what_is_left(before: Unread, seen: list[int], boundary: int, is_complete: bool, after: Unread) -> None:
    assert before.after(seen, boundary, is_complete=is_complete) == after


def test_gaps_come_before_the_open_end() -> None:
    assert Unread(9, ((2, 4), (6, 7))).ranges == ((2, 4), (6, 7), (10, TOP))


class Publishers:
    """Ids handed out one after the other; each transaction commits or aborts whenever it likes."""

    def __init__(self) -> None:
        self.last = 0
        self.open: set[int] = set()
        self.visible: set[int] = set()
        self.boundary = 0

    def close_boundary(self) -> None:
        """As the boundary task may: never over an id whose fate is open."""
        self.boundary = max(self.boundary, min(self.open, default=self.last + 1) - 1)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, 5)),
            st.tuples(st.sampled_from(["commit", "abort"]), st.integers(0, 30)),
            st.tuples(st.just("boundary"), st.just(0)),
            st.tuples(st.just("poll"), st.integers(1, 6)),
        ),
        max_size=80,
    )
)
def test_every_committed_id_is_seen_exactly_once(steps: list[tuple[str, int]]) -> None:
    world = Publishers()
    unread = Unread(0)
    seen: list[int] = []

    def poll(page: int) -> bool:
        nonlocal unread
        found = sorted(n for n in world.visible if any(low <= n <= high for low, high in unread.ranges))
        is_complete = len(found) <= page
        found = found[:page]
        seen.extend(found)
        unread = unread.after(found, world.boundary, is_complete=is_complete)
        flat = [bound for gap in unread.gaps for bound in gap]
        assert flat == sorted(flat)
        assert all(low <= high <= unread.passed for low, high in unread.gaps)
        assert not set(seen) & {n for low, high in unread.gaps for n in range(low, high + 1)}
        return is_complete

    for act, number in steps:
        match act:
            case "allocate":
                for _ in range(number):
                    world.last += 1
                    world.open.add(world.last)
            case "commit" | "abort" if world.open:
                chosen = sorted(world.open)[number % len(world.open)]
                world.open.remove(chosen)
                if act == "commit":
                    world.visible.add(chosen)
            case "boundary":
                world.close_boundary()
            case "poll":
                poll(number)

    world.open.clear()  # whoever is left aborts
    world.close_boundary()
    while not poll(6):
        pass
    assert len(seen) == len(set(seen))
    assert set(seen) == world.visible
    assert not unread.gaps


@pytest.mark.parametrize(
    ("sizes", "wanted", "max_bytes", "count"),
    [
        ([], (), 10, 0),
        ([(1, 5), (2, 5)], (1, 2), 10, 2),
        ([(1, 5), (2, 6)], (1, 2), 10, 1),
        ([(1, 50), (2, 1)], (1, 2), 10, 1),
        ([(1, 50), (2, 9)], (2,), 10, 2),
        ([(1, 50), (2, 60), (3, 9)], (3,), 10, 3),
    ],
)
def test_a_page_is_cut_by_the_payloads_that_are_wanted(
    sizes: list[tuple[int, int]], wanted: tuple[int, ...], max_bytes: int, count: int
) -> None:
    assert rows_within(sizes, wanted, max_bytes) == count
