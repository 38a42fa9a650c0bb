"""The closed allocation boundary: every id at or below it is settled, none above it is promised to be (PUSH-042)."""

from __future__ import annotations

from pushd.errors import StoreInvariant
from pushd.store.database import Connection
from pushd.store.queries import query


async def advance_boundary(connection: Connection, barrier_wait_ms: int) -> int | None:
    """Close the boundary over every id handed out so far and return it; one statement on the primary.

    Returns None, and changes nothing, when publishers held the barrier for `barrier_wait_ms`.

    Raises:
        StoreInvariant: the stored boundary is missing or above the sequence.
        StoreTimeout, StoreUnavailable: the attempt failed; the boundary is as it was, or advanced.
    """
    row = await connection.fetch_one(query("close_allocation_boundary"), {"wait_ms": barrier_wait_ms})
    assert row is not None
    closed: int | None = row[0]
    return closed


async def load_boundary(connection: Connection) -> int:
    """The closed boundary as this session's database shows it; a replica may lag.

    Raises:
        StoreInvariant: there is none.
    """
    row = await connection.fetch_one(query("load_closed_boundary"))
    if row is None:
        raise StoreInvariant
    return int(row[0])
