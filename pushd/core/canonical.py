"""The bytes an envelope is stored and hashed as: the server's own encoding of what it decoded (PUSH-032).

Two envelopes that decode equal must hash equal, however their senders' encoders ordered fields, padded numbers or
spelled out defaults. The protobuf runtime writes known fields in ascending order and leaves defaults out; what it does
not do by itself is drop the fields it does not know, which it keeps and writes back.
"""

from __future__ import annotations

import hashlib

from google.protobuf.message import Message


def canonical_bytes(message: Message) -> bytes:
    """The canonical encoding of a decoded message, which loses its unknown fields by this.

    Recorded as golden bytes in the tests: a runtime that encoded differently would make retries new envelopes.
    """
    message.DiscardUnknownFields()
    return bytes(message.SerializeToString(deterministic=True))


def message_hash(canonical: bytes) -> bytes:
    """SHA-256, the envelope's identity within its topic."""
    return hashlib.sha256(canonical).digest()


def element_bytes(size: int) -> int:
    """What a message of this size takes as an element of a repeated field with a number below 16."""
    return 1 + (max(size.bit_length(), 1) + 6) // 7 + size
