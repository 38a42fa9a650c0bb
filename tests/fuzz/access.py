"""Targets that say who may call: bearer tokens, and the key sets they are judged by."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import strategies as st

from pushd.core.tokens import ALGORITHMS, MAX_KEYS, Reason, TokenPolicy, TrustedKey, judge, read_key_set
from tests.fuzz.engine import Target
from tests.fuzz.inputs import as_json, documents, mostly
from tests.support.envelopes import key_package

NOW_S = 1_794_000_000
SIGNER = key_package(7).signing_key
OTHER = key_package(8).signing_key
POLICY = TokenPolicy(frozenset({"pushd"}), frozenset({"https://issuer.example"}), frozenset({"a"}), 60)
FAIR = {"exp": NOW_S + 60, "aud": "pushd", "iss": "https://issuer.example", "scope": "a b"}
_CURVE_KEY = ec.derive_private_key(7, ec.SECP256R1())


_JSON = documents(["keys", "kty", "x", "exp", "aud"], ["pushd", "OKP", "AQAB"])


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(claims: Any, key: ed25519.Ed25519PrivateKey = SIGNER, **header: Any) -> str:
    """A token in compact form, signed by `key`, whatever its header says."""
    fields = {"alg": "EdDSA", "kid": "k1", **header}
    signed = f"{encoded(as_json(fields))}.{encoded(as_json(claims))}"
    return f"{signed}.{encoded(key.sign(signed.encode()))}"


class Tokens(Target):
    """`authorization` headers."""

    name = "tokens"
    mutations = 3
    _keys = (
        TrustedKey("k1", "EdDSA", SIGNER.public_key()),
        TrustedKey("k2", "ES256", _CURVE_KEY.public_key()),
        TrustedKey("k3", "EdDSA", OTHER.public_key()),
    )

    def made(self) -> st.SearchStrategy[bytes]:
        times = st.sampled_from([NOW_S, NOW_S + 60, NOW_S - 60, NOW_S - 61, NOW_S + 61, 0, 1e308, -1, True, "1", 2**64])
        texts = st.sampled_from(["pushd", "https://issuer.example", "a", "b a", "", ["pushd", "x"], [], [1], 1, None])
        bent = st.dictionaries(st.sampled_from(["exp", "nbf"]), times, max_size=2)
        others = st.dictionaries(st.sampled_from(["aud", "iss", "scope", "sub"]), texts | _JSON, max_size=2)
        claims = st.builds(lambda *more: FAIR | more[0] | more[1], bent, others)
        headers = st.dictionaries(
            st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jwk"]),
            st.sampled_from(["EdDSA", "ES256", "none", "HS256", "k1", "k2", "k3", "JWT", None, 1, "x" * 300]),
            max_size=1,
        )
        headers = mostly(st.just({}), headers, 2)
        schemes = st.sampled_from(["Bearer "] * 9 + ["bearer ", "Bearer  ", "Basic "])
        keys = st.sampled_from([SIGNER, SIGNER, SIGNER, OTHER])
        return st.builds(
            lambda scheme, body, key, header: f"{scheme}{token(body, key, **header)}".encode(),
            schemes,
            claims,
            keys,
            headers,
        )

    def check(self, data: bytes) -> str:
        text = data.decode("utf-8", "surrogateescape")
        refusal = judge(text, self._keys, POLICY, NOW_S)
        strict = judge(text, self._keys[1:2], POLICY, NOW_S)
        assert strict is not None  # nothing is ever signed by that key
        if refusal is None:
            self._is_fair(text)
            return "accepted"
        assert judge(text, (), POLICY, NOW_S) is not None
        # A refusal is one of few constants: nothing of the token is in it.
        assert len(refusal.message) < 60
        if refusal.reason in (Reason.MISSING, Reason.MALFORMED, Reason.UNSUPPORTED_ALG):
            return ""
        return "read" if refusal.reason is Reason.UNTRUSTED else "signed"

    def _is_fair(self, text: str) -> None:
        """An independent reader: whoever was let in has a signature of the one key, and the claims that are asked."""
        head, body, signature = text.split(" ", 1)[1].strip().split(".")
        header, claims = (json.loads(base64.urlsafe_b64decode(part + "==")) for part in (head, body))
        assert header["alg"] == "EdDSA"
        allowed = {"k1": [SIGNER], "k3": [OTHER]}.get(header.get("kid"), [])
        assert any(_holds(key, signature, f"{head}.{body}") for key in allowed)
        assert claims["exp"] >= NOW_S - POLICY.leeway_s
        assert (claims.get("nbf") or 0) <= NOW_S + POLICY.leeway_s
        assert "pushd" in claims["aud"]
        assert claims["iss"] == "https://issuer.example"
        assert "a" in " ".join([claims["scope"]] if isinstance(claims["scope"], str) else claims["scope"]).split(" ")


def _holds(key: ed25519.Ed25519PrivateKey, signature: str, signed: str) -> bool:
    with suppress(InvalidSignature):
        key.public_key().verify(base64.urlsafe_b64decode(signature + "=="), signed.encode())
        return True
    return False


def jwks() -> list[dict[str, Any]]:
    """One usable key of each type."""
    point = _CURVE_KEY.public_key().public_numbers()
    wide = ec.derive_private_key(7, ec.SECP384R1()).public_key().public_numbers()
    return [
        {
            "kty": "OKP",
            "crv": "Ed25519",
            "alg": "EdDSA",
            "kid": "1",
            "x": encoded(SIGNER.public_key().public_bytes_raw()),
        },
        {"kty": "EC", "crv": "P-256", "alg": "ES256", "kid": "2", "x": _number(point.x, 32), "y": _number(point.y, 32)},
        {"kty": "EC", "crv": "P-384", "alg": "ES384", "use": "sig", "x": _number(wide.x, 48), "y": _number(wide.y, 48)},
        {"kty": "RSA", "alg": "RS256", "kid": "4", "n": _number(2**2_048 - 1_557, 256), "e": "AQAB"},
    ]


def _number(value: int, size: int) -> str:
    return encoded(value.to_bytes(size, "big"))


class KeySets(Target):
    """JWK sets of an issuer."""

    name = "jwks"
    mutations = 5

    def made(self) -> st.SearchStrategy[bytes]:
        names = st.sampled_from(["kty", "crv", "alg", "kid", "x", "y", "n", "e", "use", "d", "oth", "key_ops"])
        words = ["OKP", "EC", "RSA", "oct", "P-256", "Ed25519", "Ed448", "ES256", "RS512", "none", "enc", "AQAB", "AA"]
        values: st.SearchStrategy[Any] = st.sampled_from([*words, "", 1, None, "x" * 3_000, [], {}]) | _JSON
        entries = st.builds(
            lambda good, bent: good | bent, st.sampled_from(jwks()), st.dictionaries(names, values, max_size=2)
        )
        return st.lists(mostly(entries, _JSON), min_size=1, max_size=5).map(lambda keys: as_json({"keys": keys}))

    def check(self, data: bytes) -> str:
        keys = read_key_set(data)
        if keys is None:
            return ""
        assert len(keys) <= MAX_KEYS
        for key in keys:
            assert key.alg in ALGORITHMS
            kind: Any = {"RS": rsa.RSAPublicKey, "ES": ec.EllipticCurvePublicKey, "Ed": ed25519.Ed25519PublicKey}
            assert isinstance(key.public_key, kind[key.alg[:2]])  # public in any case
            if isinstance(key.public_key, rsa.RSAPublicKey):
                assert key.public_key.key_size >= 2_048
            if isinstance(key.public_key, ec.EllipticCurvePublicKey):
                assert key.public_key.curve.name == {"ES256": "secp256r1", "ES384": "secp384r1"}[key.alg]
            assert repr(key) == f"TrustedKey(alg={key.alg!r})"
        return "keys" if keys else "document"
