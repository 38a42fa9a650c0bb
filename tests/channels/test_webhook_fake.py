"""The receiver that ships with pushd, in its own process, against the real sender: each trait does what it says."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
import trio

from fakes.launch import RunningFake, launch
from pushd.channels.https1 import client_context
from pushd.channels.resolver import ThreadResolver
from pushd.channels.webhook import WebhookChannel, open_webhook_sender
from pushd.core import webhook_answers as answers
from pushd.model import Channel, Delivered, Delivery, DeliveryConfig, Gone, Outcome, Rejected, Transient
from tests.support.streams import until

KEY = b"\x07" * 32
RECIPIENT = b"\x11" * 32
SERVER_ERROR = Transient("status_5xx", 1.0)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningFake]:
    with launch("webhooks", "--bad-tls") as fake:
        yield fake


@pytest.fixture
def fake(running: RunningFake) -> RunningFake:
    running.tell("/reset")
    running.tell("/keys", {RECIPIENT.hex(): base64.b64encode(KEY).decode()})
    return running


async def attempts(fake: RunningFake, *paths: str, key: bytes = KEY, port: int | None = None) -> list[Outcome]:
    outcomes = []
    async with open_webhook_sender(
        resolver=ThreadResolver(), tls=client_context(str(fake.ca)), allow_private_addresses=True
    ) as sender:
        for number, path in enumerate(paths):
            config = DeliveryConfig(Channel.HTTP, f"https://localhost:{port or fake.port}{path}", key)
            delivery = Delivery(number, b"\x00" * 17, RECIPIENT, config, bytes(32))
            with trio.fail_after(30):
                outcomes.append(await WebhookChannel(sender).attempt(delivery))
    return outcomes


@pytest.mark.parametrize(
    ("path", "outcome"),
    [
        ("/", Delivered()),
        ("/?status=200&body=5", Delivered()),
        ("/?status=410", Gone(410)),
        ("/?status=503&delay_ms=20", SERVER_ERROR),
        ("/?redirect=http://169.254.169.254/", Rejected("redirect")),
        ("/?redirect=/x&status=308", Rejected("redirect")),
        ("/?reset=1", answers.CONNECTION_LOST),
        ("/?status=200&endless=1", Delivered()),
        ("/?headers=100000", answers.NOT_HTTP),
        ("/?status=404&gzip_bomb=1", Gone(404)),
        ("/?status=200&close=1", Delivered()),
    ],
)
async def test_url_says_what_happens(fake: RunningFake, path: str, outcome: Outcome) -> None:
    assert await attempts(fake, path) == [outcome]
    assert fake.stats()["requests"] == 1


async def test_script_is_used_in_order_and_then_the_default_again(fake: RunningFake) -> None:
    fake.script("/hook", {"status": 503}, {"status": 410})
    assert await attempts(fake, "/hook", "/hook", "/hook", "/other") == [
        SERVER_ERROR,
        Gone(410),
        Delivered(),
        Delivered(),
    ]
    assert [kept["status"] for kept in fake.requests()] == [503, 410, 204, 204]
    assert [kept["number"] for kept in fake.ask("/requests?after=2")] == [3, 4]
    assert fake.stats()["connections"] == 1


async def test_signatures_are_judged(fake: RunningFake) -> None:
    await attempts(fake, "/a", "/b")
    await attempts(fake, "/a", key=b"\x08" * 32)
    stats = fake.stats()
    assert (stats["verified"], stats["bad_signature"], stats["no_key"]) == (2, 1, 0)
    assert (stats["distinct_ids"], stats["repeated_ids"]) == (2, 1)
    assert [kept["server_name"] for kept in fake.requests()] == ["localhost"] * 3


async def test_stalled_and_slow_answers_take_their_time(fake: RunningFake) -> None:
    for path in ("/?stall=1", "/?slow_headers=9000"):
        with trio.move_on_after(0.3) as waiting:
            await attempts(fake, path)
        assert waiting.cancelled_caught
    assert fake.stats()["requests"] == 2


async def test_what_is_not_answered_is_in_flight_until_its_sender_has_gone(fake: RunningFake) -> None:
    await attempts(fake, "/", "/?status=503")
    assert fake.stats()["in_flight"] == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempts, fake, "/?stall=1")
        nursery.start_soon(attempts, fake, "/?stall=1")
        await until(lambda: fake.stats()["in_flight"] == 2)
        nursery.cancel_scope.cancel()
    await until(lambda: fake.stats()["in_flight"] == 0)


@pytest.mark.parametrize("fault", ["wrong_name", "expired", "unknown_authority"])
async def test_bad_certificates_are_refused(fake: RunningFake, fault: str) -> None:
    assert await attempts(fake, "/", port=fake.facts["bad_tls"][fault]) == [answers.TLS_FAILED]
    assert fake.stats()["requests"] == 0


def test_unknown_trait_is_an_error(fake: RunningFake) -> None:
    with pytest.raises(ValueError, match="no such trait"):
        fake.script("/hook", {"stauts": 503})
