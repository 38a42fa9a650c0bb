"""The keys by which an inbox marks its own messages, so that it is not woken for them (PUSH-044, PUSH-086, PUSH-102).

All installations of an inbox share one root key. Per group and 30-day epoch a key is derived from it; the sender tags a
message with HMAC-SHA256 under the key of its own clock's epoch, and uploads the keys of three epochs with each
subscription, so that the backend can recognise the tag without ever seeing the root key.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pushd.model import HMAC_EPOCH_NS, HMAC_KEY_BYTES, KEY_WINDOW_KEYS, KeyWindow

ROOT_KEY_BYTES = 42  # random bytes an inbox; HKDF-SHA256 input

_SALT = b"libXMTP HKDF salt!"  # wire contract: other clients of the inbox derive the same keys


def epoch_at(time_ns: int) -> int:
    """The 30-day epoch of a time in nanoseconds since 1970."""
    return time_ns // HMAC_EPOCH_NS


def derive_key(root_key: bytes, group_id: bytes, epoch: int) -> bytes:
    """The 42-byte key of one group and epoch: HKDF-SHA256 (RFC 5869) of the root key and the group id.

    Args:
        root_key: the inbox's 42 bytes.
        group_id: the group's 16 bytes.
        epoch: from `epoch_at`; enters the derivation as signed 64-bit little-endian.
    """
    info = group_id + epoch.to_bytes(8, "little", signed=True)
    return HKDF(SHA256(), HMAC_KEY_BYTES, _SALT, info).derive(root_key + group_id)


def key_window(root_key: bytes, group_id: bytes, current_epoch: int) -> KeyWindow:
    """The keys to upload: those of the epoch before, the current one and the next (PUSH-086)."""
    base = current_epoch - 1
    return KeyWindow(base, tuple(derive_key(root_key, group_id, base + slot) for slot in range(KEY_WINDOW_KEYS)))


def sender_hmac(key: bytes, data: bytes) -> bytes:
    """The tag of an outgoing message: 32 bytes over exactly the serialized MLS bytes of `GroupMessage.data`."""
    return hmac.digest(key, data, "sha256")


def root_key_fingerprint(root_key: bytes) -> bytes:
    """32 bytes that tell root keys apart without giving one away (the input has 336 random bits)."""
    return hashlib.sha256(root_key).digest()
