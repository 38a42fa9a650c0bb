"""psycopg's session, waiting for its socket in Trio.

psycopg keeps protocol and waiting apart: a statement is a generator that yields what it waits for, readable or
writable, and is sent what happened. `Session` is the driver's own asyncio connection with that one method replaced, so
statements, their preparation and their results are the driver's, and no asyncio loop takes part in them. Only making a
connection and asking the server to cancel a statement run in asyncio, under trio-asyncio; both are rare.

When psycopg changes, this module and its tests are what to look at. It relies on `AsyncConnection.wait` being the one
place where a statement waits, and on `asyncio.Lock`, which the driver takes around each statement, needing no loop
while nobody else wants it; a session is used by one task at a time, so nobody does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
from typing import Any, TypeVar

import psycopg
import psycopg.waiting
import trio
import trio_asyncio
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.waiting import Ready, Wait

from pushd.errors import StoreError, StoreInvariant, StoreTimeout, StoreUnavailable

# trio-asyncio replaces asyncio.get_running_loop when it is imported; psycopg binds that name when *it* is. Without this
# line the order in which a program happens to import the two would decide whether connecting works at all.
psycopg.waiting.get_running_loop = asyncio.get_running_loop  # type: ignore[attr-defined]

# It prints connection strings, host names or parameters at some level; outcomes are counted elsewhere instead.
logging.getLogger("psycopg").addHandler(logging.NullHandler())
logging.getLogger("psycopg").propagate = False

CANCEL_S = 1.0  # asking the server to end a statement and hearing that it did; past it the session is thrown away
CANCEL_AGAIN_S = 0.1
EAGER_CHUNKS = 64  # reads of up to 16 KiB without giving others a turn: about 3 ms

_T = TypeVar("_T")
_TIMEOUT_STATES = {"57014", "25P04"}
_INVARIANT_STATES = {"23505", "23514", "22003"}


def translate_error(error: BaseException) -> StoreError:
    """The store's exception for a driver exception, by SQLSTATE where there is one."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    if state in _TIMEOUT_STATES:
        return StoreTimeout()
    if state in _INVARIANT_STATES:
        return StoreInvariant()
    connection_lost = state is None or state.startswith(("08", "57P"))
    return StoreUnavailable("connection" if connection_lost else "other")


class Session(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection whose statements are awaited in Trio. Made by `open_session`."""

    opened_at: float  # seconds of Trio's clock
    patience_s = math.inf  # seconds a statement may take, whatever the server and the network say of themselves

    async def wait(self, gen: PQGen[_T], interval: float = 0.0, timeout: float | None = None) -> _T:
        """Run a statement's generator to its end; a cancelled one is ended on the server first.

        So is one that outlasts `patience_s`: a server process that is stopped has a kernel that goes on acknowledging,
        and a proxy keeps its side of the connection up, so that neither `statement_timeout` nor TCP ends the wait.

        `interval` and `timeout` are the driver's, for signals and its own pool; Trio has its own ways for both.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # better not sent than sent and called back
        with trio.move_on_after(self.patience_s):
            try:
                return await _drive(gen, self.pgconn.socket)
            except trio.Cancelled:
                if self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                    await self._end_statement(gen)
                raise
        raise psycopg.OperationalError("no answer in time")

    async def _end_statement(self, gen: PQGen[Any]) -> None:
        with trio.move_on_after(CANCEL_S, shield=True):
            try:
                # A request that overtakes its statement cancels nothing, and the server does not tell: ask again.
                while self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                    await trio_asyncio.aio_as_trio(self.cancel_safe)(timeout=CANCEL_S)
                    with trio.move_on_after(CANCEL_AGAIN_S):
                        await _drive(gen, self.pgconn.socket, Ready.NONE)
            except (psycopg.Error, OSError):
                pass  # normally the statement's own end: it was cancelled
        if self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
            self.pgconn.finish()  # nobody knows what it is still doing

    @property
    def is_idle(self) -> bool:
        """Whether it is open, in no transaction, and runs no statement: fit for somebody else."""
        return self.pgconn.transaction_status == pq.TransactionStatus.IDLE

    def close_now(self) -> None:
        """Close the socket; does not wait."""
        self._closed = True
        self.pgconn.finish()


async def open_session(conninfo: str) -> Session:
    """A new session in autocommit mode. Raises StoreUnavailable."""

    async def connect() -> Session:
        return await Session.connect(conninfo, autocommit=True, cursor_factory=psycopg.AsyncCursor)

    try:
        session: Session = await trio_asyncio.aio_as_trio(connect)()
    except (psycopg.Error, OSError) as exc:
        raise translate_error(exc) from exc
    session.opened_at = trio.current_time()
    return session


async def _drive(gen: PQGen[_T], fd: int, first: Ready | None = None) -> _T:
    """Send a generator what its socket is ready for, until it returns; `first` is None for one that was not begun.

    The socket can nearly always be written to, and the later chunks of a large answer are there before the first was
    read: going to sleep for those would be a third of what a page of a thousand rows costs. After EAGER_CHUNKS others
    get their turn.
    """
    poll = select.poll()
    chunks = 0
    try:
        wanted = gen.send(first)  # type: ignore[arg-type]  # None, as generators are begun
        while True:
            ready = _ready_now(poll, fd, wanted) if chunks < EAGER_CHUNKS else 0
            chunks = chunks + 1 if ready else 0
            wanted = gen.send(Ready(ready or await _wait(fd, wanted)))
    except StopIteration as done:
        result: _T = done.value
        return result


def _ready_now(poll: select.poll, fd: int, wanted: int) -> int:
    poll.register(fd, (select.POLLIN if wanted & Ready.R else 0) | (select.POLLOUT if wanted & Ready.W else 0))
    for _, events in poll.poll(0):
        readable = Ready.R if events & ~select.POLLOUT else 0
        writable = Ready.W if events & ~select.POLLIN else 0
        return (readable | writable) & wanted
    return 0


async def _wait(fd: int, wanted: int) -> int:
    if wanted == Wait.R:
        await trio.lowlevel.wait_readable(fd)
        return Ready.R
    # While a statement goes out, the server may have to be read from, or it would wait for us as we for it. An epoll is
    # readable when either is possible; two tasks in a nursery would be cancelled with a group instead of a Cancelled.
    with select.epoll(1) as either:
        either.register(fd, (select.EPOLLIN if wanted & Wait.R else 0) | select.EPOLLOUT)
        await trio.lowlevel.wait_readable(either.fileno())
    return _ready_now(select.poll(), fd, wanted)
