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
import trio.testing
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pushd.config import Config
from pushd.errors import StartError
from pushd.store import embedded
from pushd.store.database import (
    LOST,
    NO_SESSION,
    READ_ONLY,
    Database,
    DatabaseSettings,
    Refusal,
    open_database,
)
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


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"dbname": "nowhere"}, NO_SESSION),
        ({"user": "nobody"}, NO_SESSION),
        ({"dbname": "read_only"}, READ_ONLY),
        ({"host": "127.0.0.1", "port": "1"}, NO_SESSION),
        ({"host": "nowhere.invalid"}, NO_SESSION),
    ],
    ids=["no database", "no role", "read-only", "closed port", "no host"],
)
async def test_database_that_cannot_be_used_is_refused_with_what_is_wrong(
    postgres: str, metrics: Metrics, change: dict[str, str], refusal: Refusal
) -> None:
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute("CREATE DATABASE read_only")
        try:
            conn.execute("ALTER DATABASE read_only SET default_transaction_read_only = on")
            async with open_database(DatabaseSettings(make_conninfo(postgres, **change)), metrics) as database:
                with pytest.raises(StartError) as caught:
                    await prepare_database(database)
        finally:
            conn.execute("DROP DATABASE read_only WITH (FORCE)")
    assert str(caught.value) == f"database.url: the database {refusal.what}: {refusal.mend}"


async def test_replica_that_cannot_be_used_is_refused_with_what_is_wrong(database_url: str, metrics: Metrics) -> None:
    settings = DatabaseSettings(database_url, replica_url=make_conninfo(database_url, user="nobody"))
    async with open_database(settings, metrics) as database:
        with pytest.raises(StartError) as caught:
            await prepare_database(database)
    assert str(caught.value) == f"database.replica_url: the replica {NO_SESSION.what}: {NO_SESSION.mend}"


async def test_connection_that_broke_is_not_taken_for_a_refused_one(database: Database) -> None:
    assert await database.diagnose() is LOST


async def test_diagnosis_of_a_silent_server_ends(
    autojump_clock: trio.testing.MockClock, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(conninfo: str) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr("pushd.store.database.open_session", hang)
    async with open_database(DatabaseSettings("postgresql://127.0.0.1/none"), metrics) as database:
        assert await database.diagnose() is NO_SESSION


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
