"""Connections to PostgreSQL for Trio code: pools, dedicated sessions, transactions, error translation.

psycopg and its pool speak asyncio only. This module, and no other, runs them under trio-asyncio: everything it hands
out is Trio-flavoured, and a cancelled call cancels the statement on the server and leaves the connection clean.
Connections are in autocommit mode; a transaction is the explicit block of `Connection.transaction`.

The driver's error texts quote column values, so they never leave this module except as `__cause__` (PUSH-096).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import psycopg
import psycopg.waiting
import trio
import trio_asyncio
from attrs import frozen
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.waiting import Ready, Wait
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from pushd.errors import StoreError, StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.telemetry import Metrics

# trio-asyncio replaces asyncio.get_running_loop when it is imported; psycopg binds that name when *it* is. Without this
# line the order in which a program happens to import the two would decide whether the driver works at all.
psycopg.waiting.get_running_loop = asyncio.get_running_loop  # type: ignore[attr-defined]

# Both print connection strings, host names or parameters at some level; outcomes are counted here instead.
for _name in ("psycopg", "psycopg.pool"):
    logging.getLogger(_name).addHandler(logging.NullHandler())
    logging.getLogger(_name).propagate = False

ROLLBACK_S = 2.0  # clean-up after a failed block; past it the connection is thrown away
CANCEL_S = 1.0  # a cancel request; past it the connection is cut
WAIT_INTERVAL_S = 0.1  # how often the driver looks up while it waits for the socket; its own default
EAGER_CHUNKS = 64  # reads of up to 16 KiB without giving others a turn: about 3 ms
TRANSACTION_TIMEOUT_VERSION = 170_000  # the first PostgreSQL that has the setting
CONNECT_S = 10  # one connection attempt, the same bound as a provider's

Params = Mapping[str, Any] | Sequence[Any] | None
_T = TypeVar("_T")


@frozen
class DatabaseSettings:
    """Where the data is and how many sessions to it.

    Attributes:
        url: primary, several hosts allowed; the session that accepts writes is used.
        replica_url: one physical replica for reads, or None.
        max_connections: size of each pool.
        statement_timeout_ms: `statement_timeout` of every session.
        acquire_s: longest wait for a free connection before the call counts as unavailable.
    """

    url: str
    replica_url: str | None = None
    max_connections: int = 20
    statement_timeout_ms: int = 5_000
    acquire_s: float = 5.0

    def __repr__(self) -> str:
        return f"<DatabaseSettings replica={self.replica_url is not None} max_connections={self.max_connections}>"


_TIMEOUT_STATES = {"57014", "25P04"}
_INVARIANT_STATES = {"23505", "23514", "22003"}


def translate_error(error: BaseException) -> StoreError:
    """The store's exception for a driver exception, by SQLSTATE where there is one."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable("timeout")
    if isinstance(error, PoolClosed):
        return StoreUnavailable("connection")
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    if state in _TIMEOUT_STATES:
        return StoreTimeout()
    if state in _INVARIANT_STATES:
        return StoreInvariant()
    connection_lost = state is None or state.startswith(("08", "57P"))
    return StoreUnavailable("connection" if connection_lost else "other")


async def _bridge(awaitable: Awaitable[_T]) -> _T:
    """Run an asyncio awaitable from Trio and translate what the driver raises."""

    async def run() -> _T:
        return await awaitable

    try:
        return cast("_T", await trio_asyncio.aio_as_trio(run)())
    except (psycopg.Error, OSError) as exc:
        raise translate_error(exc) from exc
    finally:
        if isinstance(awaitable, Coroutine):
            awaitable.close()  # cancelled before asyncio began with it, it would be reported as never awaited


def _eager(gen: Generator[Wait, Any, _T], fileno: int) -> Generator[Wait, Any, _T]:
    """The driver's generator `gen`, which waits only when the socket is not ready already.

    The socket can nearly always be written to, and the later chunks of a large answer are there before the first was
    read. Going to asyncio's loop for them took 200 microseconds of CPU for the smallest statement instead of 85, and a
    third of what a page of a thousand rows costs. After EAGER_CHUNKS others get their turn.
    """
    poll = select.poll()
    chunks = 0
    try:
        wanted = next(gen)
        while True:
            ready = _ready_now(poll, fileno, wanted) if chunks < EAGER_CHUNKS else 0
            chunks = chunks + 1 if ready else 0
            wanted = gen.send(ready or (yield wanted))
    except StopIteration as done:
        return cast("_T", done.value)


def _ready_now(poll: select.poll, fileno: int, wanted: int) -> int:
    """Which of the wanted readiness bits of `psycopg.waiting` hold at this moment."""
    poll.register(fileno, (select.POLLIN if wanted & Ready.R else 0) | (select.POLLOUT if wanted & Ready.W else 0))
    for _, events in poll.poll(0):
        readable = Ready.R if events & ~select.POLLOUT else 0
        writable = Ready.W if events & ~select.POLLIN else 0
        return (readable | writable) & wanted
    return 0


