"""Targets that are functions: what a reader makes of any bytes, without a socket or a clock."""

from __future__ import annotations

import json
import tempfile
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from pushd.channels.fcm_oauth import read_token
from pushd.config import Config, InvalidConfig, load_config
from pushd.config.values import Key
from pushd.core import admission
from pushd.core.addresses import is_blocked
from pushd.core.key_package import is_acceptable, read_key_package
from pushd.core.mls import Malformed, read_framing
from pushd.core.providers import apns, fcm
from pushd.core.providers.answers import status_label
from pushd.core.providers.retry_after import parse_retry_after
from pushd.core.webhook_answers import judge_status
from pushd.core.webhook_url import parse_webhook_url
from pushd.model import RETRY_MAX_S, Delivered, Gone, Mismatch, NewEnvelope, Rejected, Terminal, TopicKind, Transient
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope
from pushd.rpc.translate_publish import offer_from
from tests.core.test_webhook_url import URL_PIECES
from tests.fuzz.engine import Target
from tests.fuzz.inputs import as_json, documents, mostly
from tests.fuzz.messages import messages
from tests.support import envelopes
from tests.support.server import toml

NOW = datetime(2026, 11, 6, 8, 49, 37, tzinfo=UTC)
NOW_S = 1_794_000_000
FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
QUOTA = "type.googleapis.com/google.rpc.QuotaFailure"


class Mls(Target):
    """Group messages, key packages, and envelopes with either inside. The first byte says which."""

    name = "mls"
    mutations = 4

    def made(self) -> st.SearchStrategy[bytes]:
        words = st.binary(max_size=70)
        private = st.builds(envelopes.private_message, words, st.integers(0, 4), ciphertext=words)
        public = st.builds(
            envelopes.public_message, words, st.integers(0, 4), sender_type=st.sampled_from([0, 1, 2, 3, 4, 5])
        )
        # Signed anew, whatever is bent: the signatures hold, and something else must refuse it.
        bent: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
            {},
            optional={
                "cipher_suite": st.sampled_from([2, 3, 7]),
                "source": st.sampled_from([0, 2, 3]),
                "credential": st.sampled_from([b"", b"\xff", b"\x0a\x01\xff", b"\x0a\x00"]),
                "credential_type": st.sampled_from([0, 2]),
                "not_after_s": st.sampled_from([0, NOW_S, NOW_S + 1, 2**64 - 1]),
                "not_before_s": st.sampled_from([NOW_S, NOW_S + 1]),
                "extensions": st.sampled_from([b"\0\1\2ab", b"\0\1"]),
                "encryption_key": st.just(b"\1" * 32),
                "leaf_label": st.sampled_from([b"MLS 1.0 KeyPackageTBS", b""]),
                "package_label": st.sampled_from([b"MLS 1.0 LeafNodeTBS", b""]),
            },
        )
        bent = mostly(st.just({}), bent, 1)
        packages = bent.map(lambda parts: envelopes.key_package(**parts).serialized())
        wrapped = messages(ClientEnvelope.DESCRIPTOR).map(lambda message: message.SerializeToString())
        kinds = [(private | public).map(b"g".__add__), packages.map(b"k".__add__), wrapped.map(b"e".__add__)]
        return st.sampled_from(kinds).flatmap(lambda kind: kind)

    def check(self, data: bytes) -> str:
        kind, rest = data[:1], data[1:]
        with suppress(Malformed):
            if kind == b"g":
                framing = read_framing(rest)
                assert framing.group_id in rest
                # What is behind a message is padding: it changes nothing.
                assert read_framing(rest + b"\0padding") == framing
                return "framing"
            if kind == b"k":
                package = read_key_package(rest)
                assert package.signed_part == rest[: len(package.signed_part)]
                if not is_acceptable(package, NOW_S):
                    return "key package"
                assert _is_signed(rest)
                leaf = package.leaf_node
                assert leaf.not_before_s <= NOW_S < leaf.not_after_s
                assert (leaf.source, leaf.credential_type) == (1, 1)
                assert package.cipher_suite in (1, 3, 0x4D)
                assert package.init_key != leaf.encryption_key
                return "acceptable"
            return self._envelope(rest)
        return ""

    def _envelope(self, data: bytes) -> str:
        try:
            envelope = ClientEnvelope.FromString(data)
        except DecodeError:
            return ""
        offer = offer_from(envelope, NOW_S)
        if not isinstance(offer, NewEnvelope):
            assert isinstance(offer, admission.Unroutable | admission.Identity)
            return "envelope"
        assert 1 <= len(offer.topic) <= 128
        assert offer.sender_hmac is None or len(offer.sender_hmac) == 32
        # What is stored reads the same again: nothing a sender wrote can change on its way through.
        again = offer_from(ClientEnvelope.FromString(offer.payload), NOW_S)
        assert again == offer
        if offer.kind is TopicKind.KEY_PACKAGE and offer.is_admissible:
            assert _is_signed(envelope.key_package.key_package_tls_serialized)
        return "routable"


