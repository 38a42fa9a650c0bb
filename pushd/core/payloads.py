"""The JSON bodies of a push on each channel (PUSH-060, PUSH-062, PUSH-064, PUSH-067).

A body holds the topic, the sequence id and, for a webhook, the recipient id: nothing else ever. The bodies are
concatenated rather than passed through `json.dumps`: base64, decimal and hex text never need escaping, one body is
built per delivery on the hot path, and a webhook signs exactly the bytes it sends.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping


def topic_text(topic: bytes) -> str:
    """Standard padded base64 of the topic, as every channel and `apns-collapse-id` carry it (PUSH-060)."""
    return binascii.b2a_base64(topic, newline=False).decode("ascii")


def apns_body(topic: bytes, sequence_id: int) -> bytes:
    """Body of an APNs background push: `aps` holds only content-available (PUSH-060)."""
    return f'{{"aps":{{"content-available":1}},{_push_members(topic, sequence_id)}}}'.encode("ascii")


def fcm_body(token: str, topic: bytes, sequence_id: int) -> bytes:
    """Body of `messages:send` for one registration token (PUSH-062).

    The token is the one part a client chose, so it alone goes through the JSON encoder. Apple devices reached through
    FCM must get priority 5 with a background push type, or FCM refuses the message.
    """
    return (
        f'{{"message":{{"token":{json.dumps(token)},"data":{{{_push_members(topic, sequence_id)}}},'
        '"android":{"priority":"HIGH"},'
        '"apns":{"headers":{"apns-priority":"5","apns-push-type":"background"},'
        '"payload":{"aps":{"content-available":1}}}}}'
    ).encode("ascii")


def webhook_body(topic: bytes, sequence_id: int, recipient_id: bytes) -> bytes:
    """Body of a webhook: the push members and the recipient id in lower-case hex (PUSH-064)."""
    return f'{{{_push_members(topic, sequence_id)},"recipient_id":"{recipient_id.hex()}"}}'.encode("ascii")


def read_push(members: Mapping[str, object]) -> tuple[bytes, int]:
    """Topic and sequence id out of a received push: the inverse of what the bodies above carry.

    Raises:
        ValueError: a member is missing, not text, not base64 or not plain decimal digits.
    """
    topic, sequence_id = members.get("topic"), members.get("sequence_id")
    if not isinstance(topic, str) or not isinstance(sequence_id, str):
        raise ValueError("push members must be text")
    # int() alone would also take signs, blanks, underscores and digits of other scripts.
    if not (sequence_id.isascii() and sequence_id.isdigit()):
        raise ValueError("sequence id must be decimal digits")
    return base64.b64decode(topic, validate=True), int(sequence_id)


def _push_members(topic: bytes, sequence_id: int) -> str:
    # The sequence id is text: JavaScript rounds numbers above 2**53.
    return f'"topic":"{topic_text(topic)}","sequence_id":"{sequence_id}"'