class _Session(psycopg.AsyncConnection[tuple[Any, ...]]):
    """The driver's connection with two changes.

    It does not go through the event loop for what is ready already. And it gives up on a server that does not even
    answer a cancel request: the driver waits five seconds for that request and five more for the statement's end, so
    behind a network gone deaf a stop would overrun its deadline by ten.
    """

    async def wait(self, gen: Any, interval: float = WAIT_INTERVAL_S, timeout: float | None = None) -> Any:
        return await super().wait(_eager(gen, self.pgconn.socket), interval, timeout)

    async def _try_cancel(self, *, timeout: float = CANCEL_S) -> None:
        try:
            await self.cancel_safe(timeout=min(timeout, CANCEL_S))
        except psycopg.Error:
            if not self.closed:
                with socket.socket(fileno=os.dup(self.pgconn.socket)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)


class Connection:
    """One session, Trio-flavoured. Not for use by two tasks at once.

    Every method raises StoreUnavailable, StoreTimeout or StoreInvariant.
    """

    __slots__ = ("_conn",)

    def __init__(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        self._conn = conn

    def __repr__(self) -> str:
        return f"<Connection {self._conn.info.transaction_status.name.lower()}>"

    @property
    def raw(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        """The driver's connection, for modules of `pushd.store` that need COPY or pipelines."""
        return self._conn

    @property
    def is_broken(self) -> bool:
        """Whether the session is known to be gone."""
        return self._conn.closed

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, failed ones included."""
        return self._conn.info.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

    async def fetch(self, query: str, params: Params = None, *, binary: bool = False) -> list[tuple[Any, ...]]:
        """Run one statement and return all its rows; `binary` asks for binary results (faster for bytea)."""

        async def run() -> list[tuple[Any, ...]]:
            cursor = self._conn.cursor(binary=binary)
            await cursor.execute(cast("Any", query), params)
            return await cursor.fetchall()

        return await _bridge(run())

    async def fetch_one(self, query: str, params: Params = None, *, binary: bool = False) -> tuple[Any, ...] | None:
        """Run one statement and return its first row, or None."""
        rows = await self.fetch(query, params, binary=binary)
        return rows[0] if rows else None

    async def execute(self, query: str, params: Params = None) -> int:
        """Run one statement and return its row count (-1 where there is none)."""

        async def run() -> int:
            cursor = await self._conn.execute(cast("Any", query), params)
            return cursor.rowcount

        return await _bridge(run())

    @asynccontextmanager
    async def transaction(self, begin: str = "BEGIN") -> AsyncIterator[None]:
        """BEGIN, the block, COMMIT; ROLLBACK when the block raises or is cancelled.

        A COMMIT cut by cancellation has an unknown outcome, as any cut commit has.
        """
        await self.execute(begin)
        try:
            yield
        except BaseException:
            await self._roll_back()
            raise
        await self.execute("COMMIT")

    async def _roll_back(self) -> None:
        with trio.move_on_after(ROLLBACK_S, shield=True) as scope:
            try:
                await self.execute("ROLLBACK")
            except StoreError:
                await self._discard()
        if scope.cancelled_caught:
            await self._discard()

    async def _discard(self) -> None:
        with trio.CancelScope(shield=True):  # closing a socket does not wait
            await trio_asyncio.aio_as_trio(self._conn.close)()


def _application_name(purpose: str) -> str:
    return f"pushd {purpose} {socket.gethostname()}:{os.getpid()}"[:63]  # NAMEDATALEN - 1


class Database:
    """The pools and the way to dedicated sessions. Made by `open_database`."""

    def __init__(self, settings: DatabaseSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._primary: AsyncConnectionPool[Any] | None = None
        self._replica: AsyncConnectionPool[Any] | None = None

    def __repr__(self) -> str:
        return f"<Database {self._settings!r}>"

    @property
    def has_replica(self) -> bool:
        """Whether reads go to a replica."""
        return self._settings.replica_url is not None

    @asynccontextmanager
    async def primary(self) -> AsyncIterator[Connection]:
        """A pooled session on the primary.

        Raises:
            StoreUnavailable: none was free within `acquire_s`, or the primary cannot be reached.
        """
        assert self._primary is not None
        async with self._lend(self._primary) as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A pooled session on the replica, or on the primary when there is no replica."""
        pool = self._replica or self._primary
        assert pool is not None
        async with self._lend(pool) as connection:
            yield connection

    async def fetch_on_primary(self, query: str, params: Params = None) -> list[tuple[Any, ...]]:
        """Run one statement on a pooled session of the primary and return its rows, in binary form.

        The same as `primary()` and `fetch()`, but borrowing, running and giving back cross the bridge to asyncio once
        instead of three times: 140 µs of CPU less, a third of a small statement.

        Raises:
            StoreUnavailable, StoreTimeout, StoreInvariant: as the two say.
        """
        pool = self._primary
        assert pool is not None

        async def run() -> list[tuple[Any, ...]]:
            conn = await pool.getconn()
            try:
                cursor = conn.cursor(binary=True)
                await cursor.execute(cast("Any", query), params)
                return cast("list[tuple[Any, ...]]", await cursor.fetchall())
            finally:
                await pool.putconn(conn)  # throws away a session that is broken

        return await _bridge(run())

    async def fetch_one(self, query: str, params: Params = None) -> tuple[Any, ...] | None:
        """The first row of `fetch_on_primary`, or None: what `Connection.fetch_one` is to one who needs no session."""
        rows = await self.fetch_on_primary(query, params)
        return rows[0] if rows else None

    @asynccontextmanager
    async def dedicated(self, purpose: str, *, read: bool = False) -> AsyncIterator[Connection]:
        """A session of its own outside the pools, named `pushd <purpose> <host>:<pid>`; closed at the end.

        Raises:
            StoreUnavailable: the server cannot be reached within CONNECT_S.
        """
        replica = read and self._settings.replica_url is not None
        raw = await _bridge(
            _Session.connect(
                self._conninfo(purpose, replica=replica), autocommit=True, cursor_factory=psycopg.AsyncCursor
            )
        )
        connection = Connection(raw)
        try:
            await connection.execute(f"SET statement_timeout = {self._settings.statement_timeout_ms:d}")
            yield connection
        finally:
            await connection._discard()

    def _conninfo(self, purpose: str, *, replica: bool) -> str:
        url = self._settings.replica_url if replica else self._settings.url
        assert url is not None
        return make_conninfo(
            url,
            application_name=_application_name(purpose),
            connect_timeout=CONNECT_S,
            # A dead peer is noticed within about 25 s even by a session that only waits.
            keepalives=1,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            **({} if replica else {"target_session_attrs": "read-write"}),
        )

    @asynccontextmanager
    async def _lend(self, pool: AsyncConnectionPool[Any]) -> AsyncIterator[Connection]:
        raw = await _bridge(pool.getconn())
        connection = Connection(raw)
        try:
            yield connection
        finally:
            if connection.in_transaction:
                # Whoever opened it forgot to end it: never lend it on like this, and let the operator see it.
                self._metrics.db_released_open_transactions.inc()
                await connection._roll_back()
            with trio.CancelScope(shield=True):  # hands the session to the pool's queue; does not wait for the server
                await trio_asyncio.aio_as_trio(pool.putconn)(raw)

    @asynccontextmanager
    async def _open_pool(self, purpose: str, *, replica: bool) -> AsyncIterator[AsyncConnectionPool[Any]]:
        timeout_ms = self._settings.statement_timeout_ms

        async def configure(conn: psycopg.AsyncConnection[Any]) -> None:
            # READ COMMITTED is what statements that look again behind a lock rest on, whatever a database's default is.
            await conn.execute(
                f"SET statement_timeout = {timeout_ms:d}; SET default_transaction_isolation = 'read committed'"
            )
            # Between a statement's end and its commit, statement_timeout has no say. A client that stops just there
            # must not keep its locks. Pooled sessions run transactions of one statement, so twice its time is plenty.
            if conn.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
                await conn.execute(f"SET transaction_timeout = {min(2 * timeout_ms, 2**31 - 1):d}")

        pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
            self._conninfo(purpose, replica=replica),
            connection_class=_Session,
            kwargs={"autocommit": True},
            min_size=min(2, self._settings.max_connections),
            max_size=self._settings.max_connections,
            open=False,
            configure=configure,
            timeout=self._settings.acquire_s,
            # Try again within a second of an outage's end rather than after the default back-off of minutes.
            reconnect_timeout=5.0,
            num_workers=3,
        )
        await trio_asyncio.aio_as_trio(pool.open)()
        try:
            yield pool
        finally:
            with trio.move_on_after(ROLLBACK_S, shield=True):
                await trio_asyncio.aio_as_trio(pool.close)(ROLLBACK_S)


@asynccontextmanager
async def open_database(settings: DatabaseSettings, metrics: Metrics) -> AsyncIterator[Database]:
    """Open the pools under a trio-asyncio loop of their own; they end with the block.

    Connections are made in the background: an unreachable server is reported by the first use, not here.
    """
    database = Database(settings, metrics)
    async with trio_asyncio.open_loop():
        async with database._open_pool("primary", replica=False) as primary:
            database._primary = primary
            if settings.replica_url is None:
                yield database
            else:
                async with database._open_pool("replica", replica=True) as replica:
                    database._replica = replica
                    yield database
