"""Whether a delivery's row was sent by the recipient's own inbox (PUSH-044).

The sender tags a message with HMAC-SHA256 under its inbox's key of the 30-day epoch. A recipient who uploaded that key
would be told of its own message, so the delivery is dropped. Every doubt (no key, no tag, bytes that do not decode)
sends: a superfluous push is harmless, a missing one is not.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from attrs import field, frozen

from pushd.model import HMAC_EPOCH_NS

_GROUP_MESSAGE = 1  # field of ClientEnvelope
_DATA = 1  # field of GroupMessage
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}


@frozen
class HmacCheck:
    """One delivery that has to be compared before it is sent.

    Attributes:
        place: index of the delivery in its page.
        sequence_id: its row.
        key: the recipient's key for the row's epoch.
        sender_hmac: the row's tag.
    """

    place: int
    sequence_id: int
    key: bytes = field(repr=False)
    sender_hmac: bytes = field(repr=False)


def key_in_window(server_ns: int, epoch_base: int | None, keys: Sequence[bytes | None]) -> bytes | None:
    """The key for the epoch of `server_ns`, or None when the window does not cover it.

    Args:
        server_ns: when the row was stored, in nanoseconds.
        epoch_base: epoch of the first key, None for a subscription without keys.
        keys: the keys of consecutive epochs; a missing one is None.
    """
    if epoch_base is None:
        return None
    slot = server_ns // HMAC_EPOCH_NS - epoch_base
    return keys[slot] if 0 <= slot < len(keys) else None


def message_data(payload: bytes) -> bytes | None:
    """`group_message.data` of a stored ClientEnvelope, or None when the bytes are anything else.

    Stored bytes are the server's own encoding, so one pass over two levels of fields is enough; the protobuf runtime
    would copy a payload of a megabyte twice for the same answer.
    """
    try:
        message = _last_field(memoryview(payload), _GROUP_MESSAGE)
        data = None if message is None else _last_field(message, _DATA)
    except (ValueError, IndexError):
        return None
    if message is None:
        return None
    return b"" if data is None else bytes(data)


def own_keys(data: bytes, keys: Iterable[bytes], sender_hmac: bytes) -> set[bytes]:
    """Those of `keys` whose HMAC over `data` equals `sender_hmac`, each compared in constant time."""
    return {key for key in keys if hmac.compare_digest(hmac.digest(key, data, "sha256"), sender_hmac)}


def _last_field(view: memoryview, wanted: int) -> memoryview | None:
    """The value of the last field `wanted` of a message; ValueError or IndexError when it is not protobuf."""
    found: memoryview | None = None
    position = 0
    while position < len(view):
        tag, position = _varint(view, position)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length, position = _varint(view, position)
            end = position + length
        elif kind == 0:
            _, end = _varint(view, position)
        elif kind in _FIXED_BYTES:
            end = position + _FIXED_BYTES[kind]
        else:
            raise ValueError("unknown wire type")
        if end > len(view):
            raise ValueError("truncated field")
        if tag >> 3 == wanted:
            if kind != _LENGTH_DELIMITED:
                raise ValueError("wrong wire type")
            found = view[position:end]
        position = end
    return found


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
