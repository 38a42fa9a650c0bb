"""Random sequences of the three calls against a model in memory: answers, rows, counts and start positions agree."""

from __future__ import annotations

import hashlib
from typing import Any

import trio
from attrs import define, field, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pushd.model import Channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.store.database import DatabaseSettings, open_database
from pushd.telemetry import Metrics
from tests.support.registration import (
    APNS,
    CHANNEL_NOT_CONFIGURED,
    FCM,
    NOT_REGISTERED,
    SIGNING_KEY,
    SUBSCRIPTION,
    TOPIC_LIMIT,
    WRONG_SECRET,
    Api,
    Refused,
    Rows,
    add,
    counts,
    group,
    http,
    welcome,
)

LIMIT = 3
IDS = [bytes([number]) * 32 for number in (1, 2)]
SECRETS = [b"a" * 32, b"b" * 32]
TOPICS = [group(1), group(2), group(3), welcome(4), welcome(5)]


@frozen
class Register:
    recipient_id: bytes
    secret: bytes
    delivery: str


@frozen
class Unregister:
    recipient_id: bytes
    secret: bytes


@frozen
class Update:
    recipient_id: bytes
    secret: bytes
    adds: list[tuple[bytes, int, int, bool]]
    """topic, epoch base, number of keys, commits"""
    removes: list[bytes]


@frozen
class MoveBoundary:
    by: int


# Mostly one recipient and its right secret, mostly well-formed updates: otherwise nearly every call is refused early.
ids = st.sampled_from([IDS[0], IDS[0], IDS[1]])
secrets = st.sampled_from([SECRETS[0]] * 7 + [SECRETS[1]])
addition = st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())
well_formed = st.permutations(TOPICS).flatmap(
    lambda topics: st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(addition, min_size=5, max_size=5)).map(
        lambda drawn: (
            [(topic, *rest) for topic, rest in zip(topics[: drawn[0]], drawn[2], strict=False)],
            topics[drawn[0] : drawn[0] + drawn[1]],
        )
    )
)
any_topics = st.lists(st.sampled_from([*TOPICS, b"\x02" * 33]), max_size=3)
careless = st.tuples(any_topics.map(lambda topics: [(topic, 0, 1, False) for topic in topics]), any_topics)
register = st.builds(Register, ids, secrets, st.sampled_from(["fcm", "http", "short key", "apns"]))
change = st.sampled_from([well_formed] * 6 + [careless]).flatmap(lambda strategy: strategy)
update = st.builds(lambda who, secret, what: Update(who, secret, *what), ids, secrets, change)
move = st.builds(MoveBoundary, st.integers(1, 9))
unregister = st.builds(Unregister, ids, secrets)
# `one_of` would count each alternative once, however often it is named.
step = st.sampled_from([update] * 12 + [register] * 4 + [move] * 3 + [unregister]).flatmap(lambda strategy: strategy)
steps = st.lists(step, min_size=20, max_size=40).map(lambda drawn: [Register(IDS[0], SECRETS[0], "fcm"), *drawn])

DELIVERIES = {"fcm": FCM, "http": http(), "short key": http(key=b"short"), "apns": APNS}
STORED = {"fcm": (2, "token", None), "http": (3, "https://hooks.example.com/", bytes(16))}


def keys(number: int) -> tuple[bytes, ...]:
    return tuple(bytes([slot]) * 42 for slot in range(number))


@define
class Stored:
    secret: bytes
    delivery: tuple[Any, ...]
    topics: dict[bytes, tuple[Any, ...]] = field(factory=dict)


