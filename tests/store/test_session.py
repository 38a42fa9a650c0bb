"""The driver's session under Trio: every way a statement can wait, and every way its wait can be cut."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from pushd.errors import StoreTimeout, StoreUnavailable
from pushd.store import session
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.telemetry import Metrics


async def test_statement_larger_than_every_buffer_goes_out_and_comes_back(database: Database) -> None:
    value = os.urandom(1 << 20) * 24
    async with database.primary() as connection:
        with trio.fail_after(60):
            assert await connection.fetch_one("SELECT %b::bytea", (value,), binary=True) == (value,)


async def test_other_statements_run_while_one_waits(database: Database) -> None:
    async with database.primary() as holder, database.primary() as waiter, trio.open_nursery() as nursery:
        await holder.execute("SELECT pg_advisory_lock(9, 9)")
        nursery.start_soon(waiter.execute, "SELECT pg_advisory_lock(9, 9)")
        await trio.testing.wait_all_tasks_blocked()
        assert await holder.fetch_one("SELECT 1") == (1,)
        await holder.execute("SELECT pg_advisory_unlock(9, 9)")


@pytest.mark.parametrize("cut_after_s", [0, 0.001, 0.05], ids=["unsent", "just sent", "running"])
async def test_cancelled_statement_leaves_a_session_that_can_be_used(database: Database, cut_after_s: float) -> None:
    async with database.dedicated("victim") as connection:
        with trio.move_on_after(cut_after_s) as scope:
            await connection.execute("SELECT pg_sleep(60)")
        assert scope.cancelled_caught
        assert not connection.is_broken
        assert await connection.fetch_one("SELECT 7") == (7,)


@pytest.mark.parametrize("resumes", [True, False], ids=["server reads on", "server stopped"])
async def test_statement_cancelled_while_it_goes_out_is_never_left_running(
    database: Database, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """The sockets are full and the server reads no more, until it does again or the session is given up."""
    monkeypatch.setattr(session, "CANCEL_S", 30 if resumes else 0.5)
    async with database.dedicated("victim") as connection:
        row = await connection.fetch_one("SELECT pg_backend_pid()")
        assert row is not None
        os.kill(row[0], signal.SIGSTOP)

        async def resume() -> None:
            await trio.sleep(0.3)  # after the cut
            os.kill(row[0], signal.SIGCONT)

        try:
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(0.1) as scope:
                    if resumes:
                        nursery.start_soon(resume)
                    await connection.fetch_one("SELECT length(%b::bytea), pg_sleep(60)", (bytes(8 << 20),))
        finally:
            os.kill(row[0], signal.SIGCONT)
        assert scope.cancelled_caught
        assert connection.is_broken is not resumes
        if resumes:
            assert await connection.fetch_one("SELECT 7") == (7,)


async def test_session_is_closed_when_the_server_does_not_end_a_cancelled_statement(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver hears nothing more: as behind a network gone deaf, after the statement went out."""
    monkeypatch.setattr(session, "CANCEL_S", 0.2)
    async with database.dedicated("victim") as connection:
        deaf = trio.Event()

        async def never_ends(gen: Any, fd: int, first: object = None) -> None:
            gen.send(first)
            deaf.set()
            await trio.sleep_forever()

        monkeypatch.setattr(session, "_drive", never_ends)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.execute, "SELECT pg_sleep(60)")
                await deaf.wait()
                nursery.cancel_scope.cancel()
        monkeypatch.undo()
        assert connection.is_broken
        with pytest.raises(StoreUnavailable):
            await connection.execute("SELECT 1")


async def test_statement_whose_server_neither_answers_nor_dies_is_given_up_with_its_session(
    database_url: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server process that is stopped: its kernel goes on acknowledging what it is sent."""
    monkeypatch.setattr("pushd.store.database.ANSWER_S", 0.5)
    monkeypatch.setattr(session, "CANCEL_S", 0.2)
    async with open_database(DatabaseSettings(database_url, statement_timeout_ms=500), metrics) as database:
        for lend in (partial(database.dedicated, "victim"), database.primary, database.read):
            async with lend() as connection:
                row = await connection.fetch_one("SELECT pg_backend_pid()")
                assert row is not None
                os.kill(row[0], signal.SIGSTOP)
                try:
                    with trio.fail_after(20), pytest.raises(StoreUnavailable) as caught:
                        await connection.fetch_one("SELECT 1")
                finally:
                    os.kill(row[0], signal.SIGCONT)
                assert caught.value.kind == "connection"
                assert connection.is_broken
            async with lend() as another:
                assert await another.fetch_one("SELECT 7") == (7,)


async def test_statement_that_the_server_ends_is_not_given_up_before(database_url: str, metrics: Metrics) -> None:
    settings = DatabaseSettings(database_url, statement_timeout_ms=50)
    async with open_database(settings, metrics) as database, database.dedicated("patient") as connection:
        with pytest.raises(StoreTimeout):
            await connection.execute("SELECT pg_sleep(60)")
        assert await connection.fetch_one("SELECT 7") == (7,)


async def test_session_cut_by_the_server_raises_and_stays_broken(database: Database) -> None:
    async with database.dedicated("victim") as victim, database.primary() as other:
        row = await victim.fetch_one("SELECT pg_backend_pid()")
        await other.execute("SELECT pg_terminate_backend(%s, 5000)", row)
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                await victim.execute("SELECT 1")
            assert caught.value.kind == "connection"
        assert victim.is_broken
