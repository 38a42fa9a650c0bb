"""Calls that meet: each is held at the row lock until all have arrived, then let go together."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.store.database import Database
from pushd.telemetry import Metrics
from tests.support.contention import wait_until_blocked
from tests.support.registration import (
    APNS,
    FCM,
    ID,
    NOT_REGISTERED,
    OTHER_SECRET,
    SECRET,
    TOPIC_LIMIT,
    WRONG_SECRET,
    Api,
    Rows,
    add,
    counts,
    group,
    http,
)

Call = Callable[[], Awaitable[Any]]


async def meet(database: Database, calls: list[Call], release: str = "SELECT 1") -> list[Any]:
    """Answers of `calls`, all of which waited for the recipient's row before `release` ran and let it go."""
    answers: list[Any] = [None] * len(calls)

    async def run(place: int, call: Call) -> None:
        answers[place] = await call()

    async with database.primary() as holder, trio.open_nursery() as nursery:
        async with holder.transaction():
            await holder.execute("SELECT 1 FROM push_recipient FOR UPDATE")
            for place, call in enumerate(calls):
                nursery.start_soon(run, place, call)
            await wait_until_blocked(holder, len(calls))
            await holder.execute(release)
    return answers


@pytest.fixture
def api(database: Database, metrics: Metrics) -> Api:
    return Api(database, metrics, max_topics=2)


@pytest.fixture
def rows(database: Database) -> Rows:
    return Rows(database)


async def test_two_first_registrations_have_one_winner(
    database: Database, metrics: Metrics, api: Api, rows: Rows
) -> None:
    """T004: the row they wait for is of an insert that is taken back, so both find the id free."""
    answers: dict[bytes, Any] = {}

    async def register(secret: bytes) -> None:
        answers[secret] = await api.register(FCM, secret=secret)

    async with database.primary() as holder, trio.open_nursery() as nursery:
        with pytest.raises(ZeroDivisionError):
            async with holder.transaction():
                await holder.execute(
                    "INSERT INTO push_recipient VALUES (%b, %b, 1, 'x', NULL, 0, 0)", (ID, hashlib.sha256(b"").digest())
                )
                nursery.start_soon(register, SECRET)
                nursery.start_soon(register, OTHER_SECRET)
                await wait_until_blocked(holder, 2)
                raise ZeroDivisionError
    [loser] = [secret for secret, answer in answers.items() if answer == WRONG_SECRET]
    [winner] = {SECRET, OTHER_SECRET} - {loser}
    assert answers[winner].topic_count == 0
    [row] = await rows.recipients()
    assert (row[1], row[5]) == (hashlib.sha256(winner).digest(), 0)
    assert counts(metrics)["registered"] == 1


async def test_two_registers_of_one_owner_both_succeed_and_the_later_stays(
    database: Database, metrics: Metrics, api: Api, rows: Rows
) -> None:
    await api.register(FCM)
    answers = await meet(database, [lambda: api.register(APNS), lambda: api.register(http())])
    assert {answer.channel for answer in answers} == {wire.CHANNEL_APNS, wire.CHANNEL_HTTP}
    last = max(answers, key=lambda answer: answer.expires_at_ns)
    [row] = await rows.recipients()
    assert (row[2], row[6] + 2_592_000 * 10**9) == (last.channel, last.expires_at_ns)
    assert counts(metrics)["registered"] == 3


async def test_two_updates_at_the_limit_have_one_winner(
    database: Database, metrics: Metrics, api: Api, rows: Rows
) -> None:
    """T024"""
    await api.register(FCM)
    answers = await meet(
        database,
        [
            lambda: api.update([add(group(1)), add(group(2))]),
            lambda: api.update([add(group(3)), add(group(4))]),
        ],
    )
    assert TOPIC_LIMIT in answers
    answers.remove(TOPIC_LIMIT)
    assert answers[0].topic_count == 2 == len(await rows.subscriptions())
    assert counts(metrics)["added"] == 2


