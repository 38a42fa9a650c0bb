"""Fixtures shared by all suites: one embedded PostgreSQL a session, one migrated database a test."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pushd.store import embedded
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.migrations import apply_migrations
from pushd.telemetry import Metrics

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of an embedded server whose template database `migrated` has the current schema."""
    folder = Path(tempfile.mkdtemp(prefix="pushd-test-"))
    # Durability is not what these tests are about; the fault suite starts servers of its own with it on.
    server = embedded.start(
        folder,
        {"fsync": "off", "synchronous_commit": "off", "max_connections": "200", "max_locks_per_transaction": "600"},
    )
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE DATABASE migrated")
        trio.run(_migrate, make_conninfo(server.url, dbname="migrated"))
        yield server.url
    finally:
        server.stop()
        shutil.rmtree(folder)


async def _migrate(url: str) -> None:
    async with open_database(DatabaseSettings(url), Metrics()) as database:
        async with database.dedicated("migrate") as connection:
            await apply_migrations(connection)


@pytest.fixture
def database_url(postgres: str) -> Iterator[str]:
    """URL of a fresh migrated database of the test's own."""
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE migrated STRATEGY file_copy")
    yield make_conninfo(postgres, dbname=name)
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def database(database_url: str, metrics: Metrics) -> AsyncIterator[Database]:
    """Open pools on the test's own database."""
    async with open_database(DatabaseSettings(database_url), metrics) as opened:
        yield opened
