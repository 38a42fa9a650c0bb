"""The FCM sender: exact messages, the OAuth exchange, the 10 s of an attempt. Clocks are virtual."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import hpack
import httpx2
import jwt
import pytest
import structlog.testing
import trio
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pushd.channels.fcm import FcmChannel, FcmRequest, FcmSender, make_fcm_channel
from pushd.channels.fcm_oauth import SCOPE, AccessTokens, read_token
from pushd.channels.http2 import open_http2_client
from pushd.core.credentials import GOOGLE_TOKEN_URI, ServiceAccount
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
from tests.channels.http2_peer import QUIET_ORIGIN, Call, Peer, accept, ignore

KEY = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
EMAIL = "push@example-project.iam.gserviceaccount.com"
PROJECT = "example-project"
ACCOUNT = ServiceAccount(PROJECT, EMAIL, KEY, GOOGLE_TOKEN_URI)
TOKEN = "dEvIcE:APA91b-token"
TOPIC = b"\x01" * 33
SEQUENCE_ID = 9_007_199_254_740_993
FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
QUOTA_FAILURE = "type.googleapis.com/google.rpc.QuotaFailure"
NO_CREDENTIALS = Transient("credentials", 10.0)
TIMEOUT = Transient("timeout", 10.0)

Answer = Callable[[Call], Awaitable[None]]


class TokenEndpoint:
    """The OAuth endpoint: keeps requests, answers in turn (status and body, or an exception), takes time."""

    def __init__(self) -> None:
        self.requests: list[httpx2.Request] = []
        self.delay_s = 0.05
        self.script: list[tuple[int, bytes] | Exception] = []
        self.stalls = False

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        await trio.sleep(self.delay_s)
        answer = self.script.pop(0) if self.script else grant(f"ya29.token-{len(self.requests)}")
        if isinstance(answer, Exception):
            raise answer
        status, body = answer
        return httpx2.Response(status, content=self._stream(body), headers={"location": "https://127.0.0.1/"})

    async def _stream(self, body: bytes) -> AsyncIterator[bytes]:
        yield body
        if self.stalls:
            await trio.sleep_forever()


def grant(token: str, *, kind: str = "Bearer", expires_in: object = 3_599, status: int = 200) -> tuple[int, bytes]:
    return status, json.dumps({"access_token": token, "token_type": kind, "expires_in": expires_in}).encode()


class Rig:
    def __init__(self, peer: Peer, channel: FcmChannel, endpoint: TokenEndpoint) -> None:
        self.peer = peer
        self.channel = channel
        self.endpoint = endpoint

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

    def bearers(self) -> list[str]:
        return [call.headers["authorization"] for call in self.peer.calls]


def delivery(token: str = TOKEN) -> Delivery:
    return Delivery(
        sequence_id=SEQUENCE_ID,
        topic=TOPIC,
        recipient_id=b"r" * 32,
        config=DeliveryConfig(Channel.FCM, token),
        secret_hash=b"\x09" * 32,
    )


WALL_CLOCK_S = 1_700_000_000.0


@asynccontextmanager
async def rig(answer: Answer = accept) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        peer, endpoint = Peer(nursery, answer), TokenEndpoint()
        async with open_http2_client(peer.opener) as client:
            tokens = AccessTokens(ACCOUNT, nursery, lambda: httpx2.MockTransport(endpoint), lambda: WALL_CLOCK_S)
            sender = FcmSender(client, tokens, PROJECT, lambda: WALL_CLOCK_S)
            yield Rig(peer, FcmChannel(sender, QUIET_ORIGIN), endpoint)
        nursery.cancel_scope.cancel()


def error(status: str = "SCRIPTED", *codes: str, kind: str = FCM_ERROR) -> bytes:
    details = [{"@type": kind, "errorCode": code} for code in codes]
    return json.dumps({"error": {"status": status, "details": details}}).encode()


def reply(status: int, body: bytes = b"", *fields: tuple[str, str]) -> Answer:
    async def answer(call: Call) -> None:
        call.reply(status, body, *fields)

    return answer


async def test_the_oauth_exchange_T136(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.push() == Delivered()
        (request,) = r.endpoint.requests
        assert (request.method, str(request.url)) == ("POST", GOOGLE_TOKEN_URI)
        assert request.headers["content-type"] == "application/x-www-form-urlencoded"
        form = parse_qs(request.content.decode())
        assert set(form) == {"grant_type", "assertion"}
        assert form["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
        (assertion,) = form["assertion"]
        assert jwt.get_unverified_header(assertion)["alg"] == "RS256"
        claims = jwt.decode(
            assertion, KEY.public_key(), algorithms=["RS256"], audience=GOOGLE_TOKEN_URI, options={"verify_exp": False}
        )
        assert claims == {
            "iss": EMAIL,
            "scope": SCOPE,
            "aud": GOOGLE_TOKEN_URI,
            "iat": int(WALL_CLOCK_S),
            "exp": int(WALL_CLOCK_S) + 3_600,
        }
        assert SCOPE == "https://www.googleapis.com/auth/firebase.messaging"


async def test_the_exact_message_T137(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.push() == Delivered()
        (call,) = r.peer.calls
        assert call.headers == {
            ":method": "POST",
            ":scheme": "https",
            ":authority": "fcm.googleapis.com",
            ":path": "/v1/projects/example-project/messages:send",
            "content-type": "application/json",
            "authorization": "Bearer ya29.token-1",
        }
        assert json.loads(call.body) == {
            "message": {
                "token": TOKEN,
                "data": {"topic": base64.b64encode(TOPIC).decode(), "sequence_id": "9007199254740993"},
                "android": {"priority": "HIGH"},
                "apns": {
                    "headers": {"apns-priority": "5", "apns-push-type": "background"},
                    "payload": {"aps": {"content-available": 1}},
                },
            }
        }


async def test_a_token_cannot_leave_its_json_string(autojump_clock: trio.abc.Clock) -> None:
    token = 'a","topic":"evil\u2028\n\U0001f600'
    async with rig() as r:
        assert await r.push(token) == Delivered()
        assert json.loads(r.peer.calls[0].body)["message"]["token"] == token


async def test_a_request_carries_the_body_it_was_given(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        sender = r.channel._sender
        assert await sender.send(FcmRequest(QUIET_ORIGIN, b'{"message":{}}')) == Delivered()
        assert r.peer.calls[0].body == b'{"message":{}}'


async def test_the_credential_is_never_indexed_S091(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        block = r.channel._sender._header_block("fcm.googleapis.com", "ya29.secret")
    fields = hpack.Decoder().decode(block, raw=True)
    assert [name for name, _ in (field for field in fields if not field.indexable)] == [b"authorization"]


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (200, b'{"name":"projects/p/messages/1"}', Delivered()),
        (404, error("NOT_FOUND", "UNREGISTERED"), Terminal("UNREGISTERED")),
        (403, error("PERMISSION_DENIED", "SENDER_ID_MISMATCH"), Mismatch("SENDER_ID_MISMATCH")),
        (400, error("INVALID_ARGUMENT", "INVALID_ARGUMENT"), Rejected("INVALID_ARGUMENT")),
        (401, error("UNAUTHENTICATED", "THIRD_PARTY_AUTH_ERROR"), Rejected("THIRD_PARTY_AUTH_ERROR")),
        (404, error("UNREGISTERED"), Rejected("http_404")),
        (403, error("SENDER_ID_MISMATCH"), Rejected("http_403")),
        (404, error("X", "UNREGISTERED", kind="type.googleapis.com/other"), Rejected("http_404")),
        (400, error("X", "SOMETHING_NEW"), Rejected("http_400")),
        (503, error("UNAVAILABLE"), Transient("http_503", 10.0)),
        (500, error("INTERNAL", "INTERNAL"), Transient("http_500", 10.0)),
        (503, error("UNAVAILABLE", "UNAVAILABLE"), Transient("http_503", 10.0)),
        (429, b"", Transient("quota", 60.0)),
        (500, b"", Transient("http_500", 10.0)),
    ],
)
async def test_answers_pass_through_the_sender_T138_T157_B067_B069_B081(
    autojump_clock: trio.abc.Clock, status: int, body: bytes, outcome: Outcome
) -> None:
    async with rig(reply(status, body)) as r:
        assert await r.push() == outcome
        assert (len(r.peer.calls), len(r.endpoint.requests)) == (1, 1)


async def test_a_redirect_is_rejected_and_not_followed_T138(autojump_clock: trio.abc.Clock) -> None:
    async with rig(reply(302, b"", ("location", "https://127.0.0.1/"))) as r:
        assert await r.push() == Rejected("http_302")
        assert (len(r.peer.calls), r.peer.opened) == (1, 1)


@pytest.mark.parametrize(
    ("status", "body", "header", "delay_s"),
    [
        (429, error("RESOURCE_EXHAUSTED"), None, 60),
        (429, b"", "120", 120),
        (503, error("UNAVAILABLE", "UNAVAILABLE"), "42", 42),
        (503, b"<html>", "999", 300),
        (500, error("X", "INTERNAL"), "80", 80),
        (400, error("X", "", kind=QUOTA_FAILURE), "1", 60),
        (503, error("X", "", kind=QUOTA_FAILURE), None, 60),
        (503, b"", "Tue, 14 Nov 2023 22:15:20 GMT", 120),
    ],
)
async def test_delays_come_from_status_details_and_header_T139_T141(
    autojump_clock: trio.abc.Clock, status: int, body: bytes, header: str | None, delay_s: float
) -> None:
    fields = [] if header is None else [("retry-after", header)]
    async with rig(reply(status, body, *fields)) as r:
        outcome = await r.push()
        assert isinstance(outcome, Transient)
        assert outcome.delay_s == delay_s


async def test_64_senders_share_one_exchange_cold_and_after_expiry_T142_B057(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with rig() as r:
        assert await r.push_many(64) == [Delivered()] * 64
        assert len(r.endpoint.requests) == 1
        await trio.sleep(3_599 - 20)
        assert await r.push_many(64) == [Delivered()] * 64
        assert len(r.endpoint.requests) == 2
        assert set(r.bearers()) == {"Bearer ya29.token-1", "Bearer ya29.token-2"}


@pytest.mark.parametrize(("expires_in", "kept_s"), [(3_599, 3_579), (86_400, 3_580), (100, 80), (21, 1)])
async def test_a_token_is_refreshed_20_s_early_and_at_least_hourly_B057(
    autojump_clock: trio.abc.Clock, expires_in: int, kept_s: float
) -> None:
    async with rig() as r:
        r.endpoint.delay_s = 0
        r.endpoint.script = [grant("first", expires_in=expires_in)]
        await r.push()
        await trio.sleep(kept_s - 0.5)
        await r.push()
        assert len(r.endpoint.requests) == 1
        await trio.sleep(0.5)
        await r.push()
        assert len(r.endpoint.requests) == 2


async def test_the_age_of_the_token_is_known_while_there_is_one(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert math.isnan(r.channel.credential_age_s())
        await r.push()
        fetched = trio.current_time()
        await trio.sleep(30)
        assert r.channel.credential_age_s() == pytest.approx(trio.current_time() - fetched, abs=1)


async def test_a_failed_exchange_is_shared_and_recovers_with_one_more_T142(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        r.endpoint.script = [(500, b"no")]
        assert await r.push_many(64) == [NO_CREDENTIALS] * 64
        assert (len(r.endpoint.requests), len(r.peer.calls)) == (1, 0)
        assert await r.push() == NO_CREDENTIALS
        await trio.sleep(1)
        assert await r.push_many(64) == [Delivered()] * 64
        assert len(r.endpoint.requests) == 2


USELESS = {
    "kind": grant("t", kind="MAC"),
    "short": grant("t", expires_in=20),
    "text": grant("t", expires_in="3600"),
    "true": grant("t", expires_in=True),
    "nan": grant("t", expires_in=float("nan")),
    "empty": grant(""),
    "line break": grant("a\r\nb: c"),
    "status": grant("t", status=201),
    "redirect": grant("t", status=302),
    "not json": (200, b"<html>"),
    "array": (200, b"[]"),
    "unknown clock": (400, b'{"error":"invalid_grant"}'),
    "network": httpx2.ConnectError("no"),
    "oversized": (200, grant("t")[1] + b" " * 16_384),
}


@pytest.mark.parametrize("name", sorted(USELESS))
async def test_a_useless_oauth_answer_sends_nothing_T147_T144_B071(autojump_clock: trio.abc.Clock, name: str) -> None:
    async with rig() as r:
        r.endpoint.script = [USELESS[name]]
        assert await r.push() == NO_CREDENTIALS
        assert (len(r.endpoint.requests), r.peer.opened) == (1, 0)


def test_bearer_is_taken_in_any_case() -> None:
    token = read_token(b'{"access_token":"t","token_type":"bearer","expires_in":100}')
    assert token is not None
    assert (token.text, token.lifetime_s) == ("t", 100.0)
    assert "'t'" not in repr(token)


async def test_a_slow_exchange_counts_inside_the_attempt_T143_B073(autojump_clock: trio.abc.Clock) -> None:
    async with rig(ignore) as r:
        r.endpoint.delay_s = 3
        before = trio.current_time()
        assert await r.push() == TIMEOUT
        assert trio.current_time() - before == pytest.approx(10)
        assert len(r.peer.calls) == 1


async def test_a_stalled_exchange_ends_at_10_s_and_sends_nothing_T143_B073(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        r.endpoint.delay_s = 1_000
        before = trio.current_time()
        assert set(await r.push_many(8)) <= {TIMEOUT, NO_CREDENTIALS}
        assert trio.current_time() - before == pytest.approx(10)
        assert r.peer.opened == 0


async def test_a_stalled_oauth_body_ends_at_10_s_T143(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        r.endpoint.stalls = True
        before = trio.current_time()
        assert await r.push() in (TIMEOUT, NO_CREDENTIALS)
        assert trio.current_time() - before == pytest.approx(10)
        assert r.peer.opened == 0


async def test_a_cancelled_sender_does_not_end_the_exchange_for_others(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        r.endpoint.delay_s = 5
        with trio.move_on_after(1):
            await r.push()
        before = trio.current_time()
        assert await r.push() == Delivered()
        assert trio.current_time() - before == pytest.approx(4)
        assert len(r.endpoint.requests) == 1


async def test_a_stalled_body_of_an_undecided_answer_is_a_timeout_T143(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(404)
        call.data(b'{"error":')

    async with rig(answer) as r:
        before = trio.current_time()
        assert await r.push() == TIMEOUT
        assert trio.current_time() - before == pytest.approx(10)


@pytest.mark.parametrize(
    ("status", "header", "outcome", "waited_s"),
    [(429, None, Transient("quota", 60.0), 0), (503, "120", Transient("http_503", 120.0), 1)],
)
async def test_a_stalled_error_body_keeps_class_and_delay_T145(
    autojump_clock: trio.abc.Clock, status: int, header: str | None, outcome: Outcome, waited_s: float
) -> None:
    async def answer(call: Call) -> None:
        call.head(status, *([] if header is None else [("retry-after", header)]))
        call.data(b'{"error":')

    async with rig(answer) as r:
        r.endpoint.delay_s = 0
        before = trio.current_time()
        assert await r.push() == outcome
        assert trio.current_time() - before == pytest.approx(waited_s)


@pytest.mark.parametrize(
    ("status", "outcome"), [(503, Transient("http_503", 10.0)), (404, Rejected("http_404"))], ids=["503", "404"]
)
async def test_an_oversized_error_body_counts_as_none_T144(
    autojump_clock: trio.abc.Clock, status: int, outcome: Outcome
) -> None:
    body = error("X", "UNREGISTERED") + b" " * 16_384
    async with rig(reply(status, body)) as r:
        assert await r.push() == outcome


async def test_503_is_one_attempt_and_waits_ten_seconds_B059(autojump_clock: trio.abc.Clock) -> None:
    async with rig(reply(503)) as r:
        assert await r.push() == Transient("http_503", 10.0)
        assert len(r.peer.calls) == 1


async def test_an_untyped_401_drops_only_the_token_it_was_sent_with(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        stale = call.headers["authorization"] == "Bearer ya29.token-1"
        if stale and len(r.peer.calls) > 1:
            await trio.sleep(1)  # late answers, when the token has been replaced
        call.reply(401, error("UNAUTHENTICATED")) if stale else call.reply(200)

    async with rig(answer) as r:
        assert await r.push_many(8) == [Rejected("http_401")] * 8
        assert await r.push() == Delivered()
        assert await r.push() == Delivered()
        assert len(r.endpoint.requests) == 2


async def test_a_typed_401_keeps_the_token(autojump_clock: trio.abc.Clock) -> None:
    async with rig(reply(401, error("UNAUTHENTICATED", "THIRD_PARTY_AUTH_ERROR"))) as r:
        for _ in range(3):
            assert await r.push() == Rejected("THIRD_PARTY_AUTH_ERROR")
        assert len(r.endpoint.requests) == 1


async def test_a_lost_connection_is_transient(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        await call.line.cut()

    async with rig(answer) as r:
        assert await r.push() == Transient("closed", 10.0)


async def test_a_wrong_project_is_one_warning_for_all_recipients(autojump_clock: trio.abc.Clock) -> None:
    with structlog.testing.capture_logs() as events:
        async with rig(reply(403, error("PERMISSION_DENIED", "SENDER_ID_MISMATCH"))) as r:
            for _ in range(10):
                assert set(await r.push_many(200)) == {Mismatch("SENDER_ID_MISMATCH")}
    assert len(events) == 1
    assert events[0]["look_at"].startswith("push.fcm.service_account")


def account_text(**changes: object) -> str:
    pem = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {
        "project_id": PROJECT,
        "client_email": EMAIL,
        "private_key": pem,
        "token_uri": GOOGLE_TOKEN_URI,
        **changes,
    }
    return json.dumps(account)


EC_PEM = (
    ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
)


@pytest.mark.parametrize(
    "fault",
    [
        {"project_id": ""},
        {"project_id": "project/other"},
        {"private_key": "unusable"},
        {"private_key": EC_PEM},
        {"token_uri": "https://127.0.0.1/token"},
        {"client_email": ""},
    ],
    ids=["no-project", "project-path", "unusable-key", "ec-key", "token-uri", "no-email"],
)
async def test_a_faulty_service_account_stops_the_start_T073(fault: dict[str, object]) -> None:
    async with open_http2_client() as client, trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match=r"push\.fcm\.service_account") as raised:
            make_fcm_channel(client, nursery, service_account=account_text(**fault))
        text = str(raised.value) + repr(raised.value)
        assert not [value for value in (*fault.values(), EMAIL) if value and str(value) in text]
        assert raised.value.__cause__ is None


async def test_the_channel_of_a_configuration_block() -> None:
    async with open_http2_client() as client, trio.open_nursery() as nursery:
        channel = make_fcm_channel(client, nursery, service_account=account_text())
        assert channel._origin.authority == "fcm.googleapis.com"
        assert not channel._origin.pings