def _is_signed(package: bytes) -> bool:
    """Whether both signatures of a key package hold, with the bytes they are about taken from its end and its key.

    A reader apart from the program's: an Ed25519 signature is a vector of 64 bytes, and the one of the package is last.
    The leaf begins with the encryption key, which the key follows, and ends where some signature of that key holds.
    """
    signed, last = package[:-66], package[-66:]
    if last[:2] != b"\x40\x40":
        return False
    leaf = _behind_vector(signed, 4)  # version and suite, then the init key
    start = _behind_vector(signed, leaf) + 1
    try:
        key = Ed25519PublicKey.from_public_bytes(signed[start : start + 32])
        key.verify(last[2:], _with_label(b"MLS 1.0 KeyPackageTBS", signed))
    except (InvalidSignature, ValueError):
        return False
    for end in range(leaf, len(signed) - 65):
        if signed[end : end + 2] == b"\x40\x40":
            with suppress(InvalidSignature):
                key.verify(signed[end + 2 : end + 66], _with_label(b"MLS 1.0 LeafNodeTBS", signed[leaf:end]))
                return True
    return False


def _behind_vector(data: bytes, at: int) -> int:
    width = 1 << (data[at] >> 6)
    return at + width + (int.from_bytes(data[at : at + width], "big") & (1 << 8 * width - 2) - 1)


def _with_label(label: bytes, content: bytes) -> bytes:
    return envelopes.vector(label) + envelopes.vector(content)


# Where nobody's webhooks are, and what carries an IPv4 address; the IANA registries, each with its neighbours.
_SPECIAL = """
    10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 192.168.0.0/16
    198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 2001::/23 2001:db8::/32 2002:a00::/24 64:ff9b::a00:0/104
    ::ffff:10.0.0.0/104 fc00::/7 fe80::/10 ff00::/8
""".split()  # noqa: SIM905


class Urls(Target):
    """Webhook URLs, in whatever bytes."""

    name = "urls"
    mutations = 4

    def made(self) -> st.SearchStrategy[bytes]:
        hosts = [
            "hooks.example.com",
            "a",
            "xn--bcher-kva.example",
            "127.0.0.1",
            "8.8.8.8",
            "192.0.2.1",
            "1.2.3",
            "0x7f.1",
        ]
        hosts += ["[::1]", "[2001:4860:4860::8888]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]", "a_b.c"]
        special = st.sampled_from([ip_network(text) for text in _SPECIAL]).flatmap(
            lambda network: st.integers(max(0, int(network[0]) - 1), min(int(network[-1]) + 1, 2**128 - 1))
        )
        numbers = (special.filter(lambda number: number < 2**32) | st.integers(0, 2**32 - 1)).map(IPv4Address).map(str)
        sixes = (special | st.integers(0, 2**128 - 1)).map(lambda number: f"[{IPv6Address(number)}]")
        whole = st.tuples(
            st.sampled_from(["https://"] * 8 + ["HTTPS://", "http://"]),
            st.sampled_from(hosts) | numbers | sixes,
            st.sampled_from(["", "", "", ":443", ":8443", ":65535", ":65536", ":0", ":"]),
            mostly(st.sampled_from(["", "/", "/a/b", "?q=1", "#f", "/%2e%2e/\\", "/a@b"]), URL_PIECES),
        ).map("".join)
        return mostly(whole, URL_PIECES.map("https://".__add__) | URL_PIECES).map(lambda text: text.encode())

    def check(self, data: bytes) -> str:
        text = data.decode("utf-8", "surrogateescape")
        url = parse_webhook_url(text)
        if url is None:
            return ""
        parts = urlsplit(text)  # an independent reader must see the same host and port, and nobody's name
        assert (parts.scheme, parts.username, parts.password) == ("https", None, None)
        assert (parts.port or 443) == url.port
        try:
            address = ip_address(parts.hostname or "")
        except ValueError:
            address = None
        assert url.address == address
        assert url.host == (str(address) if address else parts.hostname)
        assert address is None or is_blocked(address) or _is_public(address)
        assert all("\x20" < character < "\x7f" for character in url.host_header + url.target)
        assert "@" not in url.host_header
        assert parse_webhook_url(f"https://{url.host_header}{url.target}") == url
        assert not repr(url).replace("WebhookUrl()", "")
        return "name" if address is None else "address"


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the standard library's tables say so, about the address inside where there is one."""
    if isinstance(address, IPv6Address):
        carries = int(address) >> 32 in (0, 0x64FF9B << 64)  # compatible, NAT64
        inner = IPv4Address(int(address) & 0xFFFF_FFFF) if carries else address.ipv4_mapped or address.sixtofour
        return address.is_global if inner is None else _is_public(inner)
    return address.is_global and not address.is_multicast