async def test_register_during_an_update_keeps_both_changes(database: Database, api: Api, rows: Rows) -> None:
    await api.register(FCM)
    registered, updated = await meet(database, [lambda: api.register(APNS), lambda: api.update([add(group(1))])])
    assert registered.channel == wire.CHANNEL_APNS
    assert updated.topic_count == 1
    [row] = await rows.recipients()
    assert row[2:6] == (1, "abcd", None, 1)
    assert len(await rows.subscriptions()) == 1


async def test_unregister_and_update_that_meet_leave_no_subscription_behind(
    database: Database, api: Api, rows: Rows
) -> None:
    await api.register(FCM)
    unregistered, updated = await meet(database, [api.unregister, lambda: api.update([add(group(1))])])
    assert unregistered == wire.UnregisterResponse()
    assert updated == NOT_REGISTERED or updated.topic_count == 1
    assert await rows.everything() == ([], [])


async def test_two_unregisters_that_meet_delete_once(
    database: Database, metrics: Metrics, api: Api, rows: Rows
) -> None:
    await api.register(FCM)
    answers = await meet(database, [api.unregister, api.unregister])
    assert NOT_REGISTERED in answers
    assert wire.UnregisterResponse() in answers
    assert counts(metrics)["unregistered"] == 1


@pytest.mark.parametrize(
    ("release", "refusals"),
    [
        pytest.param(
            "UPDATE push_recipient SET secret_hash = decode(repeat('00', 32), 'hex')",
            [WRONG_SECRET, WRONG_SECRET, NOT_REGISTERED],
            id="another owner's by then",
        ),
        pytest.param(
            "WITH gone AS (DELETE FROM push_recipient RETURNING *) SELECT 1 FROM gone",
            [None, NOT_REGISTERED, NOT_REGISTERED],
            id="gone by then",
        ),
    ],
)
async def test_ownership_is_judged_again_under_the_lock(
    database: Database, api: Api, rows: Rows, release: str, refusals: list[Any]
) -> None:
    """The secret was right when it was read; what counts is the row that the write meets."""
    await api.register(FCM)
    calls: list[Call] = [lambda: api.register(APNS), lambda: api.update([add(group(1))]), api.unregister]
    if refusals[0] is None:
        calls, refusals = calls[1:], refusals[1:]
    assert await meet(database, calls, release) == refusals
    assert await rows.subscriptions() == []


async def test_recipient_made_anew_by_another_during_calls_keeps_nothing_of_the_old(
    database: Database, api: Api, rows: Rows
) -> None:
    """Deleted and registered again, by two calls of another client, while an update and an unregister wait."""
    await api.register(FCM)
    await api.update([add(group(1))])
    answers: list[Any] = []

    async def run(call: Call) -> None:
        answers.append(await call())

    async with database.primary() as holder, trio.open_nursery() as nursery:
        async with holder.transaction():
            await holder.execute("DELETE FROM push_recipient")
            await holder.execute(
                "INSERT INTO push_recipient VALUES (%b, %b, 1, 'new', NULL, 0, 5)",
                (ID, hashlib.sha256(OTHER_SECRET).digest()),
            )
            nursery.start_soon(run, lambda: api.update([add(group(2))]))
            nursery.start_soon(run, api.unregister)
            await wait_until_blocked(holder, 2)
    assert answers == [NOT_REGISTERED, NOT_REGISTERED]
    assert await rows.everything() == ([(ID, hashlib.sha256(OTHER_SECRET).digest(), 1, "new", None, 0, 5)], [])


async def test_many_updates_of_one_recipient_add_up(database: Database, metrics: Metrics, rows: Rows) -> None:
    api = Api(database, metrics)
    await api.register(FCM)
    calls = [
        lambda number=number: api.update([add(group(n)) for n in range(number, number + 10)], [group(number + 50)])
        for number in range(0, 80, 8)
    ]
    answers = await meet(database, calls)
    assert all(isinstance(answer, wire.RecipientState) for answer in answers)
    stored = await rows.subscriptions()
    assert (await rows.recipients())[0][5] == len(stored)
    assert counts(metrics)["added"] - counts(metrics)["removed"] == len(stored)
