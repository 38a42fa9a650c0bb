"""May this call pass? Bearer tokens judged by their text, a set of keys, a policy and a time (PUSH-010).

The key is chosen before anything is verified, by `kid` or by being the only one with the token's algorithm, so a token
can never pick how it is checked. Claims are read only after the signature holds, and none of them is used for anything
but admission.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
from collections.abc import Iterable
from typing import Any

import jwt
from attrs import field, frozen
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from pushd.core.credentials import MIN_RSA_BITS, JwtAlgorithm
from pushd.errors import Code

ALGORITHMS: frozenset[str] = frozenset(("RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"))
# The bounds other backends of this protocol have, so that tokens and key sets fit either.
MAX_TOKEN_BYTES = 8_192
MAX_KID_BYTES = 256
MAX_KEYS = 64


class Reason(enum.StrEnum):
    """Why a call was turned away: the closed label of `xmtp_auth_rejections_total`."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNSUPPORTED_ALG = "unsupported_alg"
    UNTRUSTED = "untrusted"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    AUDIENCE = "audience"
    ISSUER = "issuer"
    SCOPE = "scope"


@frozen
class Rejection:
    """A refusal: metric label, status and constant text."""

    reason: Reason
    message: str
    code: Code = Code.UNAUTHENTICATED


NO_TOKEN = Rejection(Reason.MISSING, "missing bearer token")
NOT_BEARER = Rejection(Reason.MALFORMED, "authorization header is not a bearer token")
NOT_JWT = Rejection(Reason.MALFORMED, "token is not a supported JWT")
UNSUPPORTED = Rejection(Reason.UNSUPPORTED_ALG, NOT_JWT.message)
UNTRUSTED = Rejection(Reason.UNTRUSTED, "token signature is not trusted")
EXPIRED = Rejection(Reason.EXPIRED, "token has expired")
NOT_YET_VALID = Rejection(Reason.NOT_YET_VALID, "token is not yet valid")
WRONG_AUDIENCE = Rejection(Reason.AUDIENCE, "token audience is not allowed")
WRONG_ISSUER = Rejection(Reason.ISSUER, "token issuer is not allowed")
MISSING_SCOPE = Rejection(Reason.SCOPE, "token is missing a required scope", Code.PERMISSION_DENIED)


@frozen
class TrustedKey:
    """A public key with the one algorithm it is trusted for."""

    kid: str | None = field(repr=False)
    alg: JwtAlgorithm
    public_key: PublicKeyTypes = field(repr=False)


@frozen
class TokenPolicy:
    """What a token must say. None for audiences or issuers: not looked at."""

    audiences: frozenset[str] | None = None
    issuers: frozenset[str] | None = None
    required_scopes: frozenset[str] = frozenset()
    leeway_s: int = 60


def judge(authorization: str | None, keys: Iterable[TrustedKey], policy: TokenPolicy, now_s: float) -> Rejection | None:
    """None to let the call pass, else why not; the earliest stage that fails decides.

    Args:
        authorization: the `authorization` header; repeated ones joined by a comma, which no token has in it.
        keys: the keys trusted now.
        policy: what the token must say.
        now_s: Unix time in seconds.
    """
    if authorization is None:
        return NO_TOKEN
    token = _bearer_token(authorization)
    if token is None:
        return NOT_BEARER
    opened = _open(token)
    if isinstance(opened, Rejection):
        return opened
    header, claims = opened
    key = _choose(header, keys)
    if key is None or not _verifies(token, key):
        return UNTRUSTED
    return _judge_claims(claims, policy, now_s)


def _bearer_token(authorization: str) -> str | None:
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or "," in token:
        return None
    return token if len(token.encode("utf-8", "surrogateescape")) <= MAX_TOKEN_BYTES else None


def _open(token: str) -> tuple[dict[str, Any], dict[str, Any]] | Rejection:
    """Header and claims of a JWS in compact form (RFC 7515 §3.1), nothing verified yet."""
    parts = token.split(".")
    if len(parts) != 3:
        return NOT_JWT
    header, claims = _json_part(parts[0]), _json_part(parts[1])
    if header is None or claims is None or _decoded(parts[2]) is None:
        return NOT_JWT
    alg, kid = header.get("alg"), header.get("kid")
    if not isinstance(alg, str) or "crit" in header or "b64" in header:  # no extension is understood here
        return NOT_JWT
    if kid is not None and (not isinstance(kid, str) or len(kid.encode("utf-8", "surrogatepass")) > MAX_KID_BYTES):
        return NOT_JWT
    return (header, claims) if alg in ALGORITHMS else UNSUPPORTED


