"""The provider token of APNs: one ES256 JWT, shared by every send (PUSH-060)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import jwt
import trio
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from pushd.channels.credentials import CredentialsFailed
from pushd.core.credentials import APNS_KEY_ERROR
from pushd.errors import ConfigError

LIFETIME_S = 55 * 60.0  # APNs refuses tokens above 60 minutes, and new ones more often than every 20
_FAILURE_S = 1.0

Sign = Callable[[dict[str, object], dict[str, object]], str]
"""Claims and header fields to a signed JWT; raises `jwt.PyJWTError` or ValueError."""


class ProviderJwt:
    """Mints and keeps the JWT.

    Signing takes about 0.1 ms and never awaits, so that any number of concurrent users cause one signature. The age is
    measured on the monotonic clock and looked at on every use: neither a step of the wall clock nor an hour of idling
    leaves an old token in use or mints one too many. The token is minted at the first send, so that an instance which
    takes over only to lose the lock again costs Apple nothing.

    Args:
        sign: see `es256`.
        team_id: the issuer.
        key_id: names the key.
        wall_clock_s: seconds since 1970, for `iat`.
    """

    def __init__(self, sign: Sign, team_id: str, key_id: str, wall_clock_s: Callable[[], float] = time.time) -> None:
        self._sign = sign
        self._team_id = team_id
        self._key_id = key_id
        self._wall_clock_s = wall_clock_s
        self._token: str | None = None
        self._fresh_until = -math.inf
        self._failing_until = -math.inf

    def check(self) -> None:
        """Sign once and throw the result away.

        Raises:
            ConfigError: the key cannot sign; the text names `push.apns.key`.
        """
        try:
            self._mint()
        except (jwt.PyJWTError, ValueError):
            raise ConfigError(APNS_KEY_ERROR) from None

    def current(self) -> str:
        """The JWT to use now.

        Raises:
            CredentialsFailed: signing failed, now or within the last second.
        """
        now = trio.current_time()
        if self._token is not None and now < self._fresh_until:
            return self._token
        if now < self._failing_until:
            raise CredentialsFailed
        try:
            token = self._mint()
        except (jwt.PyJWTError, ValueError):
            self._failing_until = now + _FAILURE_S
            raise CredentialsFailed from None
        self._token, self._fresh_until = token, now + LIFETIME_S
        return token

    @property
    def age_s(self) -> float:
        """Seconds since the JWT in use was signed; NaN while there is none."""
        return math.nan if self._token is None else trio.current_time() - (self._fresh_until - LIFETIME_S)

    def drop(self, used: str) -> None:
        """Forget `used`, which APNs calls expired; a newer one stays (PUSH-061)."""
        if self._token == used:
            self._token = None

    def _mint(self) -> str:
        claims: dict[str, object] = {"iss": self._team_id, "iat": int(self._wall_clock_s())}
        # PyJWT adds `typ` unless told otherwise; APNs asks for alg and kid.
        return self._sign(claims, {"kid": self._key_id, "typ": None})


def es256(key: EllipticCurvePrivateKey) -> Sign:
    """A signer with the P-256 key."""

    def sign(claims: dict[str, object], header: dict[str, object]) -> str:
        return jwt.encode(claims, key, algorithm="ES256", headers=header)

    return sign
