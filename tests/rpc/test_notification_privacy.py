"""T056: nothing a client sends to the registration API comes back out of it, whatever goes wrong (PUSH-096)."""

from __future__ import annotations

import base64
import random
import traceback
from functools import partial
from ipaddress import IPv4Address
from typing import Any

import prometheus_client
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pushd.channels.resolver import check_webhook_url
from pushd.core.addresses import Address
from pushd.core.checks import UpdateCheck, check_identity
from pushd.errors import PushdError, StatusError, StoreError, StoreInvariant
from pushd.model import SubscriptionChange
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.telemetry import Metrics
from tests.support.privacy import PrivateValues, captured_logs, private_bytes, private_text
from tests.support.registration import Api

VALUE = bytes(range(0x80, 0x90))
PIECE = VALUE[5:9]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (b"before " + PIECE + b" after", "plain"),
        (f"id={PIECE.hex()}", "hexadecimal"),
        (f"id=a{PIECE.hex().upper()}", "hexadecimal"),
        (f"id={PIECE!r}", "escaped"),
        ("id=\\205\\206\\207\\210", "escaped"),
        ("/device/%85%86%87%88", "escaped"),
        (f"id={list(PIECE)}", "numbers"),
        ("id=" + base64.b64encode(VALUE).decode(), "base64"),
        ("id=" + base64.urlsafe_b64encode(b"x" + VALUE).decode(), "base64"),
    ],
)
def test_scanner_finds_a_piece_in_every_form(text: str | bytes, form: str) -> None:
    values = PrivateValues()
    values.keep(VALUE)
    assert form in values.find_in(text)


@pytest.mark.parametrize("text", ["HOST qxzjkvwq", "Host QXZJKVWQ", b"https://qxzj.example"])
def test_scanner_finds_text_in_either_case(text: str | bytes) -> None:
    values = PrivateValues()
    values.keep("qxzjkvwqxz")
    assert "plain" in values.find_in(text)


def test_scanner_is_silent_about_other_text() -> None:
    values = PrivateValues()
    rng = random.Random(1)
    for _ in range(200):
        values.keep(private_bytes(rng, 42))
        values.keep(private_text(rng, 40))
    clean = "2026-01-01T00:00:00.123456Z [info] rpc_completed request_id=6fb8a1c2-9d0e-4f11-8a55-0c9d1e2f3a4b " * 50
    assert values.find_in(clean) == set()


def requests(rng: random.Random, values: PrivateValues) -> list[tuple[str, Any]]:
    """Calls of every kind, good and bad in each way the check table knows, full of values nobody else may see."""

    def secret_bytes(size: int) -> bytes:
        return values.keep(private_bytes(rng, size))

    def text(size: int = 24) -> str:
        return values.keep(private_text(rng, size))

    ids = [secret_bytes(32) for _ in range(2)]
    secrets = [secret_bytes(32), secret_bytes(32), secret_bytes(rng.choice([31, 33]))]
    topics = [values.keep(bytes([rng.choice([0, 0, 0, 2])]) + private_bytes(rng, 16)) for _ in range(5)]

    def identity() -> dict[str, bytes]:
        return {"recipient_id": rng.choice(ids), "recipient_secret": rng.choices(secrets, [8, 1, 1])[0]}

    def delivery() -> dict[str, Any]:
        key = secret_bytes(rng.choice([16, 16, 64, 15, 65]))
        url = rng.choice(["https://{}.example/{}", "http://{}/{}", "https://{}:{}@8.8.8.8/"]).format(text(), text())
        return rng.choice(
            [
                {"apns": wire.ApnsDelivery(token=secret_bytes(32).hex())},
                {"fcm": wire.FcmDelivery(token=rng.choice([text(), text() + "\0", text(2100)]))},
                {"http": wire.HttpDelivery(url=url, signing_key=key)},
                {},
            ]
        )

    def subscription() -> wire.Subscription:
        keys = [secret_bytes(rng.choice([42, 42, 42, 42, 41])) for _ in range(rng.choice([0, 1, 3, 3, 4]))]
        base = rng.choice([0, 7, 7, -1])
        return wire.Subscription(topic=rng.choice(topics), hmac_epoch_base=base, hmac_keys=keys)

    calls: list[tuple[str, Any]] = []
    for _ in range(40):
        method = rng.choices(["Register", "UpdateSubscriptions", "Unregister"], [5, 6, 1])[0]
        if method == "Register":
            calls.append((method, wire.RegisterRequest(**identity(), **delivery())))
        elif method == "Unregister":
            calls.append((method, wire.UnregisterRequest(**identity())))
        else:
            adds = [subscription() for _ in range(rng.randrange(3))]
            removes = rng.sample(topics, rng.randrange(2))
            calls.append((method, wire.UpdateSubscriptionsRequest(**identity(), adds=adds, removes=removes)))
    return calls


