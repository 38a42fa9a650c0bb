"""What several runs use: locks held for a block, what an instance logged and when, and what cannot be shown here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NoReturn

import psycopg
import pytest
import trio

from tests.faults.world import Instance, World


@asynccontextmanager
async def locked(world: World, statement: str) -> AsyncIterator[None]:
    """Keep the locks of a statement for the length of the block."""
    conn = await trio.to_thread.run_sync(lambda: psycopg.connect(world.url))
    try:
        await trio.to_thread.run_sync(conn.execute, statement.encode())
        yield
    finally:
        conn.close()


def logged(instance: Instance, *names: str, after: int = 0) -> list[dict[str, Any]]:
    """The events of these names, those aside that were among the first `after` lines."""
    return [event for event in instance.server.events[after:] if event.get("event") in names]


def moment(event: dict[str, Any]) -> float:
    """When an instance logged an event, in seconds since 1970."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def newest(world: World) -> int:
    """The highest id that any publish was given so far; later ones get higher ones."""
    return int(world.ask("SELECT last_value FROM envelope_sequence")[0][0])


def settled(world: World) -> int:
    """The closed allocation boundary."""
    return int(world.ask("SELECT closed_sequence_id FROM allocation_boundary")[0][0])


def not_shown(what: str, why: str) -> NoReturn:
    """End a run whose fault cannot be made on this machine, and have the summary say so.

    For what the machine lacks or forbids, found out before anything else is tried. A fault that can be made and has
    no effect is a failure.
    """
    pytest.skip(f"not shown: {what}; {why}")
