"""A bounded set of sessions, each lent to one task at a time.

There is no background task. A session is made when somebody wants one and none is idle, and thrown away when it comes
back broken or is found dead; so nothing has to recover after an outage, and clean-up in a crash can still borrow.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable

import trio

from pushd.errors import StoreUnavailable
from pushd.store.session import Session

MAX_AGE_S = 3_600.0  # a session's server process grows with the plans and catalogue entries it has met


class Pool:
    """At most `size` sessions.

    Args:
        open_session: makes a session; raises StoreUnavailable.
        size: sessions lent and idle together.
        acquire_s: longest wait for a session to be free or made.
    """

    def __init__(self, open_session: Callable[[], Awaitable[Session]], size: int, acquire_s: float) -> None:
        self._open_session = open_session
        self._free = trio.Semaphore(size)
        self._acquire_s = acquire_s
        self._idle: list[Session] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool idle={len(self._idle)} free={self._free.value}>"

    async def borrow(self) -> Session:
        """A session that is not known to be dead; to be given back, whatever happens.

        Raises:
            StoreUnavailable: none was free or could be made in time, or the pool is closed.
        """
        with trio.move_on_after(self._acquire_s):
            await self._free.acquire()
            try:
                return self._living() or await self._open_session()
            except BaseException:
                self._free.release()
                raise
        raise StoreUnavailable("timeout")

    def give_back(self, session: Session) -> None:
        """Take a session back; does not wait."""
        if self._closed or not session.is_idle or trio.current_time() - session.opened_at > MAX_AGE_S:
            session.close_now()
        else:
            self._idle.append(session)
        self._free.release()

    def close(self) -> None:
        """Close the idle sessions now and the lent ones when they come back; nothing is lent any more."""
        self._closed = True
        while self._idle:
            self._idle.pop().close_now()

    def _living(self) -> Session | None:
        """The session used last, which leaves the others to grow old."""
        if self._closed:
            raise StoreUnavailable("connection")
        while self._idle:
            session = self._idle.pop()
            if not _has_ended(session):
                return session
            session.close_now()
        return None


def _has_ended(session: Session) -> bool:
    """Whether the server has something to say to a session that asked nothing: it is closing it."""
    poll = select.poll()
    poll.register(session.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))
