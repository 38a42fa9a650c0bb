"""Lock, cursor, deletions and the sweep on a real PostgreSQL."""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import attrs
import psycopg
import pytest
import trio

from pushd.errors import StoreError, StoreUnavailable
from pushd.model import Channel, DeliveryConfig
from pushd.store.database import Database
from pushd.store.dispatch import SWEEP_TOPICS, DispatchStore, Grave, LockSession
from tests.dispatch.seed import SECRET_HASH, SIGNING_KEY, Seed, eventually, recipient_id, target, topic

DAY_S = 86_400


@pytest.fixture
def seed(database_url: str) -> Iterator[Seed]:
    with Seed(database_url) as opened:
        yield opened


@pytest.fixture
def store(database: Database) -> DispatchStore:
    return DispatchStore(database)


async def test_one_session_holds_the_lock_and_its_end_frees_it(store: DispatchStore, seed: Seed) -> None:
    async with store.open_lock_session() as first, store.open_lock_session() as second:
        assert await first.try_lock()
        assert not await second.try_lock()
        ((pid, name),) = seed.lock_holders()
        assert name.startswith("pushd dispatcher ")
        assert name.endswith(f":{os.getpid()}")
        seed.conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with pytest.raises(StoreUnavailable):
            await first.probe()
        await eventually(lambda: not seed.lock_holders())
        assert await second.try_lock()


async def test_lock_session_is_ended_by_the_server_when_it_falls_silent(store: DispatchStore, seed: Seed) -> None:
    async with store.open_lock_session() as session:
        assert await session.try_lock()
        row = await session._connection.fetch_one("SHOW idle_session_timeout")
        assert row == ("5s",)
        await session._connection.execute("SET idle_session_timeout = '50ms'")
        await eventually(lambda: not seed.lock_holders())
        with pytest.raises(StoreUnavailable):
            await session.probe()


async def test_severed_session_fails_at_once_under_a_statement_that_hangs(store: DispatchStore, seed: Seed) -> None:
    async with store.open_lock_session() as session:
        with psycopg.connect(seed.conn.info.dsn) as blocker:
            blocker.execute("LOCK TABLE push_cursor IN ACCESS EXCLUSIVE MODE")
            async with trio.open_nursery() as nursery:

                async def sever() -> None:
                    await trio.sleep(0.05)
                    session.sever()

                nursery.start_soon(sever)
                with trio.fail_after(2), pytest.raises(StoreUnavailable):
                    await session.move_cursor(0, 5)
        session.sever()
        with pytest.raises(StoreUnavailable):
            await session.probe()
        session.sever()


