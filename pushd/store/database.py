"""Connections to PostgreSQL for Trio code: pools, dedicated sessions, transactions, error translation.

Everything here is Trio's: a cancelled call cancels the statement on the server and leaves the connection clean; how the
driver is brought to that is `pushd.store.session`'s business. Connections are in autocommit mode; a transaction is the
explicit block of `Connection.transaction`.

The driver's error texts quote column values, so they never leave this module except as `__cause__` (PUSH-096).
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import psycopg
import trio
import trio_asyncio
from attrs import frozen
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pushd.errors import StoreError
from pushd.store.pool import Pool
from pushd.store.session import Session, open_session, translate_error
from pushd.telemetry import Metrics

ROLLBACK_S = 2.0  # clean-up after a failed block; past it the connection is thrown away
TRANSACTION_TIMEOUT_VERSION = 170_000  # the first PostgreSQL that has the setting
CONNECT_S = 10  # one connection attempt, the same bound as a provider's
ANSWER_S = 5.0  # what an answer may take beyond the time at which the server ends the statement

Params = Mapping[str, Any] | Sequence[Any] | None


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


@frozen
class Refusal:
    """Why no session could be had, and what to look at: constant texts, worded to follow a name."""

    what: str
    mend: str


NO_SESSION = Refusal(
    "cannot be reached, or does not let pushd in",
    "check host, port, database, user, password, TLS and firewall; PostgreSQL's log tells more",
)
READ_ONLY = Refusal(
    "accepts no writes",
    "name the primary, or all hosts of the cluster; default_transaction_read_only must be off",
)
LOST = Refusal("was reached, and the connection broke", "try again, and see PostgreSQL's log")


class Connection:
    """One session, Trio-flavoured. Not for use by two tasks at once.

    Every method raises StoreUnavailable, StoreTimeout or StoreInvariant.
    """

    __slots__ = ("_conn",)

    def __init__(self, conn: Session) -> None:
        self._conn = conn

    def __repr__(self) -> str:
        return f"<Connection {self._conn.info.transaction_status.name.lower()}>"

    @property
    def raw(self) -> Session:
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
        try:
            cursor = self._conn.cursor(binary=binary)
            await cursor.execute(cast("Any", query), params)
            return await cursor.fetchall()
        except (psycopg.Error, OSError) as exc:
            raise translate_error(exc) from exc

    async def fetch_one(self, query: str, params: Params = None, *, binary: bool = False) -> tuple[Any, ...] | None:
        """Run one statement and return its first row, or None."""
        rows = await self.fetch(query, params, binary=binary)
        return rows[0] if rows else None

    async def execute(self, query: str, params: Params = None) -> int:
        """Run one statement and return its row count (-1 where there is none)."""
        try:
            cursor = await self._conn.execute(cast("Any", query), params)
        except (psycopg.Error, OSError) as exc:
            raise translate_error(exc) from exc
        return cursor.rowcount

    @asynccontextmanager
    async def transaction(self, begin: str = "BEGIN") -> AsyncIterator[None]:
        """BEGIN, the block, COMMIT; ROLLBACK when the block raises or is cancelled.

        A COMMIT cut by cancellation has an unknown outcome, as any cut commit has.
        """
        await self.execute(begin)
        try:
            yield
            await self.execute("COMMIT")
        except BaseException:
            if self.in_transaction:  # a COMMIT may have been cut before it was sent
                await self._roll_back()
            raise

    async def _roll_back(self) -> None:
        with trio.move_on_after(ROLLBACK_S, shield=True) as scope:
            try:
                await self.execute("ROLLBACK")
            except StoreError:
                self._conn.close_now()
        if scope.cancelled_caught:
            self._conn.close_now()


def _application_name(purpose: str) -> str:
    return f"pushd {purpose} {socket.gethostname()}:{os.getpid()}"[:63]  # NAMEDATALEN - 1


class Database:
    """The pools and the way to dedicated sessions. Made by `open_database`."""

    def __init__(self, settings: DatabaseSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._primary = Pool(
            partial(self._open_pooled, "primary", replica=False), settings.max_connections, settings.acquire_s
        )
        self._replica = self._primary
        if settings.replica_url is not None:
            self._replica = Pool(
                partial(self._open_pooled, "replica", replica=True), settings.max_connections, settings.acquire_s
            )

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
        async with self._lend(self._primary) as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A pooled session on the replica, or on the primary when there is no replica."""
        async with self._lend(self._replica) as connection:
            yield connection

    async def fetch_on_primary(self, query: str, params: Params = None) -> list[tuple[Any, ...]]:
        """Run one statement on a pooled session of the primary and return its rows, in binary form.

        Raises:
            StoreUnavailable, StoreTimeout, StoreInvariant: as `primary` and `Connection.fetch` say.
        """
        async with self._lend(self._primary) as connection:
            return await connection.fetch(query, params, binary=True)

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
        session = await self._open(purpose, replica=read and self.has_replica)
        try:
            yield Connection(session)
        finally:
            session.close_now()

    async def diagnose(self, *, read: bool = False) -> Refusal:
        """Why `dedicated` has just failed with kind `connection`; takes CONNECT_S at most.

        libpq keeps the SQLSTATE of a refused connection to itself, and its texts are translated and hold names. What
        can be told apart is told by asking for less: a session that need not write.
        """
        replica = read and self.has_replica
        conninfo = self._conninfo("check", replica=replica)
        if not replica:
            conninfo = make_conninfo(conninfo, target_session_attrs="any")
        with trio.move_on_after(CONNECT_S):
            try:
                session = await open_session(conninfo)
            except StoreError:
                return NO_SESSION
            try:
                is_read_only = await Connection(session).fetch_one("SHOW transaction_read_only") == ("on",)
            except StoreError:
                return LOST
            finally:
                session.close_now()
            return READ_ONLY if is_read_only and not replica else LOST
        return NO_SESSION

    async def _open(self, purpose: str, *, replica: bool) -> Session:
        session = await open_session(self._conninfo(purpose, replica=replica))
        session.patience_s = self._settings.statement_timeout_ms / 1_000 + ANSWER_S
        try:
            await Connection(session).execute(f"SET statement_timeout = {self._settings.statement_timeout_ms:d}")
        except BaseException:
            session.close_now()
            raise
        return session

    async def _open_pooled(self, purpose: str, *, replica: bool) -> Session:
        session = await self._open(purpose, replica=replica)
        connection = Connection(session)
        try:
            # READ COMMITTED is what statements that look again behind a lock rest on, whatever a database's default is.
            await connection.execute("SET default_transaction_isolation = 'read committed'")
            # Between a statement's end and its commit, statement_timeout has no say. A client that stops just there
            # must not keep its locks. Pooled sessions run transactions of one statement, so twice its time is plenty.
            if session.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
                timeout_ms = min(2 * self._settings.statement_timeout_ms, 2**31 - 1)
                await connection.execute(f"SET transaction_timeout = {timeout_ms:d}")
        except BaseException:
            session.close_now()
            raise
        return session

    def _conninfo(self, purpose: str, *, replica: bool) -> str:
        url = self._settings.replica_url if replica else self._settings.url
        assert url is not None
        return make_conninfo(
            url,
            application_name=_application_name(purpose),
            connect_timeout=CONNECT_S,
            client_encoding="UTF8",  # or a role's setting could make text unsendable, in an error that quotes it
            # A dead peer is noticed within about 25 s: by a session that only waits through keepalives, which are not
            # sent while something is unacknowledged, and then through the limit on that (in ms).
            keepalives=1,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=25_000,
            **({} if replica else {"target_session_attrs": "read-write"}),
        )

    @asynccontextmanager
    async def _lend(self, pool: Pool) -> AsyncIterator[Connection]:
        session = await pool.borrow()
        connection = Connection(session)
        try:
            yield connection
        finally:
            if connection.in_transaction:
                # Whoever opened it forgot to end it: never lend it on like this, and let the operator see it.
                self._metrics.db_released_open_transactions.inc()
                await connection._roll_back()
            pool.give_back(session)

    def close(self) -> None:
        """Close every session that is not lent, and the lent ones when they come back; nothing is lent any more."""
        self._primary.close()
        self._replica.close()


@asynccontextmanager
async def open_database(settings: DatabaseSettings, metrics: Metrics) -> AsyncIterator[Database]:
    """Open a database whose sessions end with the block.

    Sessions are made when they are wanted: an unreachable server is reported by the first use, not here.
    """
    async with trio_asyncio.open_loop():
        database = Database(settings, metrics)
        try:
            yield database
        finally:
            database.close()