def _decoded(part: str) -> bytes | None:
    """Base64url without padding (RFC 7515 §2); anything else, stray characters included, is None."""
    try:
        data = part.encode("ascii")
        decoded = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError):
        return None
    return decoded if b"=" not in data and b"+" not in data and b"/" not in data else None


def _json_part(part: str) -> dict[str, Any] | None:
    data = _decoded(part)
    if data is None:
        return None
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits, or nested too deep
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _choose(header: dict[str, Any], keys: Iterable[TrustedKey]) -> TrustedKey | None:
    kid, alg = header.get("kid"), header["alg"]
    fitting = [key for key in keys if (key.kid == kid if kid is not None else key.alg == alg)]
    return fitting[0] if len(fitting) == 1 and fitting[0].alg == alg else None


def _verifies(token: str, key: TrustedKey) -> bool:
    try:
        jwt.api_jws.PyJWS().decode_complete(token, key=key.public_key, algorithms=[key.alg])  # type: ignore[arg-type]
    except jwt.InvalidTokenError:
        return False
    return True


def _judge_claims(claims: dict[str, Any], policy: TokenPolicy, now_s: float) -> Rejection | None:
    expiry, start = _instant(claims.get("exp")), _instant(claims.get("nbf"))
    if expiry is not None and expiry < now_s - policy.leeway_s:
        return EXPIRED
    if start is not None and start > now_s + policy.leeway_s:
        return NOT_YET_VALID
    audiences = _strings(claims.get("aud"))
    if policy.audiences is not None and not policy.audiences.intersection(audiences or ()):
        return WRONG_AUDIENCE
    if policy.issuers is not None and _text(claims.get("iss")) not in policy.issuers:
        return WRONG_ISSUER
    well_typed = (
        expiry is not None
        and (start is not None or claims.get("nbf") is None)
        and (audiences is not None or claims.get("aud") is None)
        and all(claims.get(name) is None or isinstance(claims[name], str) for name in ("iss", "sub"))
    )
    scopes = _strings(claims.get("scope"))
    if not well_typed or (scopes is None and claims.get("scope") is not None):
        return NOT_JWT
    granted = {name for text in scopes or () for name in text.split(" ")}
    return None if policy.required_scopes <= granted else MISSING_SCOPE


def _instant(value: Any) -> int | None:
    """A NumericDate (RFC 7519 §2) as whole seconds; None for anything that is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        return None
    return round(value) if isinstance(value, int) or math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _strings(value: Any) -> list[str] | None:
    """A string or an array of strings as a list; None for anything else."""
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


_CURVES = {"ES256": "P-256", "ES384": "P-384", "EdDSA": "Ed25519"}
_KEY_TYPES = {"RS": "RSA", "ES": "EC", "Ed": "OKP"}


def read_key_set(body: bytes) -> tuple[TrustedKey, ...] | None:
    """The usable keys of a JWK set (RFC 7517 §5); entries that cannot be used are passed over.

    None when the document is not a key set or has more than MAX_KEYS usable keys. An empty tuple is a valid document
    without a usable key.
    """
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return None
    keys = tuple(key for entry in entries if (key := _read_key(entry)) is not None)
    return keys if len(keys) <= MAX_KEYS else None


def _read_key(entry: Any) -> TrustedKey | None:
    if not isinstance(entry, dict):
        return None
    alg, kid = entry.get("alg"), entry.get("kid")
    if not isinstance(alg, str) or alg not in ALGORITHMS or not (kid is None or isinstance(kid, str)):
        return None
    if entry.get("kty") != _KEY_TYPES[alg[:2]] or entry.get("crv") != _CURVES.get(alg):
        return None
    if entry.get("use", "sig") != "sig":
        return None
    public = {name: value for name, value in entry.items() if name != "d"}  # a private key has no business here
    try:
        key = jwt.PyJWK(public, algorithm=alg).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if alg.startswith("RS") and key.key_size < MIN_RSA_BITS:
        return None
    return TrustedKey(kid, alg, key)  # type: ignore[arg-type]