@define
class Model:
    """What the API promises, written down once more without a database."""

    recipients: dict[bytes, Stored] = field(factory=dict)
    boundary: int = 0
    counts: dict[str, int] = field(
        factory=lambda: dict.fromkeys(("registered", "unregistered", "added", "removed", "expired", "dead"), 0)
    )

    def apply(self, step: Any) -> Refused | None:
        match step:
            case MoveBoundary(by):
                self.boundary += by
                return None
            case Register():
                return self._register(step)
            case Unregister():
                return self._unregister(step)
        return self._update(step)

    def _owned(self, step: Any) -> Refused | None:
        stored = self.recipients.get(step.recipient_id)
        if stored is None:
            return NOT_REGISTERED
        return None if stored.secret == step.secret else WRONG_SECRET

    def _register(self, step: Register) -> Refused | None:
        refused = self._owned(step)
        if refused == WRONG_SECRET:
            return refused
        if step.delivery == "apns":
            return CHANNEL_NOT_CONFIGURED
        if step.delivery == "short key":
            return SIGNING_KEY
        stored = self.recipients.setdefault(step.recipient_id, Stored(step.secret, ()))
        stored.delivery = STORED[step.delivery]
        self.counts["registered"] += 1
        return None

    def _unregister(self, step: Unregister) -> Refused | None:
        refused = self._owned(step)
        if refused is None:
            self.counts["removed"] += len(self.recipients.pop(step.recipient_id).topics)
            self.counts["unregistered"] += 1
        return refused

    def _update(self, step: Update) -> Refused | None:
        refused = self._owned(step)
        if refused is not None:
            return refused
        named = [added[0] for added in step.adds] + step.removes
        if len(set(named)) < len(named) or not set(named) <= set(TOPICS):
            return SUBSCRIPTION
        before = self.recipients[step.recipient_id].topics
        after = {topic: row for topic, row in before.items() if topic not in step.removes}
        for topic, base, number, commits in step.adds:
            since = after[topic][0] if topic in after else self.boundary
            padded = keys(number) + (None,) * (3 - number)
            after[topic] = (since, base if number else None, *padded, commits)
        if len(after) > LIMIT and len(after) > len(before):
            return TOPIC_LIMIT
        self.counts["added"] += len(after.keys() - before.keys())
        self.counts["removed"] += len(before.keys() - after.keys())
        self.recipients[step.recipient_id].topics = after
        return None

    def recipient_rows(self) -> list[tuple[Any, ...]]:
        return [
            (recipient_id, hashlib.sha256(stored.secret).digest(), *stored.delivery, len(stored.topics))
            for recipient_id, stored in sorted(self.recipients.items())
        ]

    def subscription_rows(self) -> list[tuple[Any, ...]]:
        return [
            (recipient_id, topic, *row)
            for recipient_id, stored in sorted(self.recipients.items())
            for topic, row in sorted(stored.topics.items())
        ]


async def perform(api: Api, rows: Rows, step: Any, boundary: int) -> Any:
    match step:
        case Register(recipient_id, secret, delivery):
            return await api.register(DELIVERIES[delivery], recipient_id, secret)
        case Unregister(recipient_id, secret):
            return await api.unregister(recipient_id, secret)
        case Update(recipient_id, secret, added, removes):
            messages = [add(topic, *keys(number), base=base, commits=commits) for topic, base, number, commits in added]
            return await api.update(messages, removes, recipient_id, secret)
    return await rows.set_boundary(boundary)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(sequence=steps)
def test_api_does_what_the_model_says(database_url: str, sequence: list[Any]) -> None:
    trio.run(run_example, database_url, sequence)


async def run_example(database_url: str, sequence: list[Any]) -> None:
    metrics, model = Metrics(), Model()
    async with open_database(DatabaseSettings(database_url), metrics) as database:
        async with database.primary() as connection:  # the database outlives one example
            await connection.execute("DELETE FROM push_recipient")
            await connection.execute("UPDATE allocation_boundary SET closed_sequence_id = 0")
        api = Api(database, metrics, channels=[Channel.FCM, Channel.HTTP], max_topics=LIMIT)
        await follow(sequence, model, api, Rows(database))
    assert counts(metrics) == model.counts


async def follow(sequence: list[Any], model: Model, api: Api, rows: Rows) -> None:
    renewals: dict[bytes, int] = {}
    for step in sequence:
        expected = model.apply(step)
        answer = await perform(api, rows, step, model.boundary)
        stored = await rows.recipients()
        assert [row[:6] for row in stored] == model.recipient_rows()
        assert await rows.subscriptions() == model.subscription_rows()
        if expected is not None:
            assert answer == expected
            assert {row[0]: row[6] for row in stored} == renewals
        elif isinstance(step, Register | Update):
            row = next(row for row in stored if row[0] == step.recipient_id)
            assert row[6] > renewals.get(step.recipient_id, 0)
            expires_at_ns = row[6] + 2_592_000 * 10**9
            assert answer == wire.RecipientState(topic_count=row[5], channel=row[2], expires_at_ns=expires_at_ns)
        renewals = {row[0]: row[6] for row in stored}
