"""Recipients and subscriptions on a real PostgreSQL: what is stored, what is kept, what a race leaves behind."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import trio

from pushd.core.checks import Claim, Refusal
from pushd.model import Channel, DeliveryConfig, KeyWindow, RecipientState, SubscriptionChange
from pushd.store import recipients
from pushd.store.database import Connection, Database, DatabaseSettings, open_database
from pushd.store.recipients import SubscriptionsUpdated
from pushd.telemetry import Metrics
from tests.support.contention import wait_until_blocked

ID = b"\x11" * 32


def claim(secret: bytes = b"\x22" * 32, recipient_id: bytes = ID) -> Claim:
    return Claim(recipient_id, hashlib.sha256(secret).digest())


OWNER = claim()
STRANGER = claim(b"\x99" * 32)
FCM = DeliveryConfig(Channel.FCM, "token")
HOOK = DeliveryConfig(Channel.HTTP, "https://hooks.example.com/", b"k" * 16)


def topic(number: int) -> bytes:
    return b"\x00" + number.to_bytes(16, "big")


def add(number: int, *keys: bytes, base: int = 0, commits: bool = False) -> SubscriptionChange:
    return SubscriptionChange(topic(number), KeyWindow(base, keys) if keys else None, commits)


def key(number: int) -> bytes:
    return bytes([number]) * 42


async def recipient_row(connection: Connection) -> tuple[Any, ...] | None:
    return await connection.fetch_one(
        "SELECT secret_hash, channel, delivery, signing_key, topic_count, renewed_ns FROM push_recipient", binary=True
    )


async def subscription_rows(connection: Connection) -> list[tuple[Any, ...]]:
    return await connection.fetch(
        "SELECT topic, since_sequence_id, hmac_epoch_base, hmac_key_0, hmac_key_1, hmac_key_2, include_commits "
        "FROM push_subscription ORDER BY topic",
        binary=True,
    )


async def set_boundary(connection: Connection, sequence_id: int) -> None:
    await connection.execute("UPDATE allocation_boundary SET closed_sequence_id = %s", (sequence_id,))


async def update(
    connection: Connection, adds: list[SubscriptionChange], removes: list[int] | None = None, limit: int = 100
) -> SubscriptionsUpdated | Refusal:
    return await recipients.update_subscriptions(
        connection, OWNER, adds, [topic(number) for number in removes or []], max_topics=limit
    )


async def test_new_recipient_is_stored_with_the_database_clock(database: Database) -> None:
    async with database.primary() as connection:
        before = (await connection.fetch("SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint"))[0][0]
        state = await recipients.save_recipient(connection, OWNER, FCM)
        after = (await connection.fetch("SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint"))[0][0]
        assert isinstance(state, RecipientState)
        assert (state.topic_count, state.channel) == (0, Channel.FCM)
        assert before <= state.renewed_ns <= after
        assert await recipient_row(connection) == (OWNER.secret_hash, 2, "token", None, 0, state.renewed_ns)
        assert await recipients.find_secret_hash(connection, ID) == OWNER.secret_hash
        assert await recipients.find_secret_hash(connection, b"\x12" * 32) is None


async def test_second_save_replaces_the_delivery_and_keeps_subscriptions(database: Database) -> None:
    async with database.primary() as connection:
        first = await recipients.save_recipient(connection, OWNER, HOOK)
        await set_boundary(connection, 5)
        await update(connection, [add(1, key(1), key(2), key(3), base=7, commits=True)])
        before = await subscription_rows(connection)
        await set_boundary(connection, 9)
        second = await recipients.save_recipient(connection, OWNER, FCM)
        assert isinstance(first, RecipientState)
        assert isinstance(second, RecipientState)
        assert (second.topic_count, second.channel) == (1, Channel.FCM)
        assert second.renewed_ns > first.renewed_ns
        assert await recipient_row(connection) == (OWNER.secret_hash, 2, "token", None, 1, second.renewed_ns)
        assert await subscription_rows(connection) == before


async def test_another_secret_saves_deletes_and_updates_nothing(database: Database) -> None:
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, HOOK)
        await update(connection, [add(1)])
        before = await recipient_row(connection), await subscription_rows(connection)
        assert await recipients.save_recipient(connection, STRANGER, FCM) is Refusal.WRONG_SECRET
        assert await recipients.delete_recipient(connection, STRANGER) is Refusal.NOT_REGISTERED
        refused = await recipients.update_subscriptions(connection, STRANGER, [add(2)], [topic(1)], max_topics=9)
        assert refused is Refusal.WRONG_SECRET
        assert (await recipient_row(connection), await subscription_rows(connection)) == before


async def test_delete_takes_the_subscriptions_along_and_succeeds_once(database: Database) -> None:
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, FCM)
        await update(connection, [add(1), add(2)])
        assert await recipients.delete_recipient(connection, OWNER) == 2
        assert await recipient_row(connection) is None
        assert await subscription_rows(connection) == []
        assert await recipients.delete_recipient(connection, OWNER) is Refusal.NOT_REGISTERED
        assert await update(connection, [add(1)]) is Refusal.NOT_REGISTERED


async def test_new_topic_starts_at_the_closed_boundary_and_fills_key_slots_in_order(database: Database) -> None:
    """T020"""
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, FCM)
        await set_boundary(connection, 41)
        done = await update(
            connection,
            [
                add(1, base=7, commits=True),
                add(2, key(1), base=7, commits=True),
                add(3, key(1), key(2), key(3), base=7, commits=True),
            ],
        )
        assert isinstance(done, SubscriptionsUpdated)
        assert (done.state.topic_count, done.added, done.removed) == (3, 3, 0)
        assert await subscription_rows(connection) == [
            (topic(1), 41, None, None, None, None, True),
            (topic(2), 41, 7, key(1), None, None, True),
            (topic(3), 41, 7, key(1), key(2), key(3), True),
        ]


async def test_replaced_topic_keeps_its_start_and_takes_everything_else(database: Database) -> None:
    """T021 and T022"""
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, FCM)
        await set_boundary(connection, 41)
        await update(
            connection,
            [add(1), add(2, key(1), base=7, commits=True), add(3, key(1), key(2), key(3), base=7, commits=True)],
        )
        await set_boundary(connection, 50)
        done = await update(connection, [add(2, key(4), key(5), key(6), base=20), add(4)], [1, 99])
        assert isinstance(done, SubscriptionsUpdated)
        assert (done.state.topic_count, done.added, done.removed) == (3, 1, 1)
        assert await subscription_rows(connection) == [
            (topic(2), 41, 20, key(4), key(5), key(6), False),
            (topic(3), 41, 7, key(1), key(2), key(3), True),
            (topic(4), 50, None, None, None, None, False),
        ]
        done = await update(
            connection, [add(2), add(3, key(7), base=8), add(4, key(7), key(8), key(9), base=8, commits=True)]
        )
        assert isinstance(done, SubscriptionsUpdated)
        assert (done.state.topic_count, done.added, done.removed) == (3, 0, 0)
        assert await subscription_rows(connection) == [
            (topic(2), 41, None, None, None, None, False),
            (topic(3), 41, 8, key(7), None, None, False),
            (topic(4), 50, 8, key(7), key(8), key(9), True),
        ]


async def test_removed_and_added_again_starts_anew(database: Database) -> None:
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, FCM)
        await update(connection, [add(1)])
        await update(connection, [], [1])
        await set_boundary(connection, 8)
        await update(connection, [add(1)])
        assert [row[1] for row in await subscription_rows(connection)] == [8]


@pytest.mark.parametrize(
    ("stored", "limit", "adds", "removes", "count"),
    [
        pytest.param([1, 2], 2, [3, 4], [1], None, id="T023 the remove is undone too"),
        pytest.param([1], 1, [2], [1], 1, id="T025 swap at the limit"),
        pytest.param([1, 2], 2, [1, 2], [], 2, id="refresh at the limit"),
        pytest.param([1, 2], 2, [3], [], None, id="one above"),
        pytest.param([], 2, [1, 2], [], 2, id="exactly the limit"),
        pytest.param([], 2, [1, 2, 3], [], None, id="far above at once"),
        pytest.param([1, 2, 3, 4], 2, [5], [1, 2], 3, id="limit lowered below the stored count, shrinking"),
        pytest.param([1, 2, 3, 4], 2, [1], [], 4, id="limit lowered, key refresh"),
        pytest.param([1, 2, 3, 4], 2, [5], [4], 4, id="limit lowered, same count"),
        pytest.param([1, 2, 3, 4], 2, [5], [], None, id="limit lowered, growing"),
        pytest.param([1, 2, 3, 4], 2, [5], [9], None, id="limit lowered, the remove is of an absent topic"),
        pytest.param([1, 2, 3, 4], 2, [], [1], 3, id="limit lowered, remove alone"),
        pytest.param([1, 2, 3, 4], 2, [], [], 4, id="limit lowered, renewal alone"),
    ],
)
async def test_topic_limit(
    database: Database, stored: list[int], limit: int, adds: list[int], removes: list[int], count: int | None
) -> None:
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, FCM)
        await update(connection, [add(number) for number in stored])
        before = await recipient_row(connection), await subscription_rows(connection)
        done = await update(connection, [add(number, key(1)) for number in adds], removes, limit)
        if count is None:
            assert done is Refusal.TOPIC_LIMIT
            assert (await recipient_row(connection), await subscription_rows(connection)) == before
        else:
            assert isinstance(done, SubscriptionsUpdated)
            assert done.state.topic_count == count == len(await subscription_rows(connection))
            assert done.state.renewed_ns > before[0][-1]  # type: ignore[index]


async def test_thousand_topics_are_stored_and_renewed_in_one_call_each(database: Database) -> None:
    """T006 and T007"""
    async with database.primary() as connection:
        await recipients.save_recipient(connection, OWNER, FCM)
        for base, added in ((10, 1000), (11, 0)):
            adds = [add(number, key(1), key(2), key(3), base=base) for number in range(1000)]
            done = await update(connection, adds, limit=1000)
            assert isinstance(done, SubscriptionsUpdated)
            assert (done.state.topic_count, done.added) == (1000, added)
            rows = await subscription_rows(connection)
            assert len(rows) == 1000
            assert {row[2] for row in rows} == {base}


async def test_update_waits_for_the_recipient_and_reads_the_boundary_afterwards(database: Database) -> None:
    async with database.primary() as holder, database.primary() as connection:
        await recipients.save_recipient(holder, OWNER, FCM)
        async with trio.open_nursery() as nursery:
            async with holder.transaction():
                await holder.execute("SELECT 1 FROM push_recipient FOR UPDATE")
                nursery.start_soon(update, connection, [add(1)])
                await wait_until_blocked(holder, 1)
                await set_boundary(holder, 77)
        assert [row[1] for row in await subscription_rows(holder)] == [77]


async def test_updates_that_meet_at_the_limit_do_not_both_pass(database: Database) -> None:
    """T024"""
    results: list[SubscriptionsUpdated | Refusal] = []

    async def call(numbers: range) -> None:
        async with database.primary() as connection:
            results.append(await update(connection, [add(number) for number in numbers], limit=2))

    async with database.primary() as holder:
        await recipients.save_recipient(holder, OWNER, FCM)
        async with trio.open_nursery() as nursery:
            async with holder.transaction():
                await holder.execute("SELECT 1 FROM push_recipient FOR UPDATE")
                nursery.start_soon(call, range(2))
                nursery.start_soon(call, range(2, 4))
                await wait_until_blocked(holder, 2)
        assert sorted(type(result).__name__ for result in results) == ["Refusal", "SubscriptionsUpdated"]
        assert Refusal.TOPIC_LIMIT in results
        row = await recipient_row(holder)
        assert row is not None
        assert row[4] == 2 == len(await subscription_rows(holder))


async def test_overlapping_updates_that_meet_keep_the_count_right(database: Database) -> None:
    """Ten updates of overlapping topics, released together: no deadlock, and the count is the number of rows."""

    async def call(number: int) -> None:
        async with database.primary() as connection:
            # Opposite orders in the arrays: rows would be locked crosswise if nothing came before them.
            numbers = range(number, number + 20) if number % 2 else range(number + 19, number - 1, -1)
            done = await update(connection, [add(n) for n in numbers], [n + 100 for n in numbers])
            assert isinstance(done, SubscriptionsUpdated)

    async with database.primary() as holder:
        await recipients.save_recipient(holder, OWNER, FCM)
        await update(holder, [add(number) for number in range(100, 140)])
        async with trio.open_nursery() as nursery:
            async with holder.transaction():
                await holder.execute("SELECT 1 FROM push_recipient FOR UPDATE")
                for number in range(10):
                    nursery.start_soon(call, number)
                await wait_until_blocked(holder, 10)
        row = await recipient_row(holder)
        assert row is not None
        assert row[4] == len(await subscription_rows(holder)) == 29 + 11


async def test_first_registrations_that_meet_have_one_winner(database: Database) -> None:
    """T004: both inserts wait for an uncommitted row of the same id, which then goes away."""
    results: dict[Claim, RecipientState | Refusal] = {}

    async def register(claimant: Claim) -> None:
        async with database.primary() as connection:
            results[claimant] = await recipients.save_recipient(connection, claimant, FCM)

    async with database.primary() as holder:
        async with trio.open_nursery() as nursery:
            with pytest.raises(ZeroDivisionError):
                async with holder.transaction():
                    await recipients.save_recipient(holder, claim(b"\x00" * 32), HOOK)
                    nursery.start_soon(register, OWNER)
                    nursery.start_soon(register, STRANGER)
                    await wait_until_blocked(holder, 2)
                    raise ZeroDivisionError
        winners = [claimant for claimant, result in results.items() if result is not Refusal.WRONG_SECRET]
        assert len(results) == 2
        assert len(winners) == 1
        row = await recipient_row(holder)
        assert row is not None
        assert (row[0], row[4]) == (winners[0].secret_hash, 0)


async def test_registrations_of_one_owner_that_meet_both_succeed(database: Database) -> None:
    """The later commit wins, and its state is the later one: the clock is read after the wait."""
    states: dict[str, RecipientState] = {}

    async def register(target: str) -> None:
        async with database.primary() as connection:
            state = await recipients.save_recipient(connection, OWNER, DeliveryConfig(Channel.APNS, target))
            assert isinstance(state, RecipientState)
            states[target] = state

    async with database.primary() as holder:
        await recipients.save_recipient(holder, OWNER, FCM)
        async with trio.open_nursery() as nursery:
            async with holder.transaction():
                await holder.execute("SELECT 1 FROM push_recipient FOR UPDATE")
                nursery.start_soon(register, "one")
                nursery.start_soon(register, "two")
                await wait_until_blocked(holder, 2)
                released = await holder.fetch_one("SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint")
                assert released is not None
        row = await recipient_row(holder)
        assert row is not None
        last = max(states, key=lambda target: states[target].renewed_ns)
        assert (row[2], row[5]) == (last, states[last].renewed_ns)
        assert all(state.renewed_ns >= released[0] for state in states.values())


@pytest.mark.parametrize(
    ("becomes", "answer"),
    [
        pytest.param("DELETE FROM push_recipient", Refusal.NOT_REGISTERED, id="deleted"),
        pytest.param("UPDATE push_recipient SET secret_hash = %s", Refusal.WRONG_SECRET, id="another owner's"),
    ],
)
async def test_update_judges_the_recipient_it_locked(database: Database, becomes: str, answer: Refusal) -> None:
    answers = []

    async def call() -> None:
        async with database.primary() as connection:
            answers.append(await update(connection, [add(1)]))

    async with database.primary() as holder:
        await recipients.save_recipient(holder, OWNER, FCM)
        async with trio.open_nursery() as nursery:
            async with holder.transaction():
                await holder.execute(becomes, (STRANGER.secret_hash,) if "%s" in becomes else None)
                nursery.start_soon(call)
                await wait_until_blocked(holder, 1)
        assert answers == [answer]
        assert await subscription_rows(holder) == []


async def test_recipient_deleted_and_made_anew_during_an_update_gets_none_of_it(database: Database) -> None:
    answers = []

    async def call() -> None:
        async with database.primary() as connection:
            answers.append(await update(connection, [add(1)]))

    async with database.primary() as holder:
        await recipients.save_recipient(holder, OWNER, FCM)
        async with trio.open_nursery() as nursery:
            async with holder.transaction():
                await recipients.delete_recipient(holder, OWNER)
                await recipients.save_recipient(holder, STRANGER, HOOK)
                nursery.start_soon(call)
                await wait_until_blocked(holder, 1)
        assert answers == [Refusal.NOT_REGISTERED]
        assert await subscription_rows(holder) == []
        row = await recipient_row(holder)
        assert row is not None
        assert (row[0], row[4]) == (STRANGER.secret_hash, 0)


async def test_cancelled_update_leaves_nothing_behind_and_gives_its_session_back(
    database_url: str, metrics: Metrics
) -> None:
    async with open_database(DatabaseSettings(database_url, max_connections=2), metrics) as database:

        async def call(scope: trio.CancelScope) -> None:
            with scope:
                await recipients.update_subscriptions(database, OWNER, [add(1)], [], max_topics=9)

        async with database.primary() as holder:
            await recipients.save_recipient(holder, OWNER, FCM)
            before = await recipient_row(holder)
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                async with holder.transaction():
                    await holder.execute("SELECT 1 FROM push_recipient FOR UPDATE")
                    nursery.start_soon(call, scope)
                    await wait_until_blocked(holder, 1)
                    scope.cancel()
                    await wait_until_blocked(holder, 0)
            assert scope.cancelled_caught
            assert await recipient_row(holder) == before
            assert await subscription_rows(holder) == []
            with trio.fail_after(20):
                done = await recipients.update_subscriptions(database, OWNER, [add(1)], [], max_topics=9)
            assert isinstance(done, SubscriptionsUpdated)
