"""The APNs sender: exact requests, the provider token's life, the 10 s of an attempt. Clocks are virtual."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import hpack
import jwt
import pytest
import structlog.testing
import trio
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pushd.channels.apns import HOSTS, ApnsChannel, ApnsRequest, ApnsSender, make_apns_channel
from pushd.channels.apns_jwt import ProviderJwt, Sign, es256
from pushd.channels.http2 import open_http2_client
from pushd.errors import ConfigError
from pushd.model import (
    Channel,
    Delivered,
    Delivery,
    DeliveryConfig,
    Mismatch,
    Outcome,
    Rejected,
    Terminal,
    Transient,
)
from tests.channels.http2_peer import ORIGIN, Call, Peer, accept, ignore

KEY = ec.derive_private_key(int.from_bytes(b"\x42" * 32, "big"), ec.SECP256R1())
KEY_ID, TEAM_ID, BUNDLE_ID = "ABC123DEFG", "TEAM123456", "org.example.app"
TOKEN = "ab" * 32
TOPIC = b"\x01" * 33
SEQUENCE_ID = 9_007_199_254_740_993
EXPIRED = b'{"reason":"ExpiredProviderToken"}'

Answer = Callable[[Call], Awaitable[None]]


class CountingSigner:
    """Signs for real, counts, and can be broken."""

    def __init__(self) -> None:
        self.count = 0
        self.broken = False
        self._sign = es256(KEY)

    def __call__(self, claims: dict[str, object], header: dict[str, object]) -> str:
        self.count += 1
        if self.broken:
            raise jwt.InvalidKeyError("broken")
        return self._sign(claims, header)


class WallClock:
    """A wall clock that can be stepped."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    def __init__(self, peer: Peer, channel: ApnsChannel, signer: CountingSigner, clock: WallClock) -> None:
        self.peer = peer
        self.channel = channel
        self.signer = signer
        self.wall_clock = clock

    async def push(self, token: str = TOKEN) -> Outcome:
        return await self.channel.attempt(delivery(token))

    async def push_many(self, count: int) -> list[Outcome]:
        outcomes: list[Outcome] = []

        async def one() -> None:
            outcomes.append(await self.push())

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)
        return outcomes

    def jwts(self) -> list[str]:
        return [call.headers["authorization"].removeprefix("bearer ") for call in self.peer.calls]


def delivery(token: str = TOKEN) -> Delivery:
    return Delivery(
        sequence_id=SEQUENCE_ID,
        topic=TOPIC,
        recipient_id=b"r" * 32,
        config=DeliveryConfig(Channel.APNS, token),
        secret_hash=b"\x09" * 32,
    )


@asynccontextmanager
async def rig(answer: Answer = accept) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        peer, signer, clock = Peer(nursery, answer), CountingSigner(), WallClock()
        async with open_http2_client(peer.opener) as client:
            sender = ApnsSender(client, ProviderJwt(signer, TEAM_ID, KEY_ID, clock))
            yield Rig(peer, ApnsChannel(sender, ORIGIN, BUNDLE_ID), signer, clock)
        nursery.cancel_scope.cancel()


def answers(*script: tuple[int, bytes]) -> Answer:
    """The n-th request gets the n-th answer, later ones the last."""
    count = 0

    async def answer(call: Call) -> None:
        nonlocal count
        status, body = script[min(count, len(script) - 1)]
        count += 1
        call.reply(status, body)

    return answer


async def test_the_provider_token_is_what_apple_asks_for_T122(autojump_clock: trio.abc.Clock) -> None:
    tokens = ProviderJwt(es256(KEY), TEAM_ID, KEY_ID, lambda: 1_700_000_000.9)
    token = tokens.current()
    parts = token.split(".")
    assert len(parts) == 3
    assert "=" not in token
    header, claims, signature = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts)
    assert json.loads(header) == {"alg": "ES256", "kid": KEY_ID}
    assert json.loads(claims) == {"iss": TEAM_ID, "iat": 1_700_000_000}
    assert len(signature) == 64
    assert jwt.decode(token, KEY.public_key(), algorithms=["ES256"], options={"verify_iat": False})["iss"] == TEAM_ID


