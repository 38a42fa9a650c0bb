"""The low-water mark against the plainest model, and the page requests."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pushd.core.window import PageRequest, Window, Windows


class WindowModel(RuleBasedStateMachine):
    """Keeps one flag a row: the mark must never be at or above a row whose flag is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = Windows(0)
        self.loading: Window | None = None
        self.unsettled: list[Window] = []
        self.closed: list[Window] = []
        self.highest_mark = 0

    @precondition(lambda self: self.loading is None)
    @rule(size=st.integers(1, 50))
    def begin(self, size: int) -> None:
        self.loading = self.windows.begin(self.windows.read_position + size)

    @precondition(lambda self: self.loading is not None)
    @rule(count=st.integers(0, 5))
    def admit(self, count: int) -> None:
        assert self.loading is not None
        self.windows.admit(self.loading, count)
        self.unsettled += [self.loading] * count

    @precondition(lambda self: self.loading is not None)
    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        assert self.loading is not None
        last = data.draw(st.integers(self.loading.floor + 1, self.loading.last))
        self.windows.shorten(self.loading, last)
        assert self.loading.last == last

    @precondition(lambda self: self.loading is not None)
    @rule()
    def close(self) -> None:
        assert self.loading is not None
        self.windows.close(self.loading)
        assert self.windows.read_position == self.loading.last
        self.closed.append(self.loading)
        self.loading = None

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        window = self.unsettled.pop(data.draw(st.integers(0, len(self.unsettled) - 1)))
        window.settle()

    @invariant()
    def mark_is_exactly_the_oldest_open_floor(self) -> None:
        still_open = {id(window): window for window in self.unsettled}
        if self.loading is not None:
            still_open[id(self.loading)] = self.loading
        floors = [window.floor for window in still_open.values()]
        assert self.windows.mark == min(floors, default=self.windows.read_position)

    @invariant()
    def mark_never_falls(self) -> None:
        assert self.windows.mark >= self.highest_mark
        self.highest_mark = self.windows.mark


TestWindowModel = WindowModel.TestCase


def test_t080_window_without_deliveries_moves_the_mark() -> None:
    windows = Windows(0)
    window = windows.begin(4)
    assert windows.mark == 0
    windows.close(window)
    assert windows.mark == windows.read_position == 4


def test_t090_mark_waits_for_all_pages_and_all_first_attempts() -> None:
    windows = Windows(10)
    first = windows.begin(20)
    windows.admit(first, 1)
    first.settle()
    assert windows.mark == 10, "its second page is missing"
    windows.admit(first, 1)
    windows.close(first)
    later = windows.begin(30)
    windows.admit(later, 1)
    windows.close(later)
    later.settle()
    assert windows.mark == 10, "a later window does not overtake"
    first.settle()
    assert windows.mark == 30


def test_second_window_does_not_begin_inside_the_first() -> None:
    windows = Windows(0)
    windows.begin(5)
    with pytest.raises(AssertionError):
        windows.begin(9)


@pytest.mark.parametrize(
    ("request_", "boundary", "is_current"),
    [
        (PageRequest(0), 0, True),
        (PageRequest(0).from_start(100), 99, False),
        (PageRequest(0).from_start(100), 100, True),
        (PageRequest(0).from_start(100).after((50, b"x")), 99, False),
        (PageRequest(0).from_start(100).after((50, b"x")).shortened(), 99, True),
    ],
)
def test_page_of_a_lagging_snapshot_is_not_current(request_: PageRequest, boundary: int, is_current: bool) -> None:
    assert request_.is_current(boundary) is is_current


def test_requests_of_one_window_keep_its_floor_and_its_last_row() -> None:
    request = PageRequest(10).from_start(20)
    assert (request.floor, request.last, request.resume) == (10, 20, (11, b""))
    request = request.after((15, b"r"))
    assert (request.floor, request.last, request.resume) == (10, 20, (15, b"r"))
    assert request.shortened() == PageRequest(10, 15, (15, b"r"))
    assert "b'r'" not in repr(request)
