"""Schema changes: once each, in order, never backwards."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pushd.errors import MigrationError
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.migrations import Migration, apply_migrations, load_migrations, pending
from pushd.telemetry import Metrics


def test_pending_is_what_the_database_lacks() -> None:
    migrations = load_migrations()
    assert pending(migrations, {}) == migrations
    assert pending(migrations, {m.number: m.sha256 for m in migrations}) == []


def test_newer_database_is_refused() -> None:
    migrations = load_migrations()
    applied = {m.number: m.sha256 for m in migrations} | {len(migrations) + 1: b"\0" * 32}
    with pytest.raises(MigrationError, match="newer than this program"):
        pending(migrations, applied)


def test_changed_file_is_refused() -> None:
    with pytest.raises(MigrationError, match="was changed after"):
        pending(load_migrations(), {1: b"\0" * 32})


@pytest.mark.parametrize("names", [["0002_b.sql"], ["0001_a.sql", "0003_c.sql"], ["1_a.sql"], ["0001-a.sql"]])
def test_gaps_and_odd_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1")
    with pytest.raises(MigrationError):
        load_migrations(tmp_path)


async def test_second_run_applies_nothing(database: Database) -> None:
    async with database.dedicated("migrate") as connection:
        assert await apply_migrations(connection) == []


async def test_instances_starting_together_apply_each_once(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute("CREATE DATABASE together")
    url = make_conninfo(postgres, dbname="together")
    applied: list[str] = []

    async def start() -> None:
        async with open_database(DatabaseSettings(url), Metrics()) as database:
            async with database.dedicated("migrate") as connection:
                applied.extend(await apply_migrations(connection))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(start)
    assert sorted(applied) == [migration.name for migration in load_migrations()]


async def test_migration_may_take_longer_than_statements_may(
    database_url: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushd.store.database.ANSWER_S", 0.05)
    migrations = load_migrations()
    slow = Migration(len(migrations) + 1, "slow", "SELECT pg_sleep(0.5)", bytes(32))
    monkeypatch.setattr("pushd.store.migrations.load_migrations", lambda: [*migrations, slow])
    async with open_database(DatabaseSettings(database_url, statement_timeout_ms=100), metrics) as database:
        async with database.dedicated("migrate") as connection:
            assert await apply_migrations(connection) == ["slow"]
