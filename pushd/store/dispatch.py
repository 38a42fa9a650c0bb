"""The dispatcher's view of the database: the lock session with its cursor, the upkeep of recipients, the page reader.

Statements that belong to the lock run on its own session, pages on a session of their own on the read database, and
everything else through the primary's pool, so that nothing slow can stand in front of the statement that proves the
lock (PUSH-040).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from attrs import field, frozen
from psycopg import Notify

from pushd.errors import StoreInvariant
from pushd.model import DeliveryConfig
from pushd.store.database import Connection, Database
from pushd.store.dispatch_pages import PageReader, open_page_reader
from pushd.store.queries import query

# A holder that stopped or vanished frees the lock by itself: the server ends a session that says nothing for this long.
IDLE_SESSION_S = 5
# A statement of the lock session that waits longer than this is a loss anyway; it must not outlast the idle limit.
LOCK_STATEMENT_S = 3
STEP_DOWN = "pushd_step_down"  # the notification that asks the holder to give the lock away
SWEEP_RECIPIENTS = 500  # rows a batch locks at most; fewer where their topics, to which a delete cascades, are many:
SWEEP_TOPICS = 20_000  # a cascade over this many rows takes well under a second


@frozen
class Grave:
    """A recipient whose provider named the token as dead, with all that has to be unchanged for its deletion."""

    recipient_id: bytes = field(repr=False)
    config: DeliveryConfig
    secret_hash: bytes = field(repr=False)


class LockSession:
    """The session that tries for the dispatcher lock and holds it. Ends with its connection, and so does the lock."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_asked_to_step_down = False
        """Whether a notification came since `listen`. The driver hands it over with the answer to any statement."""

    async def listen(self) -> None:
        """Hear of STEP_DOWN from now on. Before the lock is held nobody means this session. Raises StoreError."""
        self._connection.raw.add_notify_handler(self._on_notification)
        await self._connection.execute(f"LISTEN {STEP_DOWN}")

    def _on_notification(self, _notification: Notify) -> None:
        self.is_asked_to_step_down = True

    async def try_lock(self) -> bool:
        """Try once, without waiting; whether the lock is held now. Raises StoreError."""
        row = await self._connection.fetch_one(query("try_dispatcher_lock"))
        return row is not None and bool(row[0])

    async def probe(self) -> None:
        """Prove that the session still lives. Raises StoreError when it does not."""
        await self._connection.fetch_one("SELECT 1")

    async def read_cursor(self) -> int:
        """The stored cursor. Raises StoreError; StoreInvariant when there is none."""
        row = await self._connection.fetch_one(query("load_push_cursor"))
        if row is None:
            raise StoreInvariant
        return int(row[0])

    async def move_cursor(self, known: int, mark: int) -> bool:
        """Move the cursor from `known` forward to `mark`; False when its value is not `known`. Raises StoreError."""
        return await self._connection.execute(query("move_push_cursor"), {"known": known, "mark": mark}) == 1

    def sever(self) -> None:
        """Cut the connection under a statement that does not return: it then fails at once.

        Cancelling it would ask the server over a second connection and wait for its answer, for seconds when the
        network is what does not answer.
        """
        raw = self._connection.raw
        if not raw.closed:
            with suppress(OSError):  # the other side was faster, and the statement fails by that
                sock = socket.socket(fileno=raw.pgconn.socket)
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                finally:
                    sock.detach()  # the descriptor is the driver's, and there may be none left for a copy


class DispatchStore:
    """Everything the dispatcher asks of the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def open_lock_session(self) -> AsyncIterator[LockSession]:
        """A dedicated primary session for the lock. Raises StoreError."""
        async with self._database.dedicated("dispatcher") as connection:
            await connection.execute(
                f"SET idle_session_timeout = '{IDLE_SESSION_S}s'; SET statement_timeout = '{LOCK_STATEMENT_S}s'"
            )
            yield LockSession(connection)

    @asynccontextmanager
    async def open_pages(self) -> AsyncIterator[PageReader]:
        """A reader of windows on a session of its own on the read database. Raises StoreError."""
        async with self._database.dedicated("loader", read=True) as connection:
            yield await open_page_reader(connection)

    async def needs_maintenance(self) -> bool:
        """Whether eligible rows lie above the closed boundary, as the read database shows it. Raises StoreError."""
        async with self._database.read() as connection:
            row = await connection.fetch_one(query("need_boundary_maintenance"))
        return row is not None and bool(row[0])

    async def delete_dead(self, graves: Sequence[Grave]) -> list[Grave]:
        """Delete those recipients that are still stored exactly so, and return them. Raises StoreError."""
        async with self._database.primary() as connection:
            rows = await connection.fetch(
                query("delete_dead_recipients"),
                {
                    "recipient_ids": [grave.recipient_id for grave in graves],
                    "channels": [int(grave.config.channel) for grave in graves],
                    "deliveries": [grave.config.target for grave in graves],
                    "signing_keys": [grave.config.signing_key for grave in graves],
                    "secret_hashes": [grave.secret_hash for grave in graves],
                },
            )
        return [graves[place - 1] for (place,) in rows]

    async def delete_expired(self, ttl_s: int) -> int:
        """Delete one batch of recipients that have not renewed for `ttl_s` seconds; how many. Raises StoreError."""
        async with self._database.primary() as connection:
            return await connection.execute(
                query("delete_expired_recipients"),
                {"ttl_ns": ttl_s * 1_000_000_000, "recipients": SWEEP_RECIPIENTS, "topics": SWEEP_TOPICS},
            )