async def test_the_exact_request_T123(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.push() == Delivered()
        call = r.peer.calls[0]
        authorization = call.headers.pop("authorization")
        assert authorization.startswith("bearer ")
        assert call.headers == {
            ":method": "POST",
            ":scheme": "https",
            ":authority": "api.push.apple.com",
            ":path": f"/3/device/{TOKEN}",
            "content-type": "application/json",
            "apns-topic": BUNDLE_ID,
            "apns-push-type": "background",
            "apns-priority": "5",
            "apns-collapse-id": base64.b64encode(TOPIC).decode(),
        }
        assert len(call.headers["apns-collapse-id"]) == 44
        assert json.loads(call.body) == {
            "aps": {"content-available": 1},
            "topic": base64.b64encode(TOPIC).decode(),
            "sequence_id": "9007199254740993",
        }


async def test_private_fields_and_the_credential_are_never_indexed_S091(autojump_clock: trio.abc.Clock) -> None:
    async with open_http2_client() as client:
        tokens = ProviderJwt(es256(KEY), TEAM_ID, KEY_ID)
        request = ApnsRequest(ORIGIN, TOKEN, BUNDLE_ID, b"{}", collapse_id="AQID")
        block = ApnsSender(client, tokens)._header_block(request, tokens.current())
    fields = hpack.Decoder().decode(block, raw=True)
    assert {name for name, _ in (f for f in fields if not f.indexable)} == {
        b":path",
        b"authorization",
        b"apns-collapse-id",
    }


async def test_a_request_may_choose_host_topic_type_priority_and_collapse_id(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        peer = Peer(nursery, accept)
        async with open_http2_client(peer.opener) as client:
            sender = ApnsSender(client, ProviderJwt(es256(KEY), TEAM_ID, KEY_ID))
            request = ApnsRequest(ORIGIN, TOKEN, "org.example.app.voip", b"{}", "voip", 10, None)
            assert await sender.send(request) == Delivered()
        headers = peer.calls[0].headers
        assert (headers["apns-topic"], headers["apns-push-type"]) == ("org.example.app.voip", "voip")
        assert headers["apns-priority"] == "10"
        assert "apns-collapse-id" not in headers
        nursery.cancel_scope.cancel()


def test_hosts_T124() -> None:
    assert HOSTS == {"production": "api.push.apple.com", "sandbox": "api.sandbox.push.apple.com"}


def pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@pytest.mark.parametrize("environment", ["production", "sandbox"])
async def test_the_channel_of_a_configuration_block(environment: str) -> None:
    async with open_http2_client() as client:
        channel = make_apns_channel(
            client, key_pem=pem(KEY), key_id=KEY_ID, team_id=TEAM_ID, bundle_id=BUNDLE_ID, environment=environment
        )
        assert channel._origin.authority == HOSTS[environment]


async def test_a_key_of_another_curve_stops_the_start_T074() -> None:
    text = pem(ec.generate_private_key(ec.SECP384R1()))
    async with open_http2_client() as client:
        with pytest.raises(ConfigError, match=r"push\.apns\.key") as raised:
            make_apns_channel(
                client, key_pem=text, key_id=KEY_ID, team_id=TEAM_ID, bundle_id=BUNDLE_ID, environment="production"
            )
    assert text.split()[4] not in str(raised.value)


def test_a_key_that_cannot_sign_stops_the_start() -> None:
    signer = CountingSigner()
    signer.broken = True
    with pytest.raises(ConfigError, match=r"push\.apns\.key"):
        ProviderJwt(signer, TEAM_ID, KEY_ID).check()


@pytest.mark.parametrize(
    ("status", "reason", "outcome"),
    [
        (200, None, Delivered()),
        (201, None, Rejected("http_201")),
        (410, "Unregistered", Terminal("Unregistered")),
        (410, "ExpiredToken", Terminal("ExpiredToken")),
        (400, "BadDeviceToken", Mismatch("BadDeviceToken")),
        (400, "DeviceTokenNotForTopic", Mismatch("DeviceTokenNotForTopic")),
        (403, "InvalidProviderToken", Rejected("InvalidProviderToken")),
        (413, "PayloadTooLarge", Rejected("PayloadTooLarge")),
        (502, None, Rejected("http_502")),
        (302, None, Rejected("http_302")),
        (410, None, Rejected("http_410")),
        (429, "TooManyProviderTokenUpdates", Transient("http_429", 1.0)),
        (500, None, Transient("http_500", 1.0)),
        (503, "Shutdown", Transient("http_503", 1.0)),
    ],
)
async def test_answers_pass_through_the_sender_with_one_request_each_T125_B011_B027_B029(
    autojump_clock: trio.abc.Clock, status: int, reason: str | None, outcome: Outcome
) -> None:
    body = b"" if reason is None else json.dumps({"reason": reason, "timestamp": 1}).encode()
    async with rig(answers((status, body))) as r:
        assert await r.push() == outcome
        assert len(r.peer.calls) == 1
        assert r.signer.count == 1


async def test_64_users_of_an_old_token_cause_one_signature_T126(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        await r.push()
        await trio.sleep(55 * 60)
        assert await r.push_many(64) == [Delivered()] * 64
        assert r.signer.count == 2
        assert len(set(r.jwts()[1:])) == 1
        assert r.jwts()[0] != r.jwts()[1]


async def test_the_token_is_kept_for_55_minutes_and_not_longer(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        await r.push()
        await trio.sleep(55 * 60 - 1)
        await r.push()
        assert r.signer.count == 1
        await trio.sleep(1)
        await r.push()
        assert r.signer.count == 2


async def test_nothing_is_signed_before_the_first_send_B003(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        await trio.sleep(7_200)
        assert r.signer.count == 0


async def test_the_first_send_after_an_idle_hour_carries_a_new_token_B005(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        await r.push()
        await trio.sleep(61 * 60)
        r.wall_clock.now_s += 61 * 60
        await r.push()
        issued = [jwt.decode(token, options={"verify_signature": False})["iat"] for token in r.jwts()]
        assert issued[1] - issued[0] == 61 * 60


@pytest.mark.parametrize("step_s", [7_200.0, -7_200.0])
async def test_a_step_of_the_wall_clock_changes_nothing_B001_B009(
    autojump_clock: trio.abc.Clock, step_s: float
) -> None:
    async with rig() as r:
        await r.push()
        r.wall_clock.now_s += step_s
        for _ in range(20):
            await r.push()
        assert r.signer.count == 1
        await trio.sleep(55 * 60)
        await r.push()
        assert r.signer.count == 2


async def test_429_mints_nothing_B001(autojump_clock: trio.abc.Clock) -> None:
    async with rig(answers((429, b'{"reason":"TooManyProviderTokenUpdates"}'))) as r:
        for _ in range(50):
            assert isinstance(await r.push(), Transient)
        assert r.signer.count == 1


async def test_a_signing_failure_is_shared_for_a_second_and_then_recovers_T127(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with rig() as r:
        r.signer.broken = True
        assert await r.push_many(64) == [Transient("credentials", 1.0)] * 64
        assert r.signer.count == 1
        await trio.sleep(1)
        assert await r.push() == Transient("credentials", 1.0)
        assert r.signer.count == 2
        r.signer.broken = False
        assert await r.push() == Transient("credentials", 1.0)
        await trio.sleep(1)
        assert await r.push() == Delivered()
        assert r.signer.count == 3
        assert len(r.peer.calls) == 1


@pytest.mark.parametrize(
    ("second", "outcome", "signatures_later"),
    [((200, b""), Delivered(), 2), ((403, EXPIRED), Rejected("ExpiredProviderToken"), 3)],
)
async def test_an_expired_token_is_replaced_and_the_push_sent_once_more_T128(
    autojump_clock: trio.abc.Clock, second: tuple[int, bytes], outcome: Outcome, signatures_later: int
) -> None:
    async with rig(answers((403, EXPIRED), second, (200, b""))) as r:
        assert await r.push() == outcome
        first, again = r.peer.calls
        assert first.body == again.body
        assert len(set(r.jwts())) == 2
        assert r.signer.count == 2
        assert await r.push() == Delivered()
        assert r.signer.count == signatures_later  # kept after the 200, dropped after the second 403


async def test_256_expiry_answers_for_one_token_cause_one_signature_B007(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        await trio.sleep(0.05)
        stale = call.headers["authorization"] == r.peer.calls[0].headers["authorization"]
        call.reply(403, EXPIRED) if stale else call.reply(200)

    async with rig(answer) as r:
        assert await r.push_many(256) == [Delivered()] * 256
        assert r.signer.count == 2
        assert len(r.peer.calls) == 512


async def test_a_late_expiry_answer_leaves_the_newer_token_alone_T130(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        number = len(r.peer.calls)
        if number == 1:
            await trio.sleep(2)  # answered after the token has been replaced
        if number <= 2:
            call.reply(403, EXPIRED)
        else:
            call.reply(200)

    async with rig(answer) as r, trio.open_nursery() as nursery:
        nursery.start_soon(r.push)
        await trio.testing.wait_all_tasks_blocked()
        assert await r.push() == Delivered()
        assert r.signer.count == 2
        await trio.sleep(3)
        assert await r.push() == Delivered()
        assert r.signer.count == 2


async def test_the_resend_shares_the_deadline_T131(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if len(r.peer.calls) == 1:
            await trio.sleep(3)
            call.reply(403, EXPIRED)

    async with rig(answer) as r:
        before = trio.current_time()
        assert await r.push() == Transient("timeout", 1.0)
        assert trio.current_time() - before == pytest.approx(10)
        assert len(r.peer.calls) == 2


async def stall_body(call: Call) -> None:
    call.head(410)
    call.data(b'{"reason":"Unregis')


@pytest.mark.parametrize("answer", [ignore, stall_body], ids=["headers", "body"])
async def test_a_stalled_answer_ends_at_10_s_T132_B047(autojump_clock: trio.abc.Clock, answer: Answer) -> None:
    async with rig(answer) as r:
        before = trio.current_time()
        assert await r.push() == Transient("timeout", 1.0)
        assert trio.current_time() - before == pytest.approx(10)


async def test_a_decided_status_does_not_wait_for_its_stalled_body(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(503)
        call.data(b'{"reason":"Shut')

    async with rig(answer) as r:
        before = trio.current_time()
        assert await r.push() == Transient("http_503", 1.0)
        assert trio.current_time() == before


async def test_an_oversized_body_is_rejected_and_a_gone_server_transient_T134(autojump_clock: trio.abc.Clock) -> None:
    async with rig(answers((400, b"x" * 16_385))) as r:
        assert await r.push() == Rejected("http_400")
        r.peer.refuse = "connect"
        await r.peer.lines[0].cut()
        await trio.testing.wait_all_tasks_blocked()
        assert await r.push() == Transient("connect", 1.0)


@pytest.mark.parametrize("token", ["", "abc", "not hex!", "ab cd", "../../x", "ab\r\nx: y"])
async def test_a_token_that_is_not_hex_causes_no_request_T135_B019(autojump_clock: trio.abc.Clock, token: str) -> None:
    async with rig() as r:
        assert await r.push(token) == Rejected("token_not_hex")
        assert r.peer.opened == 0


async def test_a_token_of_108_digits_is_sent_B017(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.push("0f" * 54) == Delivered()


async def test_a_bad_token_says_nothing_about_the_next_B021_B025(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if call.path.endswith("/abcd"):
            call.reply(400, b'{"reason":"BadDeviceToken"}')
        else:
            call.reply(200)

    async with rig(answer) as r:
        assert await r.push("abcd") == Mismatch("BadDeviceToken")
        assert await r.push() == Delivered()
        assert await r.push("cd" * 32) == Delivered()


async def test_a_wrong_environment_is_one_warning_for_all_recipients_B013(autojump_clock: trio.abc.Clock) -> None:
    with structlog.testing.capture_logs() as events:
        async with rig(answers((400, b'{"reason":"BadDeviceToken"}'))) as r:
            for _ in range(8):
                assert set(await r.push_many(250)) == {Mismatch("BadDeviceToken")}
    assert events == [
        {
            "event": "provider_refuses",
            "log_level": "warning",
            "channel": "apns",
            "reason": "BadDeviceToken",
            "look_at": "push.apns.environment",
        }
    ]


async def test_end_to_end_answers_for_one_channel_T156(autojump_clock: trio.abc.Clock) -> None:
    script = {
        "01": (410, "Unregistered", Terminal("Unregistered")),
        "02": (410, "ExpiredToken", Terminal("ExpiredToken")),
        "03": (400, "BadDeviceToken", Mismatch("BadDeviceToken")),
        "04": (400, "DeviceTokenNotForTopic", Mismatch("DeviceTokenNotForTopic")),
        "05": (400, "Unregistered", Rejected("Unregistered")),
        "06": (410, "UnknownReason", Rejected("http_410")),
        "07": (403, "ExpiredProviderToken", Rejected("ExpiredProviderToken")),
    }
    mended = False

    async def answer(call: Call) -> None:
        status, reason, _ = script[call.path[-2:]]
        call.reply(200) if mended else call.reply(status, json.dumps({"reason": reason}).encode())

    async with rig(answer) as r:
        for token, (_, _, outcome) in script.items():
            assert await r.push(token) == outcome
        mended = True
        assert await r.push("03") == Delivered()


def test_the_signature_type_is_what_a_signer_has() -> None:
    signer: Sign = CountingSigner()
    assert signer({"iss": TEAM_ID}, {"kid": KEY_ID, "typ": None}).count(".") == 2
