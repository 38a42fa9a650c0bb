"""What an app or a webhook receiver does with a push once it has one."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable, Mapping

from pushd.client.errors import MalformedPush, WebhookRefused
from pushd.client.values import Push
from pushd.core.payloads import read_push
from pushd.core.signing import signature
from pushd.core.topics import PUSH_KINDS, topic_kind
from pushd.model import RECIPIENT_ID_BYTES

WEBHOOK_TOLERANCE_S = 300  # Standard Webhooks: refuse what is older or newer than five minutes
_TIMESTAMP = re.compile("[0-9]{1,12}")  # anybody can send a header; Python refuses to convert one of 5,000 digits


def parse_push(received: Mapping[str, object] | str | bytes) -> Push:
    """Read a push as it arrived.

    Args:
        received: the `userInfo` of an APNs push, the `data` of an FCM message, or the JSON body of a webhook.

    Raises:
        MalformedPush: it is something else.
    """
    try:
        members = received if isinstance(received, Mapping) else json.loads(received)
        if not isinstance(members, Mapping):
            raise ValueError
        topic, sequence_id = read_push(members)
        recipient_id = _recipient_id(members.get("recipient_id"))
    except (ValueError, RecursionError):
        topic, sequence_id, recipient_id = b"", 0, None
    if topic_kind(topic) not in PUSH_KINDS:
        raise MalformedPush("not a push of this backend")
    return Push(topic, sequence_id, recipient_id)


def _recipient_id(text: object) -> bytes | None:
    if text is None:
        return None
    recipient_id = bytes.fromhex(text) if isinstance(text, str) else b""
    if len(recipient_id) != RECIPIENT_ID_BYTES:
        raise ValueError
    return recipient_id


def verify_webhook(signing_key: bytes, headers: Iterable[tuple[str, str]], body: bytes, now_s: float) -> Push:
    """Check that a webhook comes from the backend, and read it (PUSH-064).

    Any Standard Webhooks library does the same check, given the key as `whsec_` and its base64. Remember the
    `webhook-id` of what was handled: a retry carries the same one.

    Args:
        signing_key: the key given to `webhook()`.
        headers: name and value of every request header; names in any case.
        body: the request's bytes as they came.
        now_s: the receiver's clock in seconds since 1970.

    Raises:
        WebhookRefused: no valid signature, or a timestamp more than five minutes away.
        MalformedPush: signed, but not a push.
    """
    values = {name.lower(): value for name, value in headers}
    message_id, timestamp = values.get("webhook-id"), values.get("webhook-timestamp", "")
    if not message_id or not message_id.isascii() or not _TIMESTAMP.fullmatch(timestamp):
        raise WebhookRefused("the webhook headers are missing or malformed")
    if abs(now_s - int(timestamp)) > WEBHOOK_TOLERANCE_S:
        raise WebhookRefused("the webhook is too old or from the future")
    expected = signature(signing_key, message_id, int(timestamp), body)
    # Several signatures, separated by blanks, are how a sender changes its key without losing anyone.
    given = values.get("webhook-signature", "").split(" ")
    if not any(one.isascii() and hmac.compare_digest(expected, one) for one in given):
        raise WebhookRefused("the webhook's signature is not valid")
    return parse_push(body)
