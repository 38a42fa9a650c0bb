"""FCM: one message over HTTP/2, and what came of it (PUSH-062, PUSH-063, PUSH-069).

`FcmSender` knows requests: origin and body come with each one. `FcmChannel` turns a delivery into such a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import trio
from attrs import field, frozen

from pushd.channels.credentials import CredentialsFailed
from pushd.channels.fcm_oauth import AccessTokens, token_transport
from pushd.channels.http2 import ConnectionFailed, Http2Client, Origin, literal, provider_origin
from pushd.core import payloads
from pushd.core.credentials import parse_service_account
from pushd.core.providers import fcm
from pushd.core.providers.answers import SetupWatch
from pushd.core.providers.retry_after import parse_retry_after
from pushd.model import ATTEMPT_S, Delivery, Outcome, Transient
from pushd.telemetry import Event, get_logger

HOST = "fcm.googleapis.com"

_TIMEOUT = Transient("timeout", fcm.RETRY_S)
_NO_CREDENTIALS = Transient("credentials", fcm.RETRY_S)
_MAX_PREPARED = 64

log = get_logger()


@frozen
class FcmRequest:
    """One message: where to, and the JSON body of `messages:send` with token, data and per-platform settings in it."""

    origin: Origin
    body: bytes = field(repr=False)


class FcmSender:
    """Sends requests for one project; knows no subscription and no table."""

    def __init__(
        self,
        client: Http2Client,
        tokens: AccessTokens,
        project_id: str,
        wall_clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._tokens = tokens
        self._project_id = project_id
        self._wall_clock_s = wall_clock_s
        self._prepared: dict[str, bytes] = {}
        self._bearer = ("", b"")

    async def send(self, request: FcmRequest) -> Outcome:
        """Send once, within 10 s in all: credentials, connecting, waiting for a stream, answer."""
        with trio.move_on_after(ATTEMPT_S):
            try:
                return await self._send(request)
            except CredentialsFailed:
                return _NO_CREDENTIALS
            except ConnectionFailed as failure:
                return Transient(failure.kind, fcm.RETRY_S)
        return _TIMEOUT

    async def _send(self, request: FcmRequest) -> Outcome:
        used = await self._tokens.current()
        block = self._header_block(request.origin.authority, used)
        response = await self._client.request(request.origin, block, request.body, fcm.BODY_WAIT_S)
        if response.status == 200:
            return fcm.DELIVERED
        if fcm.drops_credentials(response.status, response.body):
            self._tokens.drop(used)
        now = datetime.fromtimestamp(self._wall_clock_s(), UTC)
        return fcm.judge(response.status, response.body, parse_retry_after(response.header(b"retry-after"), now))

    def credential_age_s(self) -> float:
        """Seconds since the OAuth token in use was fetched; NaN while there is none."""
        return self._tokens.age_s

    def _header_block(self, authority: str, token: str) -> bytes:
        prepared = self._prepared.get(authority) or self._prepare(authority)
        if self._bearer[0] != token:
            self._bearer = (token, literal(b"authorization", b"Bearer " + token.encode("ascii"), private=True))
        return prepared + self._bearer[1]

    def _prepare(self, authority: str) -> bytes:
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        path = f"/v1/projects/{self._project_id}/messages:send"
        prepared = self._prepared[authority] = (
            literal(b":method", b"POST")
            + literal(b":scheme", b"https")
            + literal(b":authority", authority.encode("ascii"))
            + literal(b":path", path.encode("ascii"))
            + literal(b"content-type", b"application/json")
        )
        return prepared


class FcmChannel:
    """Data messages for deliveries on the FCM channel."""

    def __init__(self, sender: FcmSender, origin: Origin) -> None:
        self._sender = sender
        self._origin = origin
        self._setup = SetupWatch(fcm.LOOK_AT)

    def credential_age_s(self) -> float:
        """Seconds since the credential in use was made; NaN while there is none."""
        return self._sender.credential_age_s()

    async def attempt(self, delivery: Delivery) -> Outcome:
        """One attempt at `delivery`, within 10 s."""
        body = payloads.fcm_body(delivery.config.target, delivery.topic, delivery.sequence_id)
        outcome = await self._sender.send(FcmRequest(self._origin, body))
        suspicion = self._setup.notice(outcome)
        if suspicion is not None:
            reason, look_at = suspicion
            log.warning(Event.PROVIDER_REFUSES, channel="fcm", reason=reason, look_at=look_at)
        return outcome


def make_fcm_channel(
    client: Http2Client,
    exchanging: trio.Nursery,
    *,
    service_account: str,
    endpoint: str | None = None,
    ca_file: Path | None = None,
) -> FcmChannel:
    """The channel for the `[push.fcm]` block.

    Args:
        client: sends the messages.
        exchanging: runs the OAuth exchanges; must outlive the channel's last attempt.
        service_account: its JSON text.
        endpoint: a fake provider on this machine; the account's token_uri may then be local too.
        ca_file: authority to trust instead of the system's.

    Raises:
        ConfigError: the service account is unusable; the text names `push.fcm.service_account`.
    """
    account = parse_service_account(service_account, allow_loopback_token_uri=endpoint is not None)
    # Google answers pings with "too many pings": an idle connection is closed instead.
    origin = provider_origin(HOST, endpoint, ca_file, pings=False)
    tokens = AccessTokens(account, exchanging, token_transport(ca_file))
    tokens.check()
    return FcmChannel(FcmSender(client, tokens, account.project_id), origin)
