"""Which envelopes may be stored, and as what (PUSH-030, 031, 032).

An envelope that cannot be filed under a topic is refused. One that can but fails validation is refused too, unless
the same envelope is already stored: a client that retries must be told of its success, even when the key package it
published has expired in between.
"""

from __future__ import annotations

import enum

from attrs import frozen

from pushd.core.canonical import element_bytes, message_hash
from pushd.core.key_package import is_acceptable, read_key_package
from pushd.core.mls import Malformed, read_framing
from pushd.core.topics import topic_of
from pushd.errors import Code
from pushd.model import HMAC_BYTES, NewEnvelope, TopicKind

IDENTITY_UPDATES_UNSUPPORTED = "identity updates are not supported"


class Reason(enum.IntEnum):
    """`PublishError.Reason`, numbered as on the wire."""

    MALFORMED_PAYLOAD = 1
    INVALID_KEY_PACKAGE = 2
    INVALID_IDENTITY_UPDATE = 3
    INVALID_SIGNATURE = 4
    TOO_LARGE = 5


@frozen
class PublishRefusal:
    """Why a publish is refused as a whole. `index` is the position of the envelope at fault, where there is one."""

    code: Code
    text: str
    reason: Reason | None = None
    index: int | None = None


@frozen
class Unroutable:
    """An envelope that names no topic, or whose payload cannot be read; `size` is that of its canonical bytes."""

    size: int


@frozen
class Identity:
    """An identity update. Nothing here can verify one, and nothing unverified is stored."""

    size: int


Offer = NewEnvelope | Unroutable | Identity
"""One element of a publish request, parsed."""


@frozen
class PublishLimits:
    """The bounds of one publish, in bytes of canonical encoding and in topics."""

    max_request_bytes: int = 26_214_400
    max_envelope_bytes: int = 1_048_576
    max_publish_topics: int = 1_000


@frozen
class Retention:
    """How long each kind is kept, in seconds. Commits, proposals and commit-log entries never expire."""

    group_message_s: int = 7_776_000
    welcome_s: int = 7_776_000
    key_package_s: int = 7_776_000

    def of(self, envelope: NewEnvelope) -> int | None:
        """Nanoseconds until `envelope` expires, or None for never."""
        match envelope.kind:
            case TopicKind.GROUP_MESSAGE if not envelope.is_commit_or_proposal:
                return self.group_message_s * 1_000_000_000
            case TopicKind.WELCOME:
                return self.welcome_s * 1_000_000_000
            case TopicKind.KEY_PACKAGE:
                return self.key_package_s * 1_000_000_000
            case _:
                return None


def offer_group_message(data: bytes, sender_hmac: bytes, should_push: bool, payload: bytes) -> Offer:
    """A group message; `data` is its MLSMessage, `payload` the canonical bytes of the whole envelope.

    Commits and proposals are eligible whatever the sender's flag says: clients leave it unset on them, and each
    subscription decides for itself (PUSH-030). A sender HMAC of a wrong length is nothing to compare with later.
    """
    try:
        framing = read_framing(data)
    except Malformed:
        return Unroutable(len(payload))
    topic = topic_of(TopicKind.GROUP_MESSAGE, framing.group_id)
    if topic is None:
        return Unroutable(len(payload))
    return NewEnvelope(
        TopicKind.GROUP_MESSAGE,
        topic,
        payload,
        message_hash(payload),
        is_commit_or_proposal=framing.is_commit_or_proposal,
        push_eligible=framing.is_commit_or_proposal or should_push,
        sender_hmac=sender_hmac if len(sender_hmac) == HMAC_BYTES else None,
    )


def offer_welcome(installation_key: bytes, payload: bytes) -> Offer:
    """A welcome or a welcome pointer; nothing behind its address is readable here."""
    topic = topic_of(TopicKind.WELCOME, installation_key)
    if topic is None:
        return Unroutable(len(payload))
    return NewEnvelope(TopicKind.WELCOME, topic, payload, message_hash(payload), push_eligible=True)


