"""What must be true of the databases before anything is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from pushd.config import Config, check_clock
from pushd.errors import StartError, StoreError
from pushd.store import embedded
from pushd.store.database import Connection, Database, DatabaseSettings, open_database
from pushd.store.migrations import apply_migrations, check_schema
from pushd.telemetry import Event, Metrics, get_logger

MINIMUM_VERSION = 16
ENCODING = "UTF8"  # a token or URL is any text, and its characters are counted
EMBEDDED_POLL_S = 1.0
REPLICA_POLL_S = 0.1
REPLICA_REPORT_S = 10.0

log = get_logger()


@asynccontextmanager
async def embedded_server(
    data_dir: Path, max_connections: int = 20, max_publish_topics: int = 1_000
) -> AsyncIterator[str]:
    """Run the embedded PostgreSQL for the length of the block; yields its URL.

    Args:
        data_dir: see `embedded.start`.
        max_connections: size of the pool that will use it.
        max_publish_topics: locks a publish may take.

    Raises:
        StartError: see `embedded.start`.
    """
    settings = embedded.settings_for(max_connections, max_publish_topics)
    # A stop that is asked for meanwhile does not wait until a recovery is over.
    start = partial(embedded.start, data_dir, settings, trio.from_thread.check_cancelled)
    server = await trio.to_thread.run_sync(start)
    if server.replaced:
        log.warning(Event.DATABASE_REPLACED)
    try:
        log.info(Event.DATABASE_STARTED, pid=server.pid)
        yield server.url
    finally:
        # A server cut off half-way would have to recover at the next start; `stop` is bounded by itself.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.stop)


async def watch_embedded_server(data_dir: Path) -> None:
    """Look after the embedded PostgreSQL on `data_dir`; returns only by raising.

    PostgreSQL recovers from a crash of one of its processes by itself. When it ends all the same, because its disk is
    full or its data damaged, nothing here can help, and whoever supervises this process should know.

    Raises:
        StartError: it ended.
    """
    while _may_run(data_dir):  # noqa: ASYNC110 (another process ends; nobody sets an event)
        await trio.sleep(EMBEDDED_POLL_S)
    raise StartError("the embedded PostgreSQL ended by itself: postgres.log in the data directory says why")


def _may_run(data_dir: Path) -> bool:
    try:
        return embedded.running_url(data_dir) is not None
    except OSError:  # for want of a file descriptor, say, which is no reason to end a server
        return True


@asynccontextmanager
async def open_prepared_database(config: Config, data_dir: Path, metrics: Metrics) -> AsyncIterator[Database]:
    """Pools on the configured or the embedded database, its schema up to date.

    Raises:
        StartError: the database cannot be started, reached or used.
    """
    async with AsyncExitStack() as stack:
        if config.database.url is not None:
            url = config.database.url.reveal()
        else:
            url = await stack.enter_async_context(
                embedded_server(data_dir, config.database.max_connections, config.limits.max_publish_topics)
            )
        replica = config.database.replica_url
        settings = DatabaseSettings(
            url=url,
            replica_url=replica.reveal() if replica is not None else None,
            max_connections=config.database.max_connections,
            statement_timeout_ms=config.database.max_statement_timeout_ms,
        )
        database = await stack.enter_async_context(open_database(settings, metrics))
        await prepare_database(database)
        yield database


@asynccontextmanager
async def open_running_database(config: Config, data_dir: Path, purpose: str) -> AsyncIterator[Connection]:
    """A session on the primary of an installation that was started before, for an operator's command.

    Raises:
        StartError: there is no such database, or it has no schema of this program's version.
    """
    try:
        url = config.database.url.reveal() if config.database.url is not None else embedded.running_url(data_dir)
    except OSError as exc:
        raise StartError(f"--data-dir cannot be read: {exc.strerror}") from exc
    if url is None:
        raise StartError(
            "no database to ask: no pushd runs on this --data-dir, and the configuration names no database.url"
        )
    settings = DatabaseSettings(
        url=url, max_connections=1, statement_timeout_ms=config.database.max_statement_timeout_ms
    )
    async with open_database(settings, Metrics()) as database:
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(database.dedicated(purpose))
                await check_schema(connection)
            except StoreError as exc:
                raise StartError(await _explain(exc, database)) from exc
            yield connection


async def check_database_clock(database: Database, config: Config) -> None:
    """Every instant pushd computes from the database's clock must fit the 64-bit column it goes to.

    Raises:
        ConfigError: a period is too long; the text names its key.
    """
    async with database.primary() as connection:
        row = await connection.fetch_one("SELECT (extract(epoch FROM clock_timestamp()) * 1e9)::bigint")
    assert row is not None
    check_clock(config, row[0])


async def prepare_database(database: Database) -> None:
    """Check the version, bring the schema up to date, and wait for the replica to have it too.

    Raises:
        StartError: unreachable, too old, not in UTF-8, or a schema that does not fit this program.
    """
    try:
        async with database.dedicated("start") as primary:
            await _check_server(primary)
            for name in await apply_migrations(primary):
                log.info(Event.MIGRATED, migration=name)
            # Not the insert position: after a switch of the log that lies behind a page header, which no replica sees
            # before something more is written. Migrations are flushed when they commit.
            position = await primary.fetch_one("SELECT pg_current_wal_flush_lsn()::text")
    except StoreError as exc:
        raise StartError(await _explain(exc, database)) from exc
    if database.has_replica:
        assert position is not None
        try:
            async with database.dedicated("start", read=True) as replica:
                await _wait_replayed(replica, position[0])
        except StoreError as exc:
            raise StartError(await _explain(exc, database, read=True)) from exc


async def _explain(error: StoreError, database: Database, *, read: bool = False) -> str:
    what = "database.replica_url: the replica" if read else "database.url: the database"
    if error.kind == "connection":
        refusal = await database.diagnose(read=read)
        return f"{what} {refusal.what}: {refusal.mend}"
    return f"{what} can be reached but refuses the work (rights, or a time-out)"


async def _check_server(primary: Connection) -> None:
    row = await primary.fetch_one(
        "SELECT current_setting('server_version_num')::integer / 10000, current_setting('server_encoding')"
    )
    assert row is not None
    version, encoding = row
    if version < MINIMUM_VERSION:
        raise StartError(f"database.url: PostgreSQL {version} is too old, {MINIMUM_VERSION} or newer is needed")
    if encoding != ENCODING:
        raise StartError(f"database.url: the database's encoding is {encoding}, it has to be {ENCODING}")


async def _wait_replayed(replica: Connection, position: str) -> None:
    """Return once the replica shows everything up to `position`; says so in the log while it waits."""
    reported = trio.current_time()
    while True:
        # A server that is not in recovery replays nothing; the dispatcher judges every page by the boundary its own
        # snapshot shows, so a wrong server here delays pushes and never skips one.
        row = await replica.fetch_one(
            "SELECT NOT pg_is_in_recovery() OR pg_last_wal_replay_lsn() >= %s::pg_lsn", (position,)
        )
        if row == (True,):
            return
        if trio.current_time() - reported >= REPLICA_REPORT_S:
            reported = trio.current_time()
            log.warning(Event.REPLICA_WAIT)
        await trio.sleep(REPLICA_POLL_S)
