"""Loads the windows of a term, page by page, as far as retained work has room (PUSH-041, PUSH-050).

The retained work is what is read ahead: while its thousands of deliveries are being sent, the next page is already
asked for. A page's rows are decided on between two statements and nothing of a page is kept that was not admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

from pushd.core.retained import Retained
from pushd.core.retry import Result
from pushd.core.window import Page, PageRequest, Window, Windows
from pushd.dispatch.own_messages import OwnMessages
from pushd.dispatch.sender import Sending
from pushd.dispatch.tally import Tally
from pushd.errors import StoreError, StoreTimeout
from pushd.model import WINDOW_ROWS
from pushd.telemetry import Event, get_logger


class PageReader(Protocol):
    """A session that reads pages and payloads from one and the same database."""

    async def read(self, request: PageRequest, rows: int) -> Page: ...
    async def payloads(self, sequence_ids: Sequence[int], budget_bytes: int) -> list[tuple[int, bytes]]: ...


class PageStore(Protocol):
    """Where page readers come from."""

    def open_pages(self) -> AbstractAsyncContextManager[PageReader]: ...


class Boundary(Protocol):
    """The instance's boundary task, as the dispatcher sees it."""

    def request(self) -> None:
        """Ask for an advance."""

    async def wait_above(self, sequence_id: int) -> int:
        """Wait until this instance closed the boundary above `sequence_id`; returns the boundary."""
        ...


class Loader:
    """The loader of one term."""

    def __init__(
        self,
        store: PageStore,
        windows: Windows,
        retained: Retained,
        sending: Sending,
        tally: Tally,
        *,
        boundary: Boundary,
        poll_interval_s: float,
    ) -> None:
        self._store = store
        self._windows = windows
        self._retained = retained
        self._sending = sending
        self._tally = tally
        self._boundary = boundary
        self._poll_interval_s = poll_interval_s
        self._own_messages = OwnMessages()
        self._request = PageRequest(windows.read_position)
        self._window: Window | None = None
        self._rows = WINDOW_ROWS
        self._woken_at = 0
        self._is_stopping = False
        self._scope = trio.CancelScope()
        self._log = get_logger()

    def __repr__(self) -> str:
        return f"<Loader {self._windows!r} window={self._window!r}>"

    async def run(self) -> None:
        """Load until told to stop."""
        with self._scope:
            while not self._is_done:
                try:
                    async with self._store.open_pages() as reader:
                        while not self._is_done:
                            await self._load_page(reader)
                except StoreError as error:
                    # The lock is another session's matter: what was loaded goes on being sent meanwhile.
                    self._log.warning(Event.PAGE_FAILED, kind=error.kind)
                    await trio.sleep(self._poll_interval_s)

    def stop(self) -> None:
        """Begin no window any more; one that was begun is loaded to its end, or it would all be sent again."""
        self._is_stopping = True
        if self._window is None:
            self._scope.cancel(reason="stop requested")

    @property
    def _is_done(self) -> bool:
        return self._is_stopping and self._window is None

    async def _load_page(self, reader: PageReader) -> None:
        await self._sending.wait_room()
        self._retained.reserve()
        try:
            page = await reader.read(self._request, self._rows if self._window is None else WINDOW_ROWS)
            if not self._request.is_current(page.boundary):
                await trio.sleep(self._poll_interval_s)
                return
            own: set[int] = await self._own_messages.find(page.checks, reader) if page.checks else set()
        except StoreTimeout as error:
            self._log.warning(Event.PAGE_FAILED, kind=error.kind)
            self._shrink()
            return
        finally:
            self._retained.release()
        if self._is_done:  # a stop came while the page was on its way: a window not begun is not begun any more
            return
        if self._window is None and page.last is None:
            await self._wait_for_rows(page.boundary)
        else:
            self._admit(page, own)
            self._sending.kick()

    def _admit(self, page: Page, own: set[int]) -> None:
        if self._window is None:
            assert page.last is not None
            self._window = self._windows.begin(page.last)
            self._request = self._request.from_start(page.last)
            self._rows = min(self._rows * 2, WINDOW_ROWS)
        deliveries = page.deliveries
        wanted = [delivery for place, delivery in enumerate(deliveries) if place not in own] if own else deliveries
        admitted = self._retained.admit(self._windows, self._window, wanted, trio.current_time())
        end = len(deliveries)
        if admitted < len(wanted):  # retries took the room: the rest of the page is read again
            end = next(place for place, delivery in enumerate(deliveries) if delivery is wanted[admitted])
        for place in own:
            if place < end:
                self._tally.count(deliveries[place].config.channel, Result.SUPPRESSED)
        if end == len(deliveries) and not page.is_full:
            self._windows.close(self._window)
            self._window = None
            self._request = PageRequest(self._windows.read_position)
        elif end:
            last = deliveries[end - 1]
            self._request = self._request.after((last.sequence_id, last.recipient_id))

    def _shrink(self) -> None:
        """A page took too long: its rows have very many subscriptions that none of them reaches. Try fewer rows."""
        self._rows = max(1, self._rows // 2)
        if self._window is not None:
            self._request = self._request.shortened()
            assert self._request.last is not None
            self._windows.shorten(self._window, self._request.last)

    async def _wait_for_rows(self, boundary: int) -> None:
        """Wait for settled rows: polling is the truth, an advance by this instance only wakes earlier, and once."""
        with trio.move_on_after(self._poll_interval_s):
            self._woken_at = await self._boundary.wait_above(max(boundary, self._woken_at))