def offer_key_package(serialized: bytes, payload: bytes, now_s: int) -> Offer:
    """A key package, judged at `now_s` (seconds of Unix time)."""
    try:
        package = read_key_package(serialized)
    except Malformed:
        return Unroutable(len(payload))
    topic = topic_of(TopicKind.KEY_PACKAGE, package.leaf_node.signature_key)
    if topic is None:
        return Unroutable(len(payload))
    return NewEnvelope(
        TopicKind.KEY_PACKAGE, topic, payload, message_hash(payload), is_admissible=is_acceptable(package, now_s)
    )


def offer_commit_log_entry(group_id: bytes, payload: bytes) -> Offer:
    """An entry of a group's commit log; its signature is its readers' business."""
    topic = topic_of(TopicKind.COMMIT_LOG, group_id)
    if topic is None:
        return Unroutable(len(payload))
    return NewEnvelope(TopicKind.COMMIT_LOG, topic, payload, message_hash(payload))


def size_of(offer: Offer) -> int:
    """Canonical size in bytes."""
    return len(offer.payload) if isinstance(offer, NewEnvelope) else offer.size


def refuse_envelope(index: int, reason: Reason) -> PublishRefusal:
    """The refusal of a request for the envelope at `index`."""
    return PublishRefusal(Code.INVALID_ARGUMENT, "envelope validation failed", reason, index)


@frozen
class Batch:
    """The distinct envelopes in order of first appearance, and for each position which one it is."""

    distinct: tuple[NewEnvelope, ...]
    places: tuple[int, ...]


class Folding:
    """Folds envelopes with equal topic and hash into one; a repeat in a request is stored once and answered twice."""

    def __init__(self) -> None:
        self._distinct: list[NewEnvelope] = []
        self._seen: dict[tuple[bytes, bytes], int] = {}
        self._places: list[int] = []

    def add(self, envelope: NewEnvelope) -> None:
        """The next position."""
        place = self._seen.setdefault((envelope.topic, envelope.message_hash), len(self._distinct))
        if place == len(self._distinct):
            self._distinct.append(envelope)
        self._places.append(place)

    def batch(self) -> Batch:
        """What was added so far."""
        return Batch(tuple(self._distinct), tuple(self._places))


class Intake:
    """The offers of one request, taken in one by one, since the largest request holds them by the hundred thousand.

    Attributes:
        count: offers taken in.
        unroutable: position of the first one without a topic, None as long as there is none.
        routable: the ones before that.
    """

    def __init__(self, limits: PublishLimits) -> None:
        self._bytes = 0
        self._has_identity = False
        self._limits = limits
        self._too_large: int | None = None
        self._topics: set[bytes] = set()
        self.count = 0
        self.routable = Folding()
        self.unroutable: int | None = None

    def add(self, offer: Offer) -> None:
        """Take in the next one."""
        size = size_of(offer)
        self._bytes += element_bytes(size)
        if size > self._limits.max_envelope_bytes and self._too_large is None:
            self._too_large = self.count
        if isinstance(offer, NewEnvelope):
            self._topics.add(offer.topic)
            if self.unroutable is None:
                self.routable.add(offer)
        else:
            self._has_identity |= isinstance(offer, Identity)
            if self.unroutable is None:
                self.unroutable = self.count
        self.count += 1

    def refusal(self) -> PublishRefusal | None:
        """What needs no database: bounds first, since they hold for duplicates too, then identity updates."""
        if self._bytes > self._limits.max_request_bytes:
            return PublishRefusal(Code.INVALID_ARGUMENT, "publish request exceeds byte limit", Reason.TOO_LARGE)
        if self._too_large is not None:
            text = "envelope exceeds byte limit"
            return PublishRefusal(Code.INVALID_ARGUMENT, text, Reason.TOO_LARGE, self._too_large)
        if self._has_identity:
            return PublishRefusal(Code.UNIMPLEMENTED, IDENTITY_UPDATES_UNSUPPORTED)
        if len(self._topics) > self._limits.max_publish_topics:
            return PublishRefusal(Code.INVALID_ARGUMENT, "publish exceeds topic limit", Reason.TOO_LARGE)
        return None