def test_severing_a_connection_that_the_other_side_reset_changes_nothing() -> None:
    """A process that was stopped meanwhile finds both at once on waking: the reset, and that its time is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            server.close()
            raw = SimpleNamespace(closed=False, pgconn=SimpleNamespace(socket=client.fileno()))
            LockSession(cast("Any", SimpleNamespace(raw=raw))).sever()
            with pytest.raises(OSError, match="reset"):
                client.recv(1)


async def test_severing_needs_no_descriptor_when_there_is_none_left(store: DispatchStore, seed: Seed) -> None:
    async with store.open_lock_session() as session:
        free = os.dup(0)
        os.close(free)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            session.sever()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pytest.raises(StoreUnavailable):
            await session.probe()


async def test_t087_cursor_moves_forward_from_what_it_is_only(store: DispatchStore, seed: Seed) -> None:
    async with store.open_lock_session() as session:
        assert await session.read_cursor() == 0
        assert await session.move_cursor(0, 5)
        assert not await session.move_cursor(5, 4)
        assert not await session.move_cursor(5, 5)
        assert not await session.move_cursor(0, 8)
        assert await session.read_cursor() == seed.cursor() == 5


@pytest.mark.parametrize(("first", "second"), [(8, 5), (5, 8)])
async def test_t088_second_of_two_cursor_writers_is_refused(
    first: int, second: int, store: DispatchStore, seed: Seed
) -> None:
    async with store.open_lock_session() as one, store.open_lock_session() as other:
        refused: list[bool] = []
        async with one._connection.transaction():
            assert await one.move_cursor(0, first)
            async with trio.open_nursery() as nursery:

                async def write() -> None:
                    refused.append(not await other.move_cursor(0, second))

                nursery.start_soon(write)
                await eventually(lambda: blocked(seed))
                await one._connection.execute("COMMIT")
                await one._connection.execute("BEGIN")
        assert refused == [True]
        assert seed.cursor() == first


def blocked(seed: Seed) -> int:
    return seed._one(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"config": DeliveryConfig(Channel.FCM, target(1, Channel.HTTP), SIGNING_KEY)},
        {"config": DeliveryConfig(Channel.HTTP, "https://other.example/", SIGNING_KEY)},
        {"config": DeliveryConfig(Channel.HTTP, target(1, Channel.HTTP), b"other" * 4)},
        {"config": DeliveryConfig(Channel.HTTP, target(1, Channel.HTTP), None)},
        {"secret_hash": b"\x08" * 32},
        {"recipient_id": recipient_id(2)},
    ],
)
async def test_t085_dead_recipient_is_deleted_only_if_nothing_changed(
    change: dict[str, object], store: DispatchStore, seed: Seed
) -> None:
    seed.recipients([1], Channel.HTTP)
    seed.subscribe([1], topic(1))
    grave = Grave(recipient_id(1), DeliveryConfig(Channel.HTTP, target(1, Channel.HTTP), SIGNING_KEY), SECRET_HASH)
    asked = attrs.evolve(grave, **change)
    assert await store.delete_dead([asked]) == ([] if change else [grave])
    assert seed.recipient_count() == seed.subscription_count() == (1 if change else 0)


async def test_t086_recipient_made_anew_survives_the_late_answer_to_the_old_one(
    store: DispatchStore, seed: Seed
) -> None:
    seed.recipients([1])
    old = Grave(recipient_id(1), DeliveryConfig(Channel.APNS, target(1, Channel.APNS)), SECRET_HASH)
    seed.conn.execute("UPDATE push_recipient SET secret_hash = %s", (b"\x08" * 32,))
    new = attrs.evolve(old, secret_hash=b"\x08" * 32)
    assert await store.delete_dead([old]) == []
    assert await store.delete_dead([old, new]) == [new]


async def test_many_dead_recipients_go_in_one_statement(store: DispatchStore, seed: Seed) -> None:
    seed.recipients(range(1, 40))
    seed.subscribe(range(1, 40), topic(1))
    graves = [
        Grave(recipient_id(n), DeliveryConfig(Channel.APNS, target(n, Channel.APNS)), SECRET_HASH)
        for n in range(30, 60)
    ]
    assert {grave.recipient_id for grave in await store.delete_dead(graves)} == {recipient_id(n) for n in range(30, 40)}
    assert seed.subscription_count() == 29


async def test_t107_sweep_deletes_who_has_not_renewed_for_longer_than_the_period(
    store: DispatchStore, seed: Seed
) -> None:
    now_ns = seed._one("SELECT (extract(epoch FROM now()) * 1000000000)::bigint")
    seed.recipients([1], renewed_ns=0)
    seed.recipients([2], renewed_ns=now_ns - (DAY_S + 60) * 10**9)
    seed.recipients([3], renewed_ns=now_ns - (DAY_S - 60) * 10**9)
    seed.recipients([4], renewed_ns=now_ns)
    for n in range(1, 5):
        seed.subscribe([n], topic(1))
    assert await store.delete_expired(DAY_S) == 2
    assert await store.delete_expired(DAY_S) == 0
    assert seed.recipient_count() == seed.subscription_count() == 2


async def test_sweep_goes_in_batches_by_what_the_cascade_costs(store: DispatchStore, seed: Seed) -> None:
    seed.recipients(range(1, 1_200), renewed_ns=0)
    assert await store.delete_expired(DAY_S) == 500
    assert await store.delete_expired(DAY_S) == 500
    assert await store.delete_expired(DAY_S) == 199
    seed.recipients([1, 2, 3, 4], renewed_ns=0)
    seed.conn.execute("UPDATE push_recipient SET topic_count = %s", (SWEEP_TOPICS // 2,))
    seed.conn.execute(
        "UPDATE push_recipient SET topic_count = %s WHERE recipient_id = %s", (SWEEP_TOPICS * 5, recipient_id(3))
    )
    assert [await store.delete_expired(DAY_S) for _ in range(4)] == [2, 1, 1, 0]


async def test_recipient_that_renews_while_the_sweep_waits_for_it_stays(store: DispatchStore, seed: Seed) -> None:
    seed.recipients([1, 2], renewed_ns=0)
    deleted: list[int] = []
    with psycopg.connect(seed.conn.info.dsn) as renewing:
        renewing.execute(
            "UPDATE push_recipient SET renewed_ns = 4000000000000000000 WHERE recipient_id = %s", (recipient_id(1),)
        )
        async with trio.open_nursery() as nursery:

            async def sweep() -> None:
                deleted.append(await store.delete_expired(DAY_S))

            nursery.start_soon(sweep)
            await eventually(lambda: blocked(seed))
            renewing.commit()
    assert deleted == [1]
    assert seed.recipient_count() == 1


@pytest.mark.parametrize(
    ("rows", "boundary", "expected"),
    [
        ([], 0, False),
        ([(3, False)], 0, False),
        ([(2, True)], 0, True),
        ([(2, True)], 1, True),
        ([(2, True)], 2, False),
        ([(2, True)], 3, False),
        ([(2, True), (9, False)], 2, False),
    ],
)
async def test_t116_maintenance_is_needed_for_eligible_rows_above_the_boundary(
    rows: list[tuple[int, bool]], boundary: int, expected: bool, store: DispatchStore, seed: Seed
) -> None:
    for number, eligible in rows:
        seed.envelopes([(number, topic(1))], eligible=eligible)
    seed.settle(boundary)
    assert await store.needs_maintenance() is expected


async def test_nothing_private_is_shown(store: DispatchStore) -> None:
    grave = Grave(recipient_id(1), DeliveryConfig(Channel.HTTP, "https://private.example", b"key" * 6), b"hash" * 8)
    assert "private" not in repr(grave)
    assert "hash" not in repr(grave).replace("secret_hash", "")
    assert issubclass(StoreUnavailable, StoreError)


async def test_request_to_step_down_arrives_with_the_next_answer_while_listening(
    store: DispatchStore, seed: Seed
) -> None:
    async with store.open_lock_session() as session:
        assert await session.try_lock()
        seed.conn.execute("NOTIFY pushd_step_down")
        await session.probe()
        assert not session.is_asked_to_step_down, "that was before it listened"
        await session.listen()
        await session.probe()
        assert not session.is_asked_to_step_down
        seed.conn.execute("NOTIFY pushd_step_down")
        await eventually_answered(session)
        assert session.is_asked_to_step_down


async def eventually_answered(session: LockSession) -> None:
    """Prove until the server has passed the notification on, which it does soon after its sender's commit."""
    with trio.fail_after(30):
        while not session.is_asked_to_step_down:
            await session.probe()
