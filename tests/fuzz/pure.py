"""Targets that are functions: what a reader makes of any bytes, without a socket or a clock."""

from __future__ import annotations

import json
import tempfile
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from pushd.channels.fcm_oauth import read_token
from pushd.config import InvalidConfig, load_config
from pushd.core import admission
from pushd.core.key_package import is_acceptable, read_key_package
from pushd.core.mls import Malformed, read_framing
from pushd.core.providers import apns, fcm
from pushd.core.providers.answers import status_label
from pushd.core.providers.retry_after import parse_retry_after
from pushd.core.webhook_answers import judge_status
from pushd.core.webhook_url import parse_webhook_url
from pushd.model import RETRY_MAX_S, Delivered, Gone, Mismatch, NewEnvelope, Rejected, Terminal, Transient
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope
from pushd.rpc.translate_publish import offer_from
from tests.core.test_providers import json_values
from tests.core.test_webhook_url import URL_PIECES
from tests.fuzz.engine import Target

NOW = datetime(2026, 11, 6, 8, 49, 37, tzinfo=UTC)
NOW_S = 1_794_000_000


class Mls(Target):
    """Group messages, key packages, and envelopes with either inside. The first byte says which."""

    name = "mls"

    def check(self, data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind == b"g":
            with suppress(Malformed):
                framing = read_framing(rest)
                assert framing.group_id in rest
                # What is behind a message is padding: it changes nothing.
                assert read_framing(rest + b"\0padding") == framing
        elif kind == b"k":
            with suppress(Malformed):
                package = read_key_package(rest)
                assert package.signed_part == rest[: len(package.signed_part)]
                assert is_acceptable(package, NOW_S) in (True, False)
        else:
            self._envelope(rest)

    def _envelope(self, data: bytes) -> None:
        try:
            envelope = ClientEnvelope.FromString(data)
        except DecodeError:
            return
        offer = offer_from(envelope, NOW_S)
        if isinstance(offer, NewEnvelope):
            assert 1 <= len(offer.topic) <= 128
            assert offer.sender_hmac is None or len(offer.sender_hmac) == 32
            # What is stored reads the same again: nothing a sender wrote can change on its way through.
            again = offer_from(ClientEnvelope.FromString(offer.payload), NOW_S)
            assert again == offer
        else:
            assert isinstance(offer, admission.Unroutable | admission.Identity)


class Urls(Target):
    """Webhook URLs, in whatever bytes."""

    name = "urls"

    def inputs(self) -> st.SearchStrategy[bytes]:
        return st.one_of(URL_PIECES, URL_PIECES.map("https://".__add__)).map(lambda text: text.encode())

    def check(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        url = parse_webhook_url(text)
        if url is None:
            return
        parts = urlsplit(text)  # an independent reader must see the same host and port, and nobody's name
        assert (parts.scheme, parts.username, parts.password) == ("https", None, None)
        assert (parts.port or 443) == url.port
        assert url.address is not None or parts.hostname == url.host
        assert all("\x20" < character < "\x7f" for character in url.host_header + url.target)
        assert "@" not in url.host_header
        assert parse_webhook_url(f"https://{url.host_header}{url.target}") == url
        assert not repr(url).replace("WebhookUrl()", "")


class Answers(Target):
    """Answers of APNs, FCM and its token endpoint: two bytes of status, then headers or a body."""

    name = "answers"

    def inputs(self) -> st.SearchStrategy[bytes]:
        status = st.sampled_from([200, 400, 401, 403, 404, 410, 413, 429, 500, 503]).map(lambda n: n.to_bytes(2, "big"))
        return st.builds(lambda head, value: head + json.dumps(value).encode(), status, json_values)

    def check(self, data: bytes) -> None:
        status, body = int.from_bytes(data[:2], "big"), data[2:]
        text = body.decode("latin-1")
        wait_s = parse_retry_after(text, NOW)
        assert wait_s is None or wait_s >= 0
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
                assert b"FcmError" in content
                assert status not in (429, 500, 503)
            for outcome, reasons in ((one, apns.REASONS), (two, fcm.CODES | {"quota"})):
                if isinstance(outcome, Transient):
                    assert 0 < outcome.delay_s <= RETRY_MAX_S
                if not isinstance(outcome, Delivered | Gone):
                    assert outcome.reason in reasons | {status_label(status)}
            assert fcm.drops_credentials(status, content) in (True, False)
        assert isinstance(judge_status(status), Delivered | Gone | Rejected | Transient)
        token = read_token(body)
        assert token is None or 0 < token.lifetime_s <= 3_600


class ConfigFiles(Target):
    """Configuration files, and what is said about bad ones."""

    name = "config"
    share = 1.5
    _SECRETS = ("hunter2hunter2", "s3cr3tk3yt3xt")  # the corpus has them where secrets belong

    def inputs(self) -> st.SearchStrategy[bytes]:
        words = ["[", "]", "[[", "]]", "{", "}", "=", "\n", '"', "'", '"""', "'''", ".", ",", "#", "\\", "\\u0000", "1"]
        words += ["1e999", "0x", "-", "nan", "inf", "true", "push", "apns", "key", "server", "listen", "auth", "keys"]
        words += ["1979-05-27T07:32:00Z", "env:HOME", "\ufeff", "\0", "é", "9" * 30]
        return st.lists(st.sampled_from(words), max_size=40).map(lambda parts: " ".join(parts).encode())

    def check(self, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".toml") as file:
            file.write(data)
            file.flush()
            try:
                config = load_config(Path(file.name), {"PUSHD_KEY": "hunter2hunter2"})
                said = repr(config)
            except InvalidConfig as refusal:
                said = str(refusal)
                assert said
        # A mutation may turn a value into the name of a key, and names of unknown keys are told.
        if not any(secret in name for secret in self._SECRETS for name in _names(data)):
            assert not any(secret in said for secret in self._SECRETS)


def _names(data: bytes) -> set[str]:
    """The names of all keys of a TOML document, as far as it is one."""
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return set()
    names = set()
    nodes: list[Any] = [document]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            names |= node.keys()
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return names
