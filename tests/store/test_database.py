"""Sessions, transactions and cancellation on a real PostgreSQL."""

from __future__ import annotations

import psycopg
import pytest
import trio

from pushd.errors import StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.telemetry import Metrics


async def test_rows_come_back_in_both_formats(database: Database) -> None:
    async with database.primary() as connection:
        for binary in (False, True):
            rows = await connection.fetch("SELECT %(n)s::bigint, '\\x01ff'::bytea", {"n": 2**62}, binary=binary)
            assert rows == [(2**62, b"\x01\xff")]
        assert await connection.fetch_one("SELECT 1 WHERE false") is None
        assert await connection.execute("UPDATE push_cursor SET sequence_id = 3") == 1


async def test_large_answer_is_whole_and_lets_others_run_meanwhile(database: Database) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with database.primary() as connection, trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        ((text,),) = await connection.fetch("SELECT repeat('abcdefgh', 1000000)")
        after_large = turns
        rows = await connection.fetch("SELECT n, repeat('x', 300) FROM generate_series(1, 20000) AS n", binary=True)
        nursery.cancel_scope.cancel()
    assert text == "abcdefgh" * 1_000_000
    assert [n for n, _ in rows] == list(range(1, 20_001))
    assert after_large > 4, "8 MB are about 500 reads"
    assert turns > after_large + 3


async def test_failed_block_rolls_back(database: Database) -> None:
    async with database.primary() as connection:
        with pytest.raises(ValueError, match="stop"):
            async with connection.transaction():
                await connection.execute("UPDATE push_cursor SET sequence_id = 9")
                raise ValueError("stop")
        assert not connection.in_transaction
        assert await connection.fetch_one("SELECT sequence_id FROM push_cursor") == (0,)


async def test_cancelled_statement_is_cancelled_on_the_server_and_leaves_a_clean_session(database: Database) -> None:
    async with database.dedicated("victim") as connection:
        with trio.move_on_after(0.2) as scope:
            async with connection.transaction():
                await connection.execute("UPDATE push_cursor SET sequence_id = 9")
                await connection.execute("SELECT pg_sleep(60)")
        assert scope.cancelled_caught
        assert not connection.in_transaction
        assert await connection.fetch_one("SELECT sequence_id FROM push_cursor") == (0,)
        async with database.primary() as other:
            busy = await other.fetch_one(
                "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%pg_sleep(60)%'"
                " AND pid <> pg_backend_pid() AND datname = current_database()"
            )
            assert busy == (0,)


async def test_transaction_left_open_is_rolled_back_and_counted(database: Database, metrics: Metrics) -> None:
    async with database.primary() as connection:
        await connection.execute("BEGIN")
        await connection.execute("UPDATE push_cursor SET sequence_id = 9")
    async with database.primary() as connection:
        assert await connection.fetch_one("SELECT sequence_id FROM push_cursor") == (0,)
    assert metrics.registry.get_sample_value("xmtp_db_released_open_transactions_total") == 1


@pytest.mark.parametrize(
    ("statement", "error", "kind"),
    [
        ("SET statement_timeout = 50; SELECT pg_sleep(5)", StoreTimeout, "timeout"),
        ("INSERT INTO push_cursor (singleton, sequence_id) VALUES (true, 0)", StoreInvariant, "invariant"),
        ("UPDATE push_cursor SET sequence_id = -1", StoreInvariant, "invariant"),
        ("SELECT 2147483647 + 1::integer", StoreInvariant, "invariant"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", StoreUnavailable, "connection"),
        ("SELECT nonsense", StoreUnavailable, "other"),
    ],
)
async def test_driver_errors_become_store_errors(
    database: Database, statement: str, error: type[Exception], kind: str
) -> None:
    async with database.dedicated("victim") as connection:
        with pytest.raises(error) as caught:
            await connection.fetch(statement)
    assert caught.value.kind == kind  # type: ignore[attr-defined]
    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert "nonsense" not in str(caught.value)


async def test_unreachable_server_is_unavailable(metrics: Metrics) -> None:
    settings = DatabaseSettings("postgresql://127.0.0.1:1/none", acquire_s=0.3)
    with trio.fail_after(20):
        async with open_database(settings, metrics) as database:
            with pytest.raises(StoreUnavailable):
                async with database.primary():
                    pass
            with pytest.raises(StoreUnavailable):
                async with database.dedicated("victim"):
                    pass


async def test_idle_sessions_that_the_server_ended_cost_no_call(database: Database) -> None:
    """What a restart of PostgreSQL leaves in the pool."""
    async with database.dedicated("restart") as restart:
        async with database.primary() as one, database.primary() as other:
            rows = [await each.fetch_one("SELECT pg_backend_pid()") for each in (one, other)]
        for row in rows:
            assert await restart.fetch_one("SELECT pg_terminate_backend(%s, 5000)", row) == (True,)
        async with database.primary() as one, database.primary() as other:
            for each in (one, other):
                assert await each.fetch_one("SELECT 1") == (1,)


async def test_dead_peer_ends_a_session_that_waits_and_one_that_sent(database: Database) -> None:
    """Keepalives find it only while nothing is unacknowledged; a statement on its way has a limit of its own."""
    async with database.primary() as connection:
        parameters = connection.raw.info.get_parameters()
    assert (parameters["keepalives_idle"], parameters["tcp_user_timeout"]) == ("10", "25000")


async def test_dedicated_session_is_named_for_operators(database: Database) -> None:
    async with database.dedicated("dispatcher") as connection:
        row = await connection.fetch_one("SELECT current_setting('application_name')")
    assert row is not None
    assert row[0].startswith("pushd dispatcher ")
    assert row[0].rpartition(":")[2].isdigit()


async def test_repr_shows_no_url() -> None:
    settings = DatabaseSettings("postgresql://u:hunter2@h/db", replica_url="postgresql://u:hunter3@h/db")
    assert "hunter" not in repr(settings)