_JSON = documents(["error", "details", "@type", "errorCode", "reason", "status"], [FCM_ERROR, "UNREGISTERED"])


class Answers(Target):
    """Answers of APNs, FCM and its token endpoint: two bytes of status, then headers or a body."""

    name = "answers"
    mutations = 3

    def made(self) -> st.SearchStrategy[bytes]:
        statuses = st.sampled_from([200, 400, 401, 403, 404, 410, 413, 429, 500, 503])
        telling = st.sampled_from(["Unregistered", "ExpiredToken", "BadDeviceToken", "DeviceTokenNotForTopic"])
        reasons = mostly(telling, st.sampled_from([*sorted(apns.REASONS), "é", ""]), 2)
        times = st.sampled_from([0, 1_794_000_000_000, -1, 2**63, 1e308]) | _JSON
        codes = mostly(
            st.sampled_from(["UNREGISTERED", "SENDER_ID_MISMATCH"]), st.sampled_from([*sorted(fcm.CODES), "x"]), 1
        )
        typed = st.fixed_dictionaries({"@type": st.just(FCM_ERROR), "errorCode": codes})
        detail = mostly(typed, st.just({"@type": QUOTA, "violations": []}) | _JSON, 2)
        tokens = {
            "access_token": mostly(st.just("ya29.x"), st.sampled_from(["", "a b", "é"]) | st.text(max_size=5)),
            "expires_in": mostly(st.integers(60, 10_000), st.sampled_from([1e308, 0, -1, True, "3599"])),
            "token_type": mostly(st.just("Bearer"), st.sampled_from(["bearer", "mac"])),
        }
        # Each body with the status that gives it a meaning, and now and then with any other.
        kinds = [
            (410, st.fixed_dictionaries({"reason": reasons}, optional={"timestamp": times})),
            (400, st.fixed_dictionaries({"reason": reasons})),
            (404, st.lists(detail, max_size=3).map(lambda details: {"error": {"code": 400, "details": details}})),
            (200, st.fixed_dictionaries(tokens)),
            (500, _JSON),
        ]
        return st.sampled_from(kinds).flatmap(
            lambda kind: st.builds(
                lambda status, body: status.to_bytes(2, "big") + as_json(body),
                mostly(st.just(kind[0]), statuses, 2),
                kind[1],
            )
        )

    def check(self, data: bytes) -> str:
        status, body = int.from_bytes(data[:2], "big"), data[2:]
        text = body.decode("latin-1")
        wait_s = parse_retry_after(text, NOW)
        assert wait_s is None or wait_s >= 0
        reached = "" if wait_s is None else "delay"
        with suppress(ValueError, RecursionError):
            reached = "object" if isinstance(json.loads(body), dict) else reached
        for content in (body, None):
            one = apns.judge(status, content)
            assert isinstance(one, Delivered) == (status == 200)
            assert not isinstance(one, Terminal) or (status == 410 and content is not None)
            assert not isinstance(one, Mismatch) or (status == 400 and content is not None)
            two = fcm.judge(status, content, wait_s)
            assert isinstance(two, Delivered) == (status == 200)
            # Only a typed detail deletes or mismatches, and no 429, 500 or 503 ever does (PUSH-063).
            if isinstance(two, Terminal | Mismatch):
                assert content is not None
                assert b"FcmError" in content or b"\\u" in content
                assert status not in (429, 500, 503)
            if isinstance(one, Terminal | Mismatch) or isinstance(two, Terminal | Mismatch):
                reached = "verdict"
            for outcome, reasons in ((one, apns.REASONS), (two, fcm.CODES | {"quota"})):
                if isinstance(outcome, Transient):
                    assert 0 < outcome.delay_s <= RETRY_MAX_S
                if not isinstance(outcome, Delivered | Gone):
                    assert outcome.reason in reasons | {status_label(status)}
            assert fcm.drops_credentials(status, content) in (True, False)
        assert isinstance(judge_status(status), Delivered | Gone | Rejected | Transient)
        token = read_token(body)
        assert token is None or 0 < token.lifetime_s <= 3_600
        return reached if token is None else "token"


