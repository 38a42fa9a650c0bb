"""What a database must be like before anything is stored in it."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pushd.config import Config
from pushd.errors import StartError
from pushd.store import embedded
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.startup import (
    EMBEDDED_POLL_S,
    embedded_server,
    open_running_database,
    prepare_database,
    watch_embedded_server,
)
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


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="pushd-"))  # not tmp_path: too long for a socket
    yield place
    shutil.rmtree(place)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Every file this process would open is one too many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_shortage_of_descriptors_is_not_the_end_of_the_server(
    folder: Path, autojump_clock: trio.testing.MockClock
) -> None:
    server = embedded.start(folder, {"fsync": "off", "shared_buffers": "1MB"})
    try:
        with no_descriptor_left(), trio.move_on_after(5.5 * EMBEDDED_POLL_S) as scope:
            with pytest.raises(OSError, match="Too many open files"):
                embedded.running_url(folder)
            await watch_embedded_server(folder)
        assert scope.cancelled_caught
    finally:
        server.stop()
    with pytest.raises(StartError, match="ended by itself"):
        await watch_embedded_server(folder)


async def test_a_start_that_waits_for_the_server_can_be_cancelled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.start(folder, {"fsync": "off"}).stop()
    recovering = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def status(_pid: int, _cluster: Path) -> str:
        token.run_sync_soon(recovering.set)
        return "starting"

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_status", status)
        async with trio.open_nursery() as nursery:

            async def start() -> None:
                async with embedded_server(folder):
                    raise AssertionError("it said that it is starting")

            nursery.start_soon(start)
            await recovering.wait()
            nursery.cancel_scope.cancel()
    assert embedded.running_url(folder) is None
    embedded.start(folder, {"fsync": "off"}).stop()


async def test_a_data_directory_that_cannot_be_read_is_not_one_without_a_server(folder: Path) -> None:
    (folder / "file").write_text("")
    for place, text in ((folder / "file", "--data-dir cannot be read: Not a directory"), (folder / "none", "no pushd")):
        with pytest.raises(StartError, match=text):
            async with open_running_database(Config(), place, "test"):
                pass
