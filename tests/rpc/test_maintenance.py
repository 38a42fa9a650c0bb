"""PUSH-104: streams, the boundary task and a dispatcher that asks for maintenance every poll, side by side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest
import trio

from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.stop import StopSignal
from pushd.store.database import Database
from pushd.store.dispatch import DispatchStore
from pushd.telemetry import Metrics
from tests.support.streams import Publishing, World, publishing, streaming, topic, until, update

A, B = topic(1), topic(2)
POLL_S = 0.1


@pytest.fixture
def publisher(database_url: str) -> Iterator[Publishing]:
    with publishing(database_url) as opened:
        yield opened


@pytest.fixture
def holder(database_url: str) -> Iterator[Publishing]:
    """Another publisher, whose transaction holds the barrier."""
    with publishing(database_url) as opened:
        yield opened


async def ask_twice_a_poll(world: World, _: Database) -> None:
    while True:
        world.boundary.request()
        await trio.sleep(POLL_S / 2)


async def dispatch(world: World, database: Database) -> None:
    """The dispatcher itself, with nobody to send to."""
    await run_dispatcher(
        DispatchStore(database),
        {},
        DispatchSettings(poll_interval_s=POLL_S),
        metrics=world.metrics,
        boundary=world.boundary,
        stop=StopSignal(),
    )


def stored_boundary(conn: psycopg.Connection[Any]) -> object:
    row = conn.execute("SELECT closed_sequence_id FROM allocation_boundary").fetchone()
    conn.commit()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("ask", [ask_twice_a_poll, dispatch])
async def test_T118_streams_deliver_above_a_boundary_that_cannot_move(
    ask: Callable[[World, Database], Awaitable[None]],
    database: Database,
    holder: Publishing,
    publisher: Publishing,
    metrics: Metrics,
    nursery: trio.Nursery,
) -> None:
    attempts = metrics.boundary_advances
    async with streaming(database, metrics, poll_s=POLL_S, barrier_wait_ms=20) as world:
        [gap] = holder.store([B])
        nursery.start_soon(ask, world, database)
        started = trio.current_time()
        before = sum(attempts.labels(result)._value.get() for result in ("ok", "lock_timeout"))
        async with world.follow(update(1, {A: 0, B: 0})) as following:
            with trio.fail_after(20):
                while attempts.labels("lock_timeout")._value.get() < 3:
                    await following.read_ids(publisher.publish([A]))
            assert stored_boundary(publisher.conn) == 0
            made = sum(attempts.labels(result)._value.get() for result in ("ok", "lock_timeout")) - before
            assert made <= (trio.current_time() - started) / POLL_S + 1, "one attempt a poll interval, whoever asks"
            assert attempts.labels("error")._value.get() == 0
            holder.conn.commit()
            await following.read_ids([gap])
            assert following.ids_of(B) == [gap]
            assert following.ids_of(A) == sorted(following.ids_of(A))
            with trio.fail_after(20):
                await world.boundary.wait_above(gap)


async def test_T119_a_request_survives_a_forced_recovery_of_the_tailer(
    database: Database, database_url: str, holder: Publishing, publisher: Publishing, metrics: Metrics
) -> None:
    """Nobody but the tailer asks, and it asks only while it sees a gap."""
    async with streaming(database, metrics, poll_s=0.02) as world:
        request = world.boundary.request  # taken before anything happens
        [gap] = holder.store([B])
        [above] = publisher.publish([A])
        lock_timeouts = metrics.boundary_advances.labels("lock_timeout")
        with trio.fail_after(20):
            await until(lock_timeouts._value.get)
            with psycopg.connect(database_url, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'pushd %' AND datname = current_database()"
                )
            await until(lambda: world.tailer.restarts)
            holder.conn.rollback()
            assert await world.boundary.wait_above(gap) == above
            [later] = publisher.publish([A])
            request()
            assert await world.boundary.wait_above(above) == later
            await until(metrics.tailer_ready._value.get)
            async with world.follow(update(1, {A: 0})) as following:
                await following.read_ids([above, later, *publisher.publish([A])])


async def test_the_dispatcher_has_the_boundary_advanced_while_streams_deliver(
    database: Database, publisher: Publishing, metrics: Metrics, nursery: trio.Nursery
) -> None:
    """Without a gap the tailer asks for nothing."""
    async with streaming(database, metrics, poll_s=POLL_S) as world:
        nursery.start_soon(dispatch, world, database)
        async with world.follow(update(1, {A: 0})) as following:
            for _ in range(3):
                [newest] = publisher.publish([A])
                await following.read_ids([newest])
                with trio.fail_after(20):
                    assert await world.boundary.wait_above(newest - 1) == newest
            assert metrics.tailer_gap_ranges._value.get() == 0


async def test_without_gaps_the_tailer_asks_for_nothing(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, {A: 0, B: 0})) as following:
            for _ in range(5):
                await following.read_ids(publisher.publish([A, B]))
                await trio.sleep(0.02)
    assert metrics.boundary_advances.labels("ok")._value.get() == 1, "the one at the start"


async def test_an_aborted_publisher_leaves_a_gap_that_the_boundary_settles(
    database: Database, holder: Publishing, publisher: Publishing, metrics: Metrics
) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, {A: 0, B: 0})) as following:
            await following.read_applied(1)
            holder.store([B, B])
            ids = publisher.publish([A])
            await following.read_ids(ids)
            assert metrics.tailer_gap_ranges._value.get() == 1
            holder.conn.rollback()
            await until(lambda: metrics.tailer_gap_ranges._value.get() == 0)
            assert following.ids == ids
            assert stored_boundary(publisher.conn) == ids[-1]
