"""How often a registration call asks the database: at most twice, however many topics it carries."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pushd.store.database import Database
from pushd.telemetry import Metrics
from tests.support.registration import KEY, Api, Refused, add, group, http


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything the driver was told to execute, transactions' beginnings and ends too."""
    seen: list[Any] = []
    execute = psycopg.AsyncCursor.execute

    async def noted(cursor: Any, query: Any, *args: Any, **more: Any) -> Any:
        seen.append(query)
        return await execute(cursor, query, *args, **more)

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", noted)
    return seen


async def test_register_and_update_ask_twice(database: Database, metrics: Metrics, statements: list[Any]) -> None:
    api = Api(database, metrics)
    await api.register(http(), recipient_id=b"\x77" * 32)  # opens the session
    adds = [add(group(number), KEY, KEY, KEY, base=600) for number in range(1_000)]
    for call in (
        lambda: api.register(http()),
        lambda: api.register(http()),
        lambda: api.update(adds),
        lambda: api.update(adds),
        lambda: api.update((), [group(number) for number in range(1_000)]),
        lambda: api.update(),
    ):
        statements.clear()
        assert not isinstance(await call(), Refused)
        assert 1 <= len(statements) <= 2, statements
