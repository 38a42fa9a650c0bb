"""What the tailer reads, on a session of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from attrs import field, frozen

from pushd.core.unread import Unread
from pushd.errors import StoreInvariant
from pushd.model import StoredEnvelope
from pushd.store.boundary import load_boundary
from pushd.store.database import Connection, Database
from pushd.store.envelopes import stored_envelope
from pushd.store.queries import query


@frozen
class Seen:
    """An envelope that became visible."""

    sequence_id: int
    topic: bytes = field(repr=False)
    payload_bytes: int


@frozen
class Poll:
    """What one snapshot shows of the unread ids, ascending. `is_complete` when there is no more."""

    boundary: int
    seen: Sequence[Seen]
    is_complete: bool


class TailerSession:
    """A session on the read database; its methods raise StoreError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def load_boundary(self) -> int:
        """The closed boundary as the read database shows it."""
        return await load_boundary(self._connection)

    async def poll(self, unread: Unread, max_rows: int) -> Poll:
        """The first `max_rows` visible envelopes among the unread ids, with the boundary of the same snapshot."""
        lows, highs = zip(*unread.ranges, strict=True)
        rows = await self._connection.fetch(
            query("load_unread_ids"), {"lows": list(lows), "highs": list(highs), "max_rows": max_rows}, binary=True
        )
        if not rows:
            raise StoreInvariant
        seen = [Seen(*found) for _, *found in rows if found[0] is not None]
        return Poll(rows[0][0], seen, is_complete=len(seen) < max_rows)

    async def load(self, ids: Sequence[int]) -> list[StoredEnvelope]:
        """The envelopes with these ids, ascending; those that are gone are left out."""
        rows = await self._connection.fetch(query("load_envelopes_by_id"), {"ids": list(ids)}, binary=True)
        return [stored_envelope(row) for row in rows]


class TailerStore:
    """Where a tailer starts from; raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load_primary_boundary(self) -> int:
        """The closed boundary as the primary has it."""
        async with self._database.primary() as connection:
            return await load_boundary(connection)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TailerSession]:
        """A session outside the pools, so that a burst of requests cannot delay a poll."""
        async with self._database.dedicated("tailer", read=True) as connection:
            yield TailerSession(connection)
