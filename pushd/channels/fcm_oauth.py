"""The OAuth token of FCM: a signed assertion exchanged for a bearer token, shared by all sends (PUSH-062, RFC 7523)."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import httpx2
import jwt
import trio
from attrs import field, frozen

from pushd.channels.credentials import CredentialsFailed
from pushd.core.credentials import SERVICE_ACCOUNT_ERROR, ServiceAccount
from pushd.errors import ConfigError
from pushd.model import ATTEMPT_S

SCOPE = "https://www.googleapis.com/auth/firebase.messaging"

_GRANT_TYPE = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_ASSERTION_S = 3_600  # the longest Google takes
_EARLY_S = 20.0  # a token in use must outlive the attempt that carries it, with room for a slow clock
_FAILURE_S = 1.0
_MAX_BODY_BYTES = 16_384


@frozen
class _Token:
    text: str = field(repr=False)
    lifetime_s: float


class AccessTokens:
    """Fetches and keeps the token.

    One exchange runs at a time, in a nursery that was handed down, under its own bound: a caller that is cancelled
    while it waits does not end the exchange for the others. Its failure answers everybody who asks within a second.

    Args:
        account: whose token.
        exchanging: where an exchange runs.
        transport: makes the HTTP transport of one exchange; see `token_transport`.
        wall_clock_s: seconds since 1970, for the assertion.
    """

    def __init__(
        self,
        account: ServiceAccount,
        exchanging: trio.Nursery,
        transport: Callable[[], httpx2.AsyncBaseTransport],
        wall_clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._account = account
        self._exchanging = exchanging
        self._transport = transport
        self._wall_clock_s = wall_clock_s
        self._token: str | None = None
        self._since = -math.inf
        self._fresh_until = -math.inf
        self._failing_until = -math.inf
        self._running: trio.Event | None = None

    def check(self) -> None:
        """Sign an assertion once and throw it away.

        Raises:
            ConfigError: the key cannot sign; the text names `push.fcm.service_account`.
        """
        try:
            self._assertion()
        except (jwt.PyJWTError, ValueError):
            raise ConfigError(SERVICE_ACCOUNT_ERROR) from None

    async def current(self) -> str:
        """The token to use now. Waits as long as the exchange takes; the caller's deadline bounds that.

        Raises:
            CredentialsFailed: the exchange failed, now or within the last second.
        """
        while True:
            now = trio.current_time()
            if self._token is not None and now < self._fresh_until:
                return self._token
            if now < self._failing_until:
                raise CredentialsFailed
            if self._running is None:
                self._running = trio.Event()
                self._exchanging.start_soon(self._refresh, self._running)
            await self._running.wait()

    @property
    def age_s(self) -> float:
        """Seconds since the token in use was fetched; NaN while there is none."""
        return math.nan if self._token is None else trio.current_time() - self._since

    def drop(self, used: str) -> None:
        """Forget `used`, which FCM refused; a newer one stays."""
        if self._token == used:
            self._token = None

    async def _refresh(self, done: trio.Event) -> None:
        token = None
        try:
            with trio.move_on_after(ATTEMPT_S):
                token = await self._exchange()
        finally:
            now = trio.current_time()
            if token is None:
                self._failing_until = now + _FAILURE_S
            else:
                self._token, self._since = token.text, now
                self._fresh_until = now + token.lifetime_s - _EARLY_S
            self._running = None
            done.set()

    async def _exchange(self) -> _Token | None:
        try:
            assertion = self._assertion()
        except (jwt.PyJWTError, ValueError):
            return None
        form = {"grant_type": _GRANT_TYPE, "assertion": assertion}
        # A client per exchange, one an hour: nothing of a cut exchange can be left in a pool. A redirect is an answer
        # like any other, and nothing of the environment (proxies, netrc) is looked at.
        try:
            async with (
                httpx2.AsyncClient(
                    transport=self._transport(), trust_env=False, follow_redirects=False, timeout=None
                ) as client,
                client.stream(
                    "POST", self._account.token_uri, data=form, headers={"accept-encoding": "identity"}
                ) as response,
            ):
                if response.status_code != 200:
                    return None
                body = bytearray()
                async with aclosing(response.aiter_raw()) as chunks:  # raw: a compressed bomb stays compressed
                    async for chunk in chunks:
                        body += chunk
                        if len(body) > _MAX_BODY_BYTES:
                            return None
                return read_token(bytes(body))
        except (httpx2.HTTPError, OSError):
            return None

    def _assertion(self) -> str:
        issued = int(self._wall_clock_s())
        claims = {
            "iss": self._account.client_email,
            "scope": SCOPE,
            "aud": self._account.token_uri,
            "iat": issued,
            "exp": issued + _ASSERTION_S,
        }
        return jwt.encode(claims, self._account.private_key, algorithm="RS256")


def token_transport(ca_file: Path | None) -> Callable[[], httpx2.AsyncBaseTransport]:
    """Connections to the token endpoint, without proxies.

    Args:
        ca_file: PEM file with the only authorities to trust; the system's where None.
    """
    tls = ssl.create_default_context(cafile=ca_file)
    return lambda: httpx2.AsyncHTTPTransport(verify=tls, trust_env=False)


def read_token(body: bytes) -> _Token | None:
    """The token in a 200 answer of the token endpoint, or None when it is of no use (RFC 6749 §5.1)."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    text, kind, lifetime = answer.get("access_token"), answer.get("token_type"), answer.get("expires_in")
    if not isinstance(text, str) or not text or not text.isascii() or not text.isprintable():
        return None
    if not isinstance(kind, str) or kind.lower() != "bearer":
        return None
    if not isinstance(lifetime, int | float) or isinstance(lifetime, bool) or not lifetime > _EARLY_S:
        return None
    return _Token(text, float(min(lifetime, _ASSERTION_S)))
