"""Which rows were loaded and how far the cursor may move: the low-water mark over the open windows.

A window is a run of at most 1,024 eligible rows, known by its floor (the read position before it) and its last row.
Both are fixed by its first page, so that rows pruned between two pages cannot leave a window that never ends. A window
is open while a page of it is missing or one of its deliveries awaits its first attempt; the mark is the floor of the
oldest open window, or the read position when none is open (PUSH-045, PUSH-049).

Nothing is searched: a window counts down by itself, and the mark looks at the oldest one alone.
"""

from __future__ import annotations

from collections import deque

from attrs import field, frozen

from pushd.core.suppression import HmacCheck
from pushd.model import Delivery


class Window:
    """One open run of rows. Made by `Windows.begin`; a delivery keeps a reference and calls `settle` on it once."""

    __slots__ = ("_awaiting", "_loaded", "floor", "last")

    def __init__(self, floor: int, last: int) -> None:
        self.floor = floor
        self.last = last
        self._awaiting = 0
        self._loaded = False

    def __repr__(self) -> str:
        return f"<Window ({self.floor}, {self.last}] awaiting={self._awaiting} loaded={self._loaded}>"

    @property
    def is_open(self) -> bool:
        """Whether the cursor has to stay below this window."""
        return self._awaiting > 0 or not self._loaded

    def settle(self) -> None:
        """One delivery of the window has had its first attempt, or was given up for good without one."""
        assert self._awaiting > 0
        self._awaiting -= 1


class Windows:
    """The open windows in sequence order, and what follows from them.

    Invariants: `mark` never decreases, never passes a delivery that was admitted and not settled, and never passes
    `read_position`; a window is loaded to its end before the next one begins.
    """

    def __init__(self, cursor: int) -> None:
        self.read_position = cursor
        self._open: deque[Window] = deque()
        self._loading: Window | None = None

    def __repr__(self) -> str:
        return f"<Windows mark={self.mark} read_position={self.read_position} open={len(self._open)}>"

    @property
    def mark(self) -> int:
        """The low-water mark: every row at or below it has had all its first attempts."""
        while self._open and not self._open[0].is_open:
            self._open.popleft()
        return self._open[0].floor if self._open else self.read_position

    def begin(self, last: int) -> Window:
        """Open the window that reaches from the read position to the row `last`."""
        assert self._loading is None
        assert last > self.read_position
        window = self._loading = Window(self.read_position, last)
        self._open.append(window)
        return window

    def admit(self, window: Window, count: int) -> None:
        """`count` deliveries of a page of `window` await their first attempt from now on."""
        assert window is self._loading
        window._awaiting += count

    def shorten(self, window: Window, last: int) -> None:
        """Let `window` end with the row `last`, below which everything admitted so far lies; the rest comes later."""
        assert window is self._loading
        assert window.floor < last <= window.last
        window.last = last

    def close(self, window: Window) -> None:
        """The last page of `window` is loaded: the read position moves to its last row."""
        assert window is self._loading
        window._loaded = True
        self._loading = None
        self.read_position = window.last


@frozen
class PageRequest:
    """What one page statement asks for.

    Attributes:
        floor: the read position below the window.
        last: the window's last row once its first page has told it, else None.
        resume: the pair (row, recipient) after which the page starts; None for a first page.
    """

    floor: int
    last: int | None = None
    resume: tuple[int, bytes] | None = field(default=None, repr=False)

    def from_start(self, last: int) -> PageRequest:
        """The window again from its start, now that its last row is fixed."""
        return PageRequest(self.floor, last, (self.floor + 1, b""))

    def after(self, resume: tuple[int, bytes]) -> PageRequest:
        """The page of the same window after this pair."""
        return PageRequest(self.floor, self.last, resume)

    def shortened(self) -> PageRequest:
        """The same page of a window that ends with the row where the page starts."""
        assert self.resume is not None
        return PageRequest(self.floor, self.resume[0], self.resume)

    def is_current(self, boundary: int) -> bool:
        """Whether a snapshot with this closed boundary shows the whole window.

        A read endpoint may spread statements over several replicas. A page read from one that lags behind the replica
        of the window's first page would lack rows for ever, so it has to be read again.
        """
        return self.last is None or boundary >= self.last


@frozen
class Page:
    """What one page statement returned.

    Attributes:
        boundary: the closed boundary its snapshot sees.
        first, last: bounds of the window, told with its first page alone; None there when no row is settled.
        deliveries: one a (row, subscription), ordered by (row, recipient).
        checks: those of the deliveries whose row may be the recipient's own, in the same order.
        is_full: whether more may follow. Decided by the rows returned, before any suppression.
    """

    boundary: int
    first: int | None
    last: int | None
    deliveries: list[Delivery] = field(repr=False)
    checks: list[HmacCheck] = field(repr=False)
    is_full: bool
