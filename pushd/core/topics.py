"""Topics: a kind byte and an identifier of that kind's fixed length, nothing before, between or after (PUSH-032).

A publisher never names a topic. It follows from what the payload says, so an envelope cannot be filed elsewhere than
where its readers look, whoever sent it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pushd.model import TopicKind

GROUP_ID_BYTES = 16
KEY_BYTES = 32  # an Ed25519 installation key, or an inbox id (a SHA-256)

IDENTIFIER_BYTES: Mapping[TopicKind, int] = {
    TopicKind.GROUP_MESSAGE: GROUP_ID_BYTES,
    TopicKind.WELCOME: KEY_BYTES,
    TopicKind.IDENTITY_UPDATE: KEY_BYTES,
    TopicKind.KEY_PACKAGE: KEY_BYTES,
    TopicKind.COMMIT_LOG: GROUP_ID_BYTES,
}

PUSH_KINDS = frozenset({TopicKind.GROUP_MESSAGE, TopicKind.WELCOME})
"""The kinds pushes exist for: what a subscription may name, and what an eligible envelope can be (PUSH-022, 031)."""

_KIND_PREFIX = {kind: bytes((kind,)) for kind in TopicKind}


def topic_of(kind: TopicKind, identifier: bytes) -> bytes | None:
    """The topic of an identifier, or None when its length is not the kind's."""
    if len(identifier) != IDENTIFIER_BYTES[kind]:
        return None
    return _KIND_PREFIX[kind] + identifier


def topic_kind(topic: bytes) -> TopicKind | None:
    """The kind of a topic a caller named, or None when the kind is unknown or the length is not the kind's."""
    if not topic:
        return None
    try:
        kind = TopicKind(topic[0])
    except ValueError:
        return None
    return kind if len(topic) == 1 + IDENTIFIER_BYTES[kind] else None


def topic_lock_key(topic: bytes) -> int:
    """The advisory lock of a topic: the first 8 bytes of its SHA-256 as a signed number.

    Two topics that collide are merely published one after the other.
    """
    return int.from_bytes(hashlib.sha256(topic).digest()[:8], "big", signed=True)
