"""FCM and its OAuth endpoint over real TLS, against the fake in its own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fakes.launch import RunningFake, launch
from pushd.channels.fcm import FcmChannel, make_fcm_channel
from pushd.channels.http2 import open_http2_client
from pushd.model import Channel, Delivered, Delivery, DeliveryConfig, Mismatch, Outcome, Rejected, Terminal, Transient
from tests.support.privacy import captured_logs


@pytest.fixture(scope="module")
def process() -> Iterator[RunningFake]:
    with launch("fcm") as fake:
        yield fake


@pytest.fixture
def fake(process: RunningFake) -> RunningFake:
    process.tell("/reset")
    return process


def delivery(token: str, topic: bytes = b"\x01" * 33) -> Delivery:
    return Delivery(7, topic, b"r" * 32, DeliveryConfig(Channel.FCM, token), b"\x09" * 32)


def account_of(fake: RunningFake) -> str:
    return Path(fake.facts["service_account"]).read_text()


@asynccontextmanager
async def open_channel(fake: RunningFake) -> AsyncIterator[FcmChannel]:
    with trio.fail_after(60):
        async with open_http2_client() as client, trio.open_nursery() as exchanging:
            yield make_fcm_channel(
                client, exchanging, service_account=account_of(fake), endpoint=fake.endpoint, ca_file=fake.ca
            )


async def test_messages_arrive_with_a_token_from_one_exchange(
    fake: RunningFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody listens there: an exchange or a send through a proxy would fail.
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    before = fake.stats()["exchanges"]
    outcomes: list[Outcome] = []

    async def one(channel: FcmChannel, number: int) -> None:
        outcomes.append(await channel.attempt(delivery(f"token-{number}")))

    async with open_channel(fake) as channel:
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(one, channel, number)
    assert outcomes == [Delivered()] * 64
    assert fake.stats()["exchanges"] - before == 1
    assert fake.requests()[0]["headers"][":path"] == "/v1/projects/fake-project/messages:send"


async def test_scripted_answers_by_token_T157(fake: RunningFake) -> None:
    fake.script("gone", {"status": 404, "code": "UNREGISTERED"})
    fake.script("other", {"status": 403, "code": "SENDER_ID_MISMATCH", "chunks": 4, "trailing_ms": 20})
    fake.script("bare", {"status": 404, "body": '{"error":{"status":"NOT_FOUND"}}'}, {"status": 200})
    fake.script("busy", {"status": 429, "stall": "body", "headers": {"retry-after": "120"}, "body": "{}"})
    fake.script("cut", {"close": True})
    async with open_channel(fake) as channel:
        expected: list[tuple[str, Outcome]] = [
            ("gone", Terminal("UNREGISTERED")),
            ("other", Mismatch("SENDER_ID_MISMATCH")),
            ("bare", Rejected("http_404")),
            ("bare", Delivered()),
            ("busy", Transient("quota", 120.0)),
            ("cut", Transient("closed", 10.0)),
            ("next", Delivered()),
        ]
        for token, outcome in expected:
            assert await channel.attempt(delivery(token)) == outcome


async def test_a_failing_token_endpoint_sends_nothing_and_nothing_private_is_logged_T146(fake: RunningFake) -> None:
    token, topic = "private-registration-token", b"\x01" + bytes(range(200, 232))
    fake.script("oauth", {"status": 500, "body": f"{token} {topic.hex()}"})
    fake.script(token, {"status": 400, "body": f'{{"error":{{"message":"{token} {topic.hex()}"}}}}'})
    with captured_logs() as logged:
        async with open_channel(fake) as channel:
            assert await channel.attempt(delivery(token, topic)) == Transient("credentials", 10.0)
            assert fake.requests() == []
            await trio.sleep(1.1)
            assert await channel.attempt(delivery(token, topic)) == Rejected("http_400")
    bearer = fake.requests()[0]["headers"]["authorization"].split()[1]
    for text in (token, topic.hex(), bearer, "assertion", "BEGIN PRIVATE KEY"):
        assert text not in logged.getvalue()
