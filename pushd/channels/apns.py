"""APNs: one push over HTTP/2, and what came of it (PUSH-060, PUSH-061, PUSH-069).

`ApnsSender` knows requests: host, topic, push type, priority, collapse id and body come with each one. `ApnsChannel`
turns a delivery into such a request.
"""

from __future__ import annotations

from pathlib import Path

import trio
from attrs import field, frozen

from pushd.channels.apns_jwt import ProviderJwt, es256
from pushd.channels.credentials import CredentialsFailed
from pushd.channels.http2 import ConnectionFailed, Http2Client, Origin, literal, provider_origin
from pushd.core import payloads
from pushd.core.credentials import parse_apns_key
from pushd.core.providers import apns
from pushd.core.providers.answers import SetupWatch
from pushd.model import ATTEMPT_S, Delivery, Outcome, Transient
from pushd.telemetry import Event, get_logger

HOSTS = {"production": "api.push.apple.com", "sandbox": "api.sandbox.push.apple.com"}

_TIMEOUT = Transient("timeout", apns.RETRY_S)
_NO_CREDENTIALS = Transient("credentials", apns.RETRY_S)
_MAX_PREPARED = 64

log = get_logger()


@frozen
class ApnsRequest:
    """One push.

    Args:
        origin: which APNs host.
        token: device token, hex.
        topic: `apns-topic`: the bundle id, with a suffix for some push types.
        body: the JSON payload.
        push_type: `apns-push-type`.
        priority: `apns-priority`, 1, 5 or 10.
        collapse_id: `apns-collapse-id`, at most 64 bytes, or None.
    """

    origin: Origin
    token: str = field(repr=False)
    topic: str
    body: bytes = field(repr=False)
    push_type: str = "background"
    priority: int = 5
    collapse_id: str | None = field(default=None, repr=False)


class ApnsSender:
    """Sends requests with one provider key; knows no subscription and no table."""

    def __init__(self, client: Http2Client, tokens: ProviderJwt) -> None:
        self._client = client
        self._tokens = tokens
        self._prepared: dict[tuple[str, str, str, int], tuple[bytes, bytes]] = {}
        self._bearer = ("", b"")

    async def send(self, request: ApnsRequest) -> Outcome:
        """Send once, within 10 s in all: credentials, connecting, waiting for a stream, answer, a resend."""
        if not apns.is_device_token(request.token):
            return apns.UNUSABLE_TOKEN
        with trio.move_on_after(ATTEMPT_S):
            try:
                return await self._send(request)
            except CredentialsFailed:
                return _NO_CREDENTIALS
            except ConnectionFailed as failure:
                return Transient(failure.kind, apns.RETRY_S)
        return _TIMEOUT

    async def _send(self, request: ApnsRequest) -> Outcome:
        used = self._tokens.current()
        outcome = await self._ask(request, used)
        if outcome is apns.EXPIRED:
            self._tokens.drop(used)
            used = self._tokens.current()
            outcome = await self._ask(request, used)
            if outcome is apns.EXPIRED:
                self._tokens.drop(used)
        return outcome

    async def _ask(self, request: ApnsRequest, jwt: str) -> Outcome:
        block = self._header_block(request, jwt)
        response = await self._client.request(request.origin, block, request.body, apns.BODY_WAIT_S)
        return apns.judge(response.status, response.body)

    def credential_age_s(self) -> float:
        """Seconds since the JWT in use was signed; NaN while there is none."""
        return self._tokens.age_s

    def _header_block(self, request: ApnsRequest, jwt: str) -> bytes:
        key = (request.origin.authority, request.topic, request.push_type, request.priority)
        first, last = self._prepared.get(key) or self._prepare(*key)
        if self._bearer[0] != jwt:
            self._bearer = (jwt, literal(b"authorization", b"bearer " + jwt.encode("ascii"), private=True))
        path = literal(b":path", b"/3/device/" + request.token.encode("ascii"), private=True)
        block = first + path + last + self._bearer[1]
        if request.collapse_id is None:
            return block
        return block + literal(b"apns-collapse-id", request.collapse_id.encode("ascii"), private=True)

    def _prepare(self, authority: str, topic: str, push_type: str, priority: int) -> tuple[bytes, bytes]:
        """The fields before and after `:path` that are the same for every push of a kind."""
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        prepared = self._prepared[authority, topic, push_type, priority] = (
            literal(b":method", b"POST")
            + literal(b":scheme", b"https")
            + literal(b":authority", authority.encode("ascii")),
            literal(b"content-type", b"application/json")
            + literal(b"apns-topic", topic.encode("ascii"))
            + literal(b"apns-push-type", push_type.encode("ascii"))
            + literal(b"apns-priority", str(priority).encode("ascii")),
        )
        return prepared


class ApnsChannel:
    """Background pushes for deliveries on the APNs channel."""

    def __init__(self, sender: ApnsSender, origin: Origin, bundle_id: str) -> None:
        self._sender = sender
        self._origin = origin
        self._bundle_id = bundle_id
        self._setup = SetupWatch(apns.LOOK_AT)

    def credential_age_s(self) -> float:
        """Seconds since the credential in use was made; NaN while there is none."""
        return self._sender.credential_age_s()

    async def attempt(self, delivery: Delivery) -> Outcome:
        """One attempt at `delivery`, within 10 s."""
        outcome = await self._sender.send(
            ApnsRequest(
                origin=self._origin,
                token=delivery.config.target,
                topic=self._bundle_id,
                body=payloads.apns_body(delivery.topic, delivery.sequence_id),
                collapse_id=payloads.topic_text(delivery.topic),
            )
        )
        suspicion = self._setup.notice(outcome)
        if suspicion is not None:
            reason, look_at = suspicion
            log.warning(Event.PROVIDER_REFUSES, channel="apns", reason=reason, look_at=look_at)
        return outcome


def make_apns_channel(
    client: Http2Client,
    *,
    key_pem: str,
    key_id: str,
    team_id: str,
    bundle_id: str,
    environment: str,
    endpoint: str | None = None,
    ca_file: Path | None = None,
) -> ApnsChannel:
    """The channel for the `[push.apns]` block; its key has signed once.

    Raises:
        ConfigError: the key is unusable; the text names `push.apns.key`.
    """
    tokens = ProviderJwt(es256(parse_apns_key(key_pem)), team_id, key_id)
    tokens.check()
    origin = provider_origin(HOSTS[environment], endpoint, ca_file, pings=True)
    return ApnsChannel(ApnsSender(client, tokens), origin, bundle_id)
