"""The three real channels under the dispatcher, from rows in PostgreSQL to fake providers in other processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from ipaddress import ip_address
from typing import Any

import attrs
import pytest
import structlog.testing

import pushd.channels.apns
import pushd.channels.fcm
import pushd.channels.webhook
import pushd.dispatch.sender
from fakes.launch import RunningFake, launch
from pushd.channels.resolver import ThreadResolver
from pushd.channels.setup import open_channels
from pushd.model import Channel
from tests.bench.dispatching import FAKES, push_config
from tests.dispatch.instance import Instance, instance
from tests.dispatch.seed import Seed, eventually, recipient_id, target, topic

APNS, FCM, HTTP = Channel
LOOPBACK = (ip_address("127.0.0.1"),)
Fakes = dict[Channel, RunningFake]


@pytest.fixture(scope="module")
def processes() -> Iterator[Fakes]:
    with ExitStack() as stack:
        yield {channel: stack.enter_context(launch(FAKES[channel])) for channel in Channel}


@pytest.fixture
def fakes(processes: Fakes) -> Fakes:
    for fake in processes.values():
        fake.tell("/reset")
    return processes


@pytest.fixture
def seed(database_url: str) -> Iterator[Seed]:
    with Seed(database_url) as opened:
        yield opened


@asynccontextmanager
async def pushing(
    url: str, fakes: Fakes, channels: Iterable[Channel], *, allowed_domains: tuple[str, ...] = ()
) -> AsyncIterator[Instance]:
    """A running dispatcher with these channels, one attempt a delivery."""
    config = push_config({channel: fakes[channel] for channel in channels})
    if config.http is not None:
        config = attrs.evolve(config, http=attrs.evolve(config.http, allowed_domains=allowed_domains))
    async with open_channels(config, ThreadResolver(lambda _host: LOOPBACK)) as senders:
        async with instance(url, senders, max_attempts=1) as running:
            yield running


def one_row(seed: Seed, channel: Channel, recipients: int) -> None:
    """Recipients 1 to `recipients`, all told of row 1."""
    numbers = range(1, recipients + 1)
    seed.recipients(numbers, channel)
    seed.subscribe(numbers, topic(1))
    seed.envelopes([(1, topic(1))])
    seed.settle(1)


def point_webhooks(seed: Seed, fakes: Fakes, query: str = "") -> None:
    """Let every webhook recipient be reached at the fake."""
    url = f"https://one.hooks.invalid:{fakes[HTTP].port}/{query}"
    seed.conn.execute("UPDATE push_recipient SET delivery = %s WHERE channel = 3", (url,))


def counts(running: Instance, channel: Channel) -> dict[str, int]:
    outcomes = ("delivered", "failed", "rejected", "mismatch", "dead", "suppressed")
    return {outcome: count for outcome in outcomes if (count := running.count(channel, outcome))}


Answers = list[dict[str, Any]]
CASES: dict[Channel, tuple[list[Answers], dict[str, int], set[int]]] = {
    # The answers to the tokens in order, what they come to, which recipients are deleted.
    APNS: (
        [
            [{"status": 410, "reason": "Unregistered"}],
            [{"status": 410, "reason": "ExpiredToken"}],
            [{"status": 400, "reason": "BadDeviceToken"}],
            [{"status": 400, "reason": "DeviceTokenNotForTopic"}],
            [{"status": 400, "reason": "Unregistered"}],
            [{"status": 410, "reason": "UnknownReason"}],
            [{"status": 403, "reason": "ExpiredProviderToken"}, {"status": 403, "reason": "ExpiredProviderToken"}],
        ],
        {"dead": 2, "mismatch": 2, "rejected": 3},
        {1, 2},
    ),
    FCM: (
        [
            [{"status": 404, "code": "UNREGISTERED"}],
            [{"status": 403, "code": "SENDER_ID_MISMATCH"}],
            [{"status": 400, "code": "INVALID_ARGUMENT"}],
            [{"status": 404, "body": '{"error":{"code":404,"status":"NOT_FOUND"}}'}],
            [{"status": 403, "body": '{"error":{"code":403,"status":"SENDER_ID_MISMATCH"}}'}],
            [{"status": 410, "body": '{"error":{"code":410,"status":"UNREGISTERED"}}'}],
            [{"status": 404}],
        ],
        {"dead": 1, "mismatch": 1, "rejected": 5},
        {1},
    ),
}


@pytest.mark.parametrize("channel", CASES, ids=["T156", "T157"])
async def test_answers_decide_over_recipients_and_the_kept_ones_are_reached_later(
    channel: Channel, database_url: str, seed: Seed, fakes: Fakes
) -> None:
    scripts, outcomes, dead = CASES[channel]
    one_row(seed, channel, len(scripts))
    for number, answers in enumerate(scripts, start=1):
        fakes[channel].script(target(number, channel), *answers)
    async with pushing(database_url, fakes, [channel]) as running:
        await eventually(lambda: counts(running, channel) == outcomes and seed.cursor() == 1)
        await eventually(lambda: seed.recipient_count() == len(scripts) - len(dead))
        kept = {recipient_id(number) for number in range(1, len(scripts) + 1) if number not in dead}
        for table in ("push_recipient", "push_subscription"):
            rows = seed.conn.execute(f"SELECT recipient_id FROM {table}").fetchall()
            assert {row[0] for row in rows} == kept
        assert running.metrics.push_recipients.labels("dead")._value.get() == len(dead)
        # The provider has come to its senses, and nobody registered again.
        seed.envelopes([(2, topic(1))])
        seed.settle(2)
        await eventually(lambda: counts(running, channel) == {**outcomes, "delivered": len(kept)})


@pytest.mark.parametrize("allowed_domains", [(), ("*.HOOKS.invalid",), ("elsewhere.invalid",)])
async def test_t129_recipient_stays_reachable_when_the_list_of_domains_changes(
    allowed_domains: tuple[str, ...], database_url: str, seed: Seed, fakes: Fakes
) -> None:
    one_row(seed, HTTP, 3)
    point_webhooks(seed, fakes)
    async with pushing(database_url, fakes, [HTTP], allowed_domains=allowed_domains) as running:
        await eventually(lambda: counts(running, HTTP) == {"delivered": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channel", "answer", "look_at"),
    [
        (APNS, {"status": 400, "reason": "BadDeviceToken"}, "push.apns.environment"),
        (APNS, {"status": 400, "reason": "DeviceTokenNotForTopic"}, "push.apns.bundle_id"),
        (FCM, {"status": 403, "code": "SENDER_ID_MISMATCH"}, "push.fcm.service_account"),
    ],
)
async def test_wrong_setup_deletes_none_of_ten_thousand_and_says_so_once(
    channel: Channel, answer: dict[str, Any], look_at: str, database_url: str, seed: Seed, fakes: Fakes
) -> None:
    one_row(seed, channel, 10_000)
    fakes[channel].tell("/default", answer)
    with structlog.testing.capture_logs() as events:
        async with pushing(database_url, fakes, [channel]) as running:
            await eventually(lambda: seed.cursor() == 1)
            assert counts(running, channel) == {"mismatch": 10_000}
            await running.stopped(5)
    assert (seed.recipient_count(), seed.subscription_count()) == (10_000, 10_000)
    warnings = [event for event in events if event["log_level"] != "info"]
    assert [(event["event"], event["look_at"].split()[0]) for event in warnings] == [("provider_refuses", look_at)]


@pytest.mark.parametrize("stalled", Channel)
async def test_stalled_provider_holds_only_the_permits_of_its_own_channel(
    stalled: Channel, database_url: str, seed: Seed, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stalled provider's deliveries come first and never end; 300 for each of the others all arrive meanwhile."""
    for module in (pushd.channels.apns, pushd.channels.fcm, pushd.channels.webhook, pushd.dispatch.sender):
        monkeypatch.setattr(module, "ATTEMPT_S", 600.0)
    others = [channel for channel in Channel if channel is not stalled]
    for row, channel in enumerate([stalled, *others], start=1):
        numbers = range(row * 1_000, row * 1_000 + 300)
        seed.recipients(numbers, channel)
        seed.subscribe(numbers, topic(row))
        seed.envelopes([(row, topic(row))])
    point_webhooks(seed, fakes, "?stall=1" if stalled is HTTP else "")
    if stalled is not HTTP:
        fakes[stalled].tell("/default", {"stall": "headers"})
    seed.settle(3)
    async with pushing(database_url, fakes, Channel) as running:
        await eventually(lambda: all(counts(running, channel) == {"delivered": 300} for channel in others))
        await eventually(lambda: fakes[stalled].stats()["requests"] == 256)
        sample = {"channel": stalled.label}
        assert running.metrics.registry.get_sample_value("pushd_push_in_flight", sample) == 256
        assert counts(running, stalled) == {}
        assert seed.cursor() == 0
        await running.stopped(0)