class ConfigFiles(Target):
    """Configuration files, and what is said about bad ones."""

    name = "config"
    share = 2.0
    mutations = 1
    _SECRETS = ("hunter2hunter2", "s3cr3tk3yt3xt")  # the corpus has them where secrets belong
    _SECRET_KEYS = frozenset({"jwks_url", "key", "replica_url", "service_account", "url"})

    def made(self) -> st.SearchStrategy[bytes]:
        words = ["[", "]", "[[", "]]", "{", "}", "=", "\n", '"', "'", '"""', "'''", ".", ",", "#", "\\", "\\u0000", "1"]
        words += ["1e999", "0x", "-", "nan", "inf", "true", "push", "apns", "key", "server", "listen", "auth", "keys"]
        words += ["1979-05-27T07:32:00Z", "env:HOME", "\ufeff", "\0", "é", "9" * 30]
        noise = st.lists(st.sampled_from(words), max_size=40).map(" ".join)
        documents = _tables(Config).map(toml)
        return mostly(documents, noise).map(lambda text: text.encode())

    def check(self, data: bytes) -> str:
        with tempfile.NamedTemporaryFile(suffix=".toml") as file:
            file.write(data)
            file.flush()
            try:
                config = load_config(Path(file.name), {"PUSHD_KEY": "hunter2hunter2"})
                said = repr(config)
                reached = "loaded" if data.strip() else ""
            except InvalidConfig as refusal:
                said = str(refusal)
                assert said
                reached = "judged" if _document(data) else ""
        # A mutation may turn a secret into the name of a key, and those are told when they are unknown; and it may put
        # one where none belongs, such as the path of a file.
        names, misplaced = _names(data), _names_with(data, (*self._SECRETS, "env:PUSHD_KEY")) - self._SECRET_KEYS
        if not misplaced and not any(secret in name for secret in self._SECRETS for name in names):
            assert not any(secret in said for secret in self._SECRETS)
        return reached


_PLAIN = ["", "x", "127.0.0.1:0", "env:PUSHD_KEY", "env:NONE", "hunter2hunter2", "/dev/null", "*.example.org"]


def _tables(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of a class of the configuration: few keys, and most of them right."""
    hints = typing.get_type_hints(kind, include_extras=True)
    needed = {field.name for field in attrs.fields(kind) if field.default is attrs.NOTHING}
    fields = {name: _settings(hint) for name, hint in hints.items()}

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        chosen = draw(st.sets(st.sampled_from(sorted(fields)), max_size=3))
        return {name: draw(fields[name]) for name in sorted(chosen | needed)}

    return build()


def _settings(hint: Any) -> st.SearchStrategy[Any]:
    """Values for one key."""
    keys = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Key)]
    kind = hint.__origin__ if keys else hint
    members = [one for one in typing.get_args(kind) if one is not types.NoneType] if _is_optional(kind) else [kind]
    if not keys:
        return _tables(members[0])
    wrong = st.sampled_from([*_PLAIN, 0, -1, True, 1e300, ["x"], []])
    right: st.SearchStrategy[Any]
    if typing.get_origin(members[0]) is typing.Literal:
        right = st.sampled_from(typing.get_args(members[0]))
    elif members[0] is bool:
        right = st.booleans()
    elif members[0] is int:
        right = st.integers(keys[0].low or 0, keys[0].high or 2**31) | st.sampled_from([1, 10, 1_000, 100_000])
    elif typing.get_origin(members[0]) is tuple:
        right = st.lists(st.sampled_from(["a.example", "*.example.org", "a b"]), max_size=2)
    else:
        right = st.sampled_from([keys[0].example or "127.0.0.1:0", *_PLAIN])
    return mostly(right, wrong, 9)


def _is_optional(kind: Any) -> bool:
    return isinstance(kind, types.UnionType)


def _document(data: bytes) -> dict[str, Any]:
    """What TOML there is."""
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return {}


def _names(data: bytes) -> set[str]:
    """The names of all keys of a TOML document, as far as it is one."""
    return {name for name, _ in _pairs(data)}


def _names_with(data: bytes, texts: Sequence[str]) -> set[str]:
    """The names of the keys whose values, or lists of values, have one of the texts in them."""
    return {
        name
        for name, value in _pairs(data)
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, str) and any(text in one for text in texts)
    }


def _pairs(data: bytes) -> Iterator[tuple[str, Any]]:
    """Every key of a TOML document with its value, whatever tables it is in."""
    nodes: list[Any] = [_document(data)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            yield from node.items()
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