# A seed has no smaller version of itself: shrinking would only take time.
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(seed=st.integers(0, 2**64))
def test_random_calls_let_nothing_out(database_url: str, seed: int) -> None:
    """S088, S094 and S095: nor a piece of a URL's path, in no label and no status."""
    values = PrivateValues()
    outcomes = trio.run(observe, database_url, requests(random.Random(seed), values))
    for where, text in outcomes:
        assert values.find_in(text) == set(), where


class PublicAddresses:
    """A resolver that finds every name at a public address."""

    async def resolve(self, host: str) -> tuple[Address, ...]:
        await trio.lowlevel.checkpoint()
        return (IPv4Address("8.8.8.8"),)


async def observe(database_url: str, calls: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """What can be seen of `calls` from outside: logs, metrics, statuses and exceptions."""
    metrics = Metrics()
    seen: list[tuple[str, str]] = []
    with captured_logs() as logs:
        async with open_database(DatabaseSettings(database_url), metrics) as database:
            check = partial(
                check_webhook_url, allowed_domains=[], allow_private_addresses=False, resolver=PublicAddresses()
            )
            api = Api(database, metrics, check_webhook_url=check, max_topics=2)
            for method, request in calls:
                try:
                    answer = await getattr(api.service, method)(request)
                    seen.append((method, str(answer)))
                except PushdError as error:
                    seen.append((method, visible(error)))
            seen.append(("repr", repr(api.service) + repr(database)))
    seen.append(("logs", logs.getvalue()))
    seen.append(("metrics", prometheus_client.generate_latest(metrics.registry).decode()))
    return seen


def visible(error: PushdError) -> str:
    """Everything of an expected error that may reach a caller or a log."""
    text = repr(error) + str(error) + "".join(traceback.format_exception(error, chain=False))
    return text + (error.message if isinstance(error, StatusError) else "")


@pytest.mark.parametrize("method", ["Register", "UpdateSubscriptions", "Unregister"])
async def test_database_error_that_quotes_a_row_lets_nothing_out(
    database: Database, metrics: Metrics, method: str
) -> None:
    """S092: PostgreSQL's DETAIL repeats the failing row; only the driver's exception, as the cause, may hold it."""
    rng, values = random.Random(5), PrivateValues()
    who = {"recipient_id": private_bytes(rng, 32), "recipient_secret": private_bytes(rng, 32)}
    topic, key, url = b"\x00" + private_bytes(rng, 16), private_bytes(rng, 42), "https://" + private_text(rng, 30)
    for value in (*who.values(), topic, key, url):
        values.keep(value)
    http = wire.HttpDelivery(url=url, signing_key=key)
    api = Api(database, metrics)
    await api.service.Register(wire.RegisterRequest(**who, http=http))
    async with database.primary() as connection:
        await connection.execute("ALTER TABLE push_recipient ADD CHECK (channel = 0) NOT VALID")
        await connection.execute("ALTER TABLE push_subscription ADD CHECK (hmac_epoch_base < 0)")
        await connection.execute("CREATE TABLE holds (recipient_id bytea REFERENCES push_recipient)")
        await connection.execute("INSERT INTO holds SELECT recipient_id FROM push_recipient")
    request = {
        "Register": wire.RegisterRequest(**who, http=http),
        "UpdateSubscriptions": wire.UpdateSubscriptionsRequest(
            **who, adds=[wire.Subscription(topic=topic, hmac_epoch_base=3, hmac_keys=[key])]
        ),
        "Unregister": wire.UnregisterRequest(**who),
    }[method]
    with captured_logs() as logs, pytest.raises(StoreError) as raised:
        await getattr(api.service, method)(request)
    assert values.find_in(str(raised.value.__cause__)), "the driver quotes the row, or this test shows nothing"
    assert isinstance(raised.value, StoreInvariant) or method == "Unregister"
    assert values.find_in(visible(raised.value)) == set()
    assert values.find_in(logs.getvalue()) == set()


def test_values_of_a_request_are_in_no_repr() -> None:
    rng, values = random.Random(7), PrivateValues()
    claim = check_identity(values.keep(private_bytes(rng, 32)), values.keep(private_bytes(rng, 32)))
    add = wire.Subscription(topic=b"\0" + values.keep(private_bytes(rng, 16)), hmac_keys=[private_bytes(rng, 42)])
    values.keep(add.hmac_keys[0])
    change = UpdateCheck().add(add)
    assert isinstance(change, SubscriptionChange)
    assert values.find_in(repr(claim) + repr(change)) == set()
