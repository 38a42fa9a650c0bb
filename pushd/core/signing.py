"""Standard Webhooks signatures (PUSH-064) and the id of a delivery.

The key is used as the raw bytes a client registered. Receivers that keep secrets as `whsec_` text put the base64 of
the same bytes behind that prefix.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid

_ID_PURPOSE = b"pushd webhook-id 1\0"


def webhook_id(recipient_id: bytes, topic: bytes, sequence_id: int) -> str:
    """The `webhook-id` of one delivery, a UUID of version 8 (RFC 9562 section 5.8).

    A function of what is delivered and to whom: a retry, and a resend after another instance took over, carry the same
    id, so a receiver that remembers ids sees each delivery once; two deliveries never share one. A random id would
    need a stored row per delivery to survive a failover.
    """
    digest = hashlib.sha256(_ID_PURPOSE)
    for part in (recipient_id, topic, sequence_id.to_bytes(8, "big")):
        digest.update(len(part).to_bytes(4, "big"))  # lengths keep the parts from running into each other
        digest.update(part)
    octets = bytearray(digest.digest()[:16])
    octets[6] = octets[6] & 0x0F | 0x80
    octets[8] = octets[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(octets)))


def signature(signing_key: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Value of `webhook-signature`: `v1,` and the base64 HMAC-SHA256 of `id.timestamp.body`.

    Args:
        signing_key: the recipient's key, 16 to 64 raw bytes.
        message_id: value of `webhook-id`.
        timestamp_s: value of `webhook-timestamp`, seconds since 1970.
        body: exactly the bytes that are sent.
    """
    signed = b"%s.%d.%s" % (message_id.encode("ascii"), timestamp_s, body)
    return "v1," + base64.b64encode(hmac.digest(signing_key, signed, "sha256")).decode("ascii")
