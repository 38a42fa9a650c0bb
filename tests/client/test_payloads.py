"""Reading pushes and verifying webhooks, against the backend's own bodies and a public library."""

from __future__ import annotations

import base64
import json
import time

import pytest
from standardwebhooks.webhooks import Webhook

from pushd.client import MalformedMessage, MalformedPush, Push, WebhookRefused, parse_push, verify_webhook
from pushd.core.payloads import apns_body, fcm_body, webhook_body
from pushd.core.signing import signature, webhook_id
from tests.client.rig import WELCOME, Rig, gid, topic
from tests.support.envelopes import key_package, private_message

KEY = bytes(range(32))
RECIPIENT = b"\xab" * 32
NOW_S = 1_700_000_000


def test_every_channel_carries_the_same_push() -> None:
    push = Push(topic(5), 2**63 - 1)
    assert parse_push(apns_body(topic(5), 2**63 - 1)) == push  # `aps` beside it is passed over
    assert parse_push(json.loads(fcm_body("token", topic(5), 2**63 - 1))["message"]["data"]) == push
    assert parse_push(webhook_body(topic(5), 2**63 - 1, RECIPIENT)) == Push(topic(5), 2**63 - 1, RECIPIENT)
    assert (push.group_id, push.is_welcome) == (gid(5), False)
    assert parse_push(webhook_body(WELCOME, 7, RECIPIENT).decode()).is_welcome


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        "null",
        {},
        {"topic": "AAA=", "sequence_id": "1"},
        {"topic": base64.b64encode(topic(1)).decode(), "sequence_id": 1},
        {"topic": base64.b64encode(topic(1)).decode(), "sequence_id": "-1"},
        {"topic": "!" + base64.b64encode(topic(1)).decode(), "sequence_id": "1"},
        {"topic": base64.b64encode(b"\x02" + bytes(32)).decode(), "sequence_id": "1"},
        {"topic": base64.b64encode(topic(1)).decode(), "sequence_id": "1", "recipient_id": "ab"},
        {"topic": base64.b64encode(topic(1)).decode(), "sequence_id": "1", "recipient_id": 7},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_anything_else_is_no_push_and_is_not_quoted(received) -> None:
    with pytest.raises(MalformedPush) as caught:
        parse_push(received)
    assert str(caught.value) == "not a push of this backend"
    assert caught.value.__cause__ is caught.value.__context__ is None


def signed(body: bytes, *, key: bytes = KEY, timestamp_s: int = NOW_S) -> dict[str, str]:
    message_id = webhook_id(RECIPIENT, topic(1), 9)
    return {
        "Webhook-Id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": signature(key, message_id, timestamp_s, body),
    }


BODY = webhook_body(topic(1), 9, RECIPIENT)


@pytest.mark.parametrize("age_s", [0, 300, -300])
def test_signed_webhook_is_read(age_s: int) -> None:
    headers = signed(BODY)
    assert verify_webhook(KEY, headers.items(), BODY, NOW_S + age_s) == Push(topic(1), 9, RECIPIENT)


def test_one_of_several_signatures_is_enough() -> None:
    headers = signed(BODY)
    headers["webhook-signature"] = f"v1,AAAA v1a,xyz {headers['webhook-signature']}"
    assert verify_webhook(KEY, headers.items(), BODY, NOW_S).sequence_id == 9


@pytest.mark.parametrize(
    ("change", "body", "now_s"),
    [
        ({}, BODY + b" ", NOW_S),
        ({}, BODY, NOW_S + 301),
        ({}, BODY, NOW_S - 301),
        ({"webhook-signature": ""}, BODY, NOW_S),
        ({"webhook-signature": "v1,é"}, BODY, NOW_S),
        ({"webhook-signature": "v1,\udcff"}, BODY, NOW_S),
        ({"webhook-timestamp": ""}, BODY, NOW_S),
        ({"webhook-timestamp": "-1"}, BODY, NOW_S),
        ({"webhook-timestamp": "9" * 400}, BODY, NOW_S + 0.5),
        ({"webhook-timestamp": "9" * 5_000}, BODY, NOW_S),
        ({"webhook-timestamp": str(NOW_S + 1)}, BODY, NOW_S),
        ({"Webhook-Id": ""}, BODY, NOW_S),
        ({"Webhook-Id": "é"}, BODY, NOW_S),
        (signed(BODY, key=bytes(32)), BODY, NOW_S),
    ],
)
def test_webhook_that_is_not_the_backends_is_refused(change: dict[str, str], body: bytes, now_s: float) -> None:
    with pytest.raises(WebhookRefused) as caught:
        verify_webhook(KEY, (signed(BODY) | change).items(), body, now_s)
    assert caught.value.__context__ is None


def test_signed_nonsense_is_told_from_a_forgery() -> None:
    with pytest.raises(MalformedPush):
        verify_webhook(KEY, signed(b"{}").items(), b"{}", NOW_S)


def test_public_library_agrees() -> None:
    headers = signed(BODY, timestamp_s=int(time.time()))  # the library has a clock of its own
    library = Webhook("whsec_" + base64.b64encode(KEY).decode())
    library.verify(BODY, {name.lower(): value for name, value in headers.items()})


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"sesame", id="text"),
        pytest.param(private_message()[:-1], id="cut"),
        pytest.param(b"\0\1\0\5" + key_package().serialized(), id="to-no-group"),
        pytest.param(private_message(b"sesame"), id="no-group-of-ours"),
    ],
)
async def test_only_a_message_to_a_group_is_published(memory_rig: Rig, data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        await memory_rig.client.publish_message(data)
