"""Offline judgement of the two provider credentials: the APNs signing key and the FCM service account.

Both arrive as secret text. Nothing here contacts a provider, and nothing here repeats a part of the text: a fault is
one of a closed list of constants, and the exceptions carry no cause, because a JSON error keeps the whole document in
its attributes (PUSH-072).
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import field, frozen
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from pushd.errors import ConfigError

JwtAlgorithm = Literal["RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"]

MIN_RSA_BITS = 2_048
"""The shortest RSA key a token may be verified with (RFC 7518 §3.3)."""
GOOGLE_TOKEN_URI = "https://oauth2.googleapis.com/token"

APNS_KEY_ERROR = "push.apns.key must be the PKCS#8 PEM text of an unencrypted P-256 private key, line breaks included"
SERVICE_ACCOUNT_ERROR = (
    "push.fcm.service_account must be the JSON text of a service account with an RSA private_key, a client_email, "
    f"a project_id and the token_uri {GOOGLE_TOKEN_URI}"
)

# A project id becomes a path segment of the send URL, so only characters that stay inside one are taken; the colon
# and the dot belong to domain-scoped projects.
_PROJECT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*\Z")
_URL_TEXT = re.compile(r"[\x21-\x7e]{1,2048}")


@frozen
class Fault:
    """What is wrong with a credential and the way out: constants, never a part of the credential."""

    what: str
    mend: str


@frozen
class ServiceAccount:
    """What FCM needs of a service account. Nothing of it is printed."""

    project_id: str = field(repr=False)
    client_email: str = field(repr=False)
    private_key: RSAPrivateKey = field(repr=False)
    token_uri: str = field(repr=False)


def parse_apns_key(pem: str) -> EllipticCurvePrivateKey:
    """The APNs provider key in `pem`.

    Raises:
        ConfigError: it is not an unencrypted PKCS#8 P-256 key; the text is constant and names `push.apns.key`.
    """
    key = inspect_apns_key(pem)
    if isinstance(key, Fault):
        raise ConfigError(APNS_KEY_ERROR)
    return key


def parse_service_account(text: str, *, allow_loopback_token_uri: bool = False) -> ServiceAccount:
    """The service account in the JSON `text` (PUSH-062).

    Args:
        text: the JSON file Google hands out.
        allow_loopback_token_uri: take a token_uri on this machine too; for a fake provider, never in production.

    Raises:
        ConfigError: a field is missing or unusable; the text is constant and names `push.fcm.service_account`.
    """
    account = inspect_service_account(text, allow_loopback_token_uri=allow_loopback_token_uri)
    if isinstance(account, Fault):
        raise ConfigError(SERVICE_ACCOUNT_ERROR)
    return account


_APPLE_MEND = "put the content of the AuthKey_….p8 file from Apple's developer site into the variable"
# Headers people really paste, in the order tried. The first match names the confusion better than a parser can.
_WRONG_PEM = (
    (
        "-----BEGIN CERTIFICATE-----",
        Fault("holds a certificate, not a signing key", _APPLE_MEND),
    ),
    (
        "-----BEGIN PUBLIC KEY-----",
        Fault("holds a public key, not a private one", _APPLE_MEND),
    ),
    (
        "-----BEGIN ENCRYPTED PRIVATE KEY-----",
        Fault("holds an encrypted key", "decrypt it: openssl pkcs8 -in FILE"),
    ),
    (
        "-----BEGIN EC PRIVATE KEY-----",
        Fault(
            "holds a key in the SEC 1 form",
            "convert it: openssl pkcs8 -topk8 -nocrypt -in FILE",
        ),
    ),
    (
        "-----BEGIN RSA PRIVATE KEY-----",
        Fault("holds an RSA key; APNs signs with P-256", _APPLE_MEND),
    ),
)
_PKCS8_HEADER = "-----BEGIN PRIVATE KEY-----"


def inspect_apns_key(pem: str) -> EllipticCurvePrivateKey | Fault:
    """The key, or what is wrong with it, in the order an operator would find most telling."""
    if "\\n" in pem:
        return Fault(
            r"holds the two characters \n where line breaks belong",
            r'''write real line breaks, in a shell for instance: export NAME="$(printf '%b' "$NAME")"''',
        )
    for header, fault in _WRONG_PEM:
        if header in pem:
            return fault
    if _PKCS8_HEADER not in pem:
        if pem.strip().endswith((".p8", ".pem", ".p12")):
            return Fault("holds a file name; the content of the file is needed", _APPLE_MEND)
        return Fault("is not PEM text", _APPLE_MEND)
    key = _load_private_key(pem)
    if key is None:
        return Fault("holds a damaged key", _APPLE_MEND)
    if isinstance(key, RSAPrivateKey):
        return Fault("holds an RSA key; APNs signs with P-256", _APPLE_MEND)
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        return Fault("holds a key of another curve; APNs signs with P-256", _APPLE_MEND)
    return key


_GOOGLE_MEND = "create a key for the service account in the Google Cloud console and put its JSON into the variable"


def inspect_service_account(text: str, *, allow_loopback_token_uri: bool = False) -> ServiceAccount | Fault:
    """The service account, or what is wrong with it."""
    document = _json_object(text)
    if document is None:
        return _not_an_object(text)
    if "project_info" in document:
        return Fault(
            "holds google-services.json, the file for an app, not a service account",
            _GOOGLE_MEND,
        )
    fields: dict[str, str] = {}
    for name in ("project_id", "client_email", "private_key", "token_uri"):
        value = document.get(name)
        if not isinstance(value, str) or not value.strip():
            return Fault(f"lacks {name}", _GOOGLE_MEND)
        fields[name] = value
    if _PROJECT_ID.match(fields["project_id"]) is None:
        return Fault("holds a project_id with characters no project id has", _GOOGLE_MEND)
    uri = fields["token_uri"]
    if uri != GOOGLE_TOKEN_URI and not (allow_loopback_token_uri and is_loopback_url(uri)):
        return Fault("holds a foreign token_uri", f"token_uri is {GOOGLE_TOKEN_URI}")
    key = _load_private_key(fields["private_key"])
    if key is None:
        return Fault("holds a damaged private_key", _GOOGLE_MEND)
    if not isinstance(key, RSAPrivateKey):
        return Fault("holds a private_key that is not RSA", _GOOGLE_MEND)
    return ServiceAccount(fields["project_id"], fields["client_email"], key, uri)


def inspect_public_key(pem: str, alg: JwtAlgorithm) -> PublicKeyTypes | Fault:
    """The public key in `pem`, or why tokens signed with `alg` cannot be verified with it (RFC 7518, RFC 8037)."""
    mend = "give the PEM text that begins with -----BEGIN PUBLIC KEY-----"
    if "PRIVATE KEY-----" in pem:
        return Fault("holds a private key; verifying needs the public one alone", mend)
    if "-----BEGIN PUBLIC KEY-----" not in pem:
        return Fault("is not a PEM public key", mend)
    try:
        key = load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        return Fault("holds a damaged key", mend)
    if isinstance(key, RSAPublicKey) and key.key_size < MIN_RSA_BITS:
        return Fault("holds an RSA key that is too short", f"RSA keys need {MIN_RSA_BITS} bits or more")
    match alg, key:
        case ("RS256" | "RS384" | "RS512", RSAPublicKey()) | ("EdDSA", Ed25519PublicKey()):
            return key
        case ("ES256", EllipticCurvePublicKey(curve=SECP256R1())):
            return key
        case ("ES384", EllipticCurvePublicKey(curve=SECP384R1())):
            return key
    return Fault("does not fit its alg", "RS256, RS384 and RS512 take RSA, ES256 P-256, ES384 P-384, EdDSA Ed25519")


def is_url_text(text: str) -> bool:
    """Whether `text` is as it stands what every reader of URLs sees.

    `urlsplit` drops control characters and blanks around the text; HTTP libraries refuse them, and very long URLs too.
    """
    return _URL_TEXT.fullmatch(text) is not None


def is_loopback_url(url: str) -> bool:
    """Whether `url` is http(s) to this machine: a loopback address or the name localhost, without user or password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not is_url_text(url) or parts.scheme not in ("http", "https") or host is None or "@" in parts.netloc:
        return False
    return is_loopback_host(host)


def is_loopback_host(host: str) -> bool:
    """Whether `host` is a loopback address (127.0.0.0/8, ::1) or the name localhost."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # The two ranges are written out: what `is_loopback` covers has changed between Python versions.
    if isinstance(address, ipaddress.IPv4Address):
        return address in ipaddress.IPv4Network("127.0.0.0/8")
    return address == ipaddress.IPv6Address("::1") and address.scope_id is None


def _load_private_key(pem: str) -> PrivateKeyTypes | None:
    try:
        return load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _not_an_object(text: str) -> Fault:
    if text.startswith("AIza"):
        return Fault("holds a web API key, not a service account", _GOOGLE_MEND)
    if text.strip().endswith(".json"):
        return Fault("holds a file name; the content of the file is needed", _GOOGLE_MEND)
    return Fault("is not a JSON object", _GOOGLE_MEND)
