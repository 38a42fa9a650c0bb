"""Which tokens let a call pass. The tokens come from another library than the one that judges them."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jws
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from pushd.core import tokens
from pushd.core.tokens import Rejection, TokenPolicy, TrustedKey, judge, read_key_set
from pushd.errors import Code

# The other library warns that the name EdDSA is about to be replaced (RFC 9864).
pytestmark = pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")

NOW = 1_800_000_000
KEYS: dict[str, Key] = {
    "RS256": RSAKey.generate_key(2048),
    "ES256": ECKey.generate_key("P-256"),
    "ES384": ECKey.generate_key("P-384"),
    "EdDSA": OKPKey.generate_key("Ed25519"),
}
KEYS["RS384"] = KEYS["RS512"] = KEYS["RS256"]
ALL = [*KEYS, "HS256", "none", "PS256"]


def public(alg: str) -> Any:
    return load_pem_public_key(KEYS[alg].as_pem(private=False))


def trusted(alg: str, kid: str | None = "k1") -> TrustedKey:
    return TrustedKey(kid, alg, public(alg))  # type: ignore[arg-type]


def token(claims: Any = None, alg: str = "ES256", key: Key | None = None, **header: Any) -> str:
    body = claims if isinstance(claims, bytes) else json.dumps({"exp": NOW + 60} if claims is None else claims).encode()
    registry = jws.JWSRegistry(algorithms=ALL, strict_check_header=False)
    protected = {"alg": alg, "kid": "k1", **header}
    protected = {name: value for name, value in protected.items() if value is not None}
    return jws.serialize_compact(protected, body, key or KEYS[alg], registry=registry)


def raw(header: Any, claims: Any, signature: bytes = b"x") -> str:
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, signature))


def ask_with(header: str | None, *keys: TrustedKey, policy: TokenPolicy | None = None) -> Rejection | None:
    return judge(header, keys or (trusted("ES256"),), policy or TokenPolicy(), NOW)


def ask(text: str, *keys: TrustedKey, policy: TokenPolicy | None = None) -> Rejection | None:
    return ask_with(f"Bearer {text}", *keys, policy=policy)


@pytest.mark.parametrize("alg", sorted(tokens.ALGORITHMS))
@pytest.mark.parametrize("kid", ["k1", None])
def test_every_algorithm_passes_with_and_without_kid(alg: str, kid: str | None) -> None:
    assert ask(token(alg=alg, kid=kid), trusted(alg)) is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, tokens.NO_TOKEN),
        ("", tokens.NOT_BEARER),
        ("Bearer", tokens.NOT_BEARER),
        ("Bearer ", tokens.NOT_BEARER),
        ("Bearer    ", tokens.NOT_BEARER),
        ("Basic dTpw", tokens.NOT_BEARER),
        ("Bearer a,Bearer b", tokens.NOT_BEARER),
        ("Bearer " + "a" * 8_193, tokens.NOT_BEARER),
        ("Bearer " + "a" * 8_192, tokens.NOT_JWT),
        ("Bearer a.b", tokens.NOT_JWT),
        ("Bearer a.b.c.d", tokens.NOT_JWT),
        ("Bearer \x80.b.c", tokens.NOT_JWT),
    ],
)
def test_header_must_hold_one_bearer_token(header: str | None, expected: Rejection) -> None:
    assert ask_with(header) == expected


def test_two_good_tokens_are_not_one() -> None:
    assert ask_with(f"Bearer {token()},Bearer {token()}") == tokens.NOT_BEARER


@pytest.mark.parametrize("scheme", ["bearer ", "BEARER ", "Bearer  "])
def test_scheme_is_case_insensitive_and_the_token_trimmed(scheme: str) -> None:
    assert ask_with(scheme + token()) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(raw([], {"exp": NOW + 9}), tokens.NOT_JWT, id="header-not-object"),
        pytest.param(raw({"alg": "ES256"}, [1]), tokens.NOT_JWT, id="claims-not-object"),
        pytest.param(raw({"alg": "ES256"}, b"\xff"), tokens.NOT_JWT, id="claims-not-utf8"),
        pytest.param(raw({"alg": "ES256"}, b'{"exp":NaN}'), tokens.NOT_JWT, id="claims-nan"),
        pytest.param(raw({"alg": "ES256"}, b"[" * 3_000), tokens.NOT_JWT, id="claims-nested"),
        pytest.param(raw({"alg": "ES256"}, b'{"exp":' + b"9" * 5_000 + b"}"), tokens.NOT_JWT, id="exp-5000-digits"),
        pytest.param(raw({}, {}), tokens.NOT_JWT, id="no-alg"),
        pytest.param(raw({"alg": 1}, {}), tokens.NOT_JWT, id="alg-number"),
        pytest.param(raw({"alg": "ES256", "kid": 1}, {}), tokens.NOT_JWT, id="kid-number"),
        pytest.param(raw({"alg": "ES256", "kid": "k" * 257}, {}), tokens.NOT_JWT, id="kid-257-bytes"),
        pytest.param(raw({"alg": "ES256", "kid": "k" * 256}, {}), tokens.UNTRUSTED, id="kid-256-bytes"),
        pytest.param(raw({"alg": "ES256", "crit": ["exp"], "exp": 1}, {}), tokens.NOT_JWT, id="crit"),
        pytest.param(raw({"alg": "ES256", "b64": False}, {}), tokens.NOT_JWT, id="b64"),
        pytest.param(raw({"alg": "none"}, {"exp": NOW + 9}, b""), tokens.UNSUPPORTED, id="none"),
        pytest.param(raw({"alg": "nOnE"}, {"exp": NOW + 9}, b""), tokens.UNSUPPORTED, id="none-odd-case"),
        pytest.param(raw({"alg": "PS256"}, {"exp": NOW + 9}), tokens.UNSUPPORTED, id="PS256"),
        pytest.param(raw({"alg": "es256"}, {"exp": NOW + 9}), tokens.UNSUPPORTED, id="lower-case-alg"),
        pytest.param(raw({"alg": "ES256", "kid": "k1"}, {"exp": NOW + 9}), tokens.UNTRUSTED, id="bad-signature"),
        pytest.param(token(kid="other"), tokens.UNTRUSTED, id="unknown-kid"),
        pytest.param(token(alg="ES384"), tokens.UNTRUSTED, id="kid-of-another-alg"),
        pytest.param(token(key=ECKey.generate_key("P-256")), tokens.UNTRUSTED, id="another-key"),
        pytest.param(token()[:-8] + "AAAAAAAA", tokens.UNTRUSTED, id="changed-signature"),
        pytest.param(token() + "=", tokens.NOT_JWT, id="padded"),
    ],
)
def test_what_is_not_a_trusted_token(text: str, expected: Rejection) -> None:
    assert ask(text) == expected


def test_hmac_with_the_public_key_as_secret_is_unsupported() -> None:
    pem = public("RS256").public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = raw({"alg": "HS256", "kid": "k1"}, {"exp": NOW + 60}).rpartition(".")[0]
    signature = base64.urlsafe_b64encode(hmac.digest(pem, signed.encode(), "sha256")).rstrip(b"=").decode()
    assert ask(f"{signed}.{signature}", trusted("RS256")) == tokens.UNSUPPORTED


def test_rsa_token_cannot_be_checked_with_another_hash_than_the_key_is_trusted_for() -> None:
    assert ask(token(alg="RS512"), trusted("RS256")) == tokens.UNTRUSTED


def test_two_keys_with_one_kid_or_one_algorithm_are_no_choice() -> None:
    assert ask(token(), trusted("ES256"), trusted("ES384")) == tokens.UNTRUSTED
    assert ask(token(kid=None), trusted("ES256", "a"), trusted("ES256", "b")) == tokens.UNTRUSTED
    assert ask(token(kid=None), trusted("ES256", "a"), trusted("ES384", "b")) is None
    assert ask(token(), *()) is None


ODD = [True, "1", [], {}, -1, 1e400, None]
STRICT = TokenPolicy(frozenset(("aud1", "aud2")), frozenset(("iss1",)), frozenset(("a", "b")), leeway_s=60)
GOOD = {"exp": NOW + 60, "aud": "aud1", "iss": "iss1", "scope": "b a c"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"exp": NOW - 60}, None),
        ({"exp": NOW - 60.4}, None),
        ({"exp": NOW + 0.5}, None),
        ({"exp": 10**300}, None),
        ({"exp": NOW - 61}, tokens.EXPIRED),
        ({"exp": 0}, tokens.EXPIRED),
        ({"nbf": NOW + 60}, None),
        ({"nbf": NOW + 61}, tokens.NOT_YET_VALID),
        ({"nbf": 10**300}, tokens.NOT_YET_VALID),
        ({"exp": 0, "nbf": NOW + 61}, tokens.EXPIRED),
        ({"aud": ["x", "aud2"]}, None),
        ({"aud": None}, tokens.WRONG_AUDIENCE),
        ({"aud": "aud"}, tokens.WRONG_AUDIENCE),
        ({"aud": ["x"], "exp": 0}, tokens.EXPIRED),
        ({"aud": [["aud1"]]}, tokens.WRONG_AUDIENCE),
        ({"aud": {"aud1": 1}}, tokens.WRONG_AUDIENCE),
        ({"iss": None}, tokens.WRONG_ISSUER),
        ({"iss": "other"}, tokens.WRONG_ISSUER),
        ({"iss": ["iss1"]}, tokens.WRONG_ISSUER),
        ({"sub": "anyone"}, None),
        ({"sub": 7}, tokens.NOT_JWT),
        ({"scope": ["a", "b"]}, None),
        ({"scope": ["a b"]}, None),
        ({"scope": [["a", "b"]]}, tokens.NOT_JWT),
        ({"scope": 1}, tokens.NOT_JWT),
        ({"scope": "a"}, tokens.MISSING_SCOPE),
        ({"scope": "a,b"}, tokens.MISSING_SCOPE),
        ({"scope": None}, tokens.MISSING_SCOPE),
        ({"scope": "a", "sub": 7}, tokens.NOT_JWT),
        ({"scope": "a", "aud": "x"}, tokens.WRONG_AUDIENCE),
        *[({"exp": value}, tokens.NOT_JWT) for value in ODD if value != 1e400],
        *[({"nbf": value}, tokens.NOT_JWT) for value in ODD[:5]],
    ],
)
def test_claims(change: dict[str, Any], expected: Rejection | None) -> None:
    claims = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    assert ask(token(claims), policy=STRICT) == expected


def test_explicit_null_counts_as_absent() -> None:
    assert ask(token({**GOOD, "nbf": None, "sub": None}), policy=STRICT) is None


def test_infinite_expiry_is_no_number() -> None:
    assert ask(token(b'{"exp":1e400}')) == tokens.NOT_JWT


def test_without_a_policy_only_the_expiry_counts() -> None:
    assert ask(token({"exp": NOW, "aud": "x", "iss": "y"})) is None
    assert ask(token({})) == tokens.NOT_JWT


@pytest.mark.parametrize(
    ("rejection", "code", "message"),
    [
        (tokens.NO_TOKEN, Code.UNAUTHENTICATED, "missing bearer token"),
        (tokens.NOT_BEARER, Code.UNAUTHENTICATED, "authorization header is not a bearer token"),
        (tokens.NOT_JWT, Code.UNAUTHENTICATED, "token is not a supported JWT"),
        (tokens.UNSUPPORTED, Code.UNAUTHENTICATED, "token is not a supported JWT"),
        (tokens.UNTRUSTED, Code.UNAUTHENTICATED, "token signature is not trusted"),
        (tokens.EXPIRED, Code.UNAUTHENTICATED, "token has expired"),
        (tokens.NOT_YET_VALID, Code.UNAUTHENTICATED, "token is not yet valid"),
        (tokens.WRONG_AUDIENCE, Code.UNAUTHENTICATED, "token audience is not allowed"),
        (tokens.WRONG_ISSUER, Code.UNAUTHENTICATED, "token issuer is not allowed"),
        (tokens.MISSING_SCOPE, Code.PERMISSION_DENIED, "token is missing a required scope"),
    ],
)
def test_statuses_are_constants(rejection: Rejection, code: Code, message: str) -> None:
    assert (rejection.code, rejection.message) == (code, message)


@given(st.text(max_size=200), st.binary(max_size=60), st.binary(max_size=60))
def test_no_header_text_raises(text: str, header: bytes, claims: bytes) -> None:
    assert ask_with(text) in (tokens.NOT_BEARER, tokens.NOT_JWT)
    assert ask(raw(header, claims)) in (tokens.NOT_JWT, tokens.UNSUPPORTED, tokens.UNTRUSTED)


def jwk(name: str, /, **change: Any) -> dict[str, Any]:
    entry = {**KEYS[name].as_dict(private=False), "alg": name, "kid": "k1", **change}
    return {key: value for key, value in entry.items() if value is not None}


@pytest.mark.parametrize("alg", sorted(tokens.ALGORITHMS))
def test_key_sets_bring_usable_keys(alg: str) -> None:
    keys = read_key_set(json.dumps({"keys": [jwk(alg, use="sig")]}).encode())
    assert keys is not None
    assert ask(token(alg=alg), *keys) is None


@pytest.mark.parametrize(
    "entry",
    [
        jwk("ES256", alg="ES384"),
        jwk("ES256", alg="RS256"),
        jwk("ES256", alg="HS256"),
        jwk("ES256", alg=None),
        jwk("ES256", use="enc"),
        jwk("ES256", kty="RSA"),
        jwk("ES256", x="AA"),
        jwk("ES256", x=None),
        jwk("ES256", x=7),
        jwk("ES256", kid=7),
        jwk("EdDSA", crv="X25519"),
        {"kty": "RSA", "alg": "RS256", "e": "AQAB", "n": base64.urlsafe_b64encode(b"\xff" * 128).decode().rstrip("=")},
        OctKey.generate_key(256).as_dict(private=True) | {"alg": "HS256"},
        "text",
        [],
        None,
    ],
)
def test_unusable_entries_are_passed_over(entry: Any) -> None:
    assert read_key_set(json.dumps({"keys": [entry, jwk("ES256")]}).encode()) == read_key_set(
        json.dumps({"keys": [jwk("ES256")]}).encode()
    )


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"keys":{}}', b"\xff", b"[" * 100_000, b'{"keys":1}'])
def test_other_documents_are_no_key_set(body: bytes) -> None:
    assert read_key_set(body) is None


def test_too_many_usable_keys_are_refused() -> None:
    entries = [jwk("EdDSA", kid=str(number)) for number in range(65)]
    assert read_key_set(json.dumps({"keys": entries}).encode()) is None
    assert len(read_key_set(json.dumps({"keys": entries[:64]}).encode()) or ()) == 64


def test_nothing_of_a_key_or_policy_is_shown() -> None:
    assert "k1" not in repr(trusted("ES256"))
