"""What a database must be like before anything is stored in it."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pushd.errors import StartError
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.startup import prepare_database
from pushd.telemetry import Metrics


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_database_that_cannot_hold_every_text_is_refused(
    postgres: str, database_url: str, metrics: Metrics, encoding: str
) -> None:
    """A token outside of LATIN1 would be an error at its first Register, one that quotes it."""
    name = f"{conninfo_to_dict(database_url)['dbname']}_{encoding.lower()}"
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
        try:
            async with open_database(DatabaseSettings(make_conninfo(postgres, dbname=name)), metrics) as database:
                with pytest.raises(StartError, match=rf"database.url: .*{encoding}.*UTF8"):
                    await prepare_database(database)
        finally:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_text_is_sent_as_utf8_whatever_the_environment_says(
    database_url: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with open_database(DatabaseSettings(database_url), metrics) as database:
        assert await _echo(database, "中é") == "中é"


async def _echo(database: Database, text: str) -> object:
    async with database.primary() as connection:
        row = await connection.fetch_one("SELECT %s::text", (text,))
    assert row is not None
    return row[0]
