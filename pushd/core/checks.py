"""What a registration request has to satisfy, check by check, in the order a caller is told about it.

The functions here are the rows of spec §4.2 that need nothing but the request and a value already read. The service
calls them in the table's order and answers with the first refusal; which row comes first is part of the contract
(PUSH-004), because it decides what a stranger can learn: whether an id is registered comes before anything about the
payload, and whether a secret fits comes before anything about the channel.

A refusal is a value, not an exception, so that a test table can compare it and a caller cannot forget it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from attrs import field, frozen

from pushd.core.topics import IDENTIFIER_BYTES, PUSH_KINDS
from pushd.errors import Code
from pushd.model import (
    HMAC_KEY_BYTES,
    KEY_WINDOW_KEYS,
    MAX_TARGET_CHARACTERS,
    RECIPIENT_ID_BYTES,
    RECIPIENT_SECRET_BYTES,
    Channel,
    DeliveryConfig,
    KeyWindow,
    SubscriptionChange,
)

MIN_SIGNING_KEY_BYTES = 16  # spec §4.2, check 7
MAX_SIGNING_KEY_BYTES = 64

# Kind byte and length of a topic that can be subscribed to. As a set, because it is asked once a topic.
_SUBSCRIBABLE = frozenset((bytes((kind,)), 1 + IDENTIFIER_BYTES[kind]) for kind in PUSH_KINDS)


class Refusal(enum.Enum):
    """Why a registration call is turned down. Every text is a constant (PUSH-096)."""

    MALFORMED = (Code.INVALID_ARGUMENT, "request is malformed")
    NOT_REGISTERED = (Code.NOT_FOUND, "recipient is not registered")
    WRONG_SECRET = (Code.PERMISSION_DENIED, "recipient secret is not valid")
    CHANNEL_NOT_CONFIGURED = (Code.FAILED_PRECONDITION, "channel is not configured")
    WEBHOOK_URL = (Code.INVALID_ARGUMENT, "webhook url is not allowed")
    # Clients give up for good after INVALID_ARGUMENT, and name servers recover.
    WEBHOOK_UNRESOLVED = (Code.UNAVAILABLE, "webhook host cannot be resolved now")
    SIGNING_KEY = (Code.INVALID_ARGUMENT, "webhook signing key length is not allowed")
    SUBSCRIPTION = (Code.INVALID_ARGUMENT, "subscription is malformed")
    TOPIC_LIMIT = (Code.RESOURCE_EXHAUSTED, "recipient topic limit reached")

    def __init__(self, code: Code, text: str) -> None:
        self.code = code
        self.text = text


@frozen
class Claim:
    """Who a caller says to be. Holds the hash alone: nothing behind check 2 ever needs the secret (PUSH-007)."""

    recipient_id: bytes = field(repr=False)
    secret_hash: bytes = field(repr=False)


class WireSubscription(Protocol):
    """The part of the protobuf message that is judged here. A message has these attributes as it is."""

    @property
    def topic(self) -> bytes: ...
    @property
    def hmac_epoch_base(self) -> int: ...
    @property
    def hmac_keys(self) -> Sequence[bytes]: ...
    @property
    def include_commits(self) -> bool: ...


def check_identity(recipient_id: bytes, recipient_secret: bytes) -> Claim | Refusal:
    """Check 2: both parts of the identity are 32 bytes."""
    if len(recipient_id) != RECIPIENT_ID_BYTES or len(recipient_secret) != RECIPIENT_SECRET_BYTES:
        return Refusal.MALFORMED
    return Claim(recipient_id, hashlib.sha256(recipient_secret).digest())


def check_ownership(claim: Claim, stored_hash: bytes | None) -> Refusal | None:
    """Checks 3 and 4: the recipient exists and the claim is its owner's; compared in constant time (PUSH-003).

    Register passes over NOT_REGISTERED: for it an unknown id is a new recipient.
    """
    if stored_hash is None:
        return Refusal.NOT_REGISTERED
    return None if hmac.compare_digest(claim.secret_hash, stored_hash) else Refusal.WRONG_SECRET


def check_channel(config: DeliveryConfig | None, configured: AbstractSet[Channel]) -> DeliveryConfig | Refusal:
    """Check 5: the request names a channel, and that channel has a config block.

    A request that names none is malformed, except where no channel is configured: there every Register answers
    FAILED_PRECONDITION (PUSH-070).
    """
    if config is None:
        return Refusal.MALFORMED if configured else Refusal.CHANNEL_NOT_CONFIGURED
    return config if config.channel in configured else Refusal.CHANNEL_NOT_CONFIGURED


def check_delivery(config: DeliveryConfig) -> Refusal | None:
    """Check 7, the length of a webhook's signing key, then whether the token or URL can be stored at all.

    The spec sets no bound on a token. PostgreSQL refuses NUL in text, and an unbounded token would let one recipient
    store 25 MiB, so both are malformed; they come last because the spec's own rows keep their order.
    """
    if config.signing_key is not None and not (
        MIN_SIGNING_KEY_BYTES <= len(config.signing_key) <= MAX_SIGNING_KEY_BYTES
    ):
        return Refusal.SIGNING_KEY
    if not 1 <= len(config.target) <= MAX_TARGET_CHARACTERS or "\0" in config.target:
        return Refusal.MALFORMED
    return None


class UpdateCheck:
    """Check 8, topic by topic: every topic and key window has its shape, and no topic occurs twice (PUSH-022).

    One for each request, asked about every add and every remove. Which of them is refused first makes no difference to
    the answer. It takes them one at a time because a request may hold a million, and others want to run meanwhile.
    """

    def __init__(self) -> None:
        self._topics: set[bytes] = set()

    def add(self, add: WireSubscription) -> SubscriptionChange | Refusal:
        """The change that `add` asks for."""
        topic, epoch_base = add.topic, add.hmac_epoch_base
        # Counted before they are read: one add of the largest size holds millions of keys.
        if not self._accepts(topic) or epoch_base < 0 or len(add.hmac_keys) > KEY_WINDOW_KEYS:
            return Refusal.SUBSCRIPTION
        keys = tuple(add.hmac_keys)
        if any(len(key) != HMAC_KEY_BYTES for key in keys):
            return Refusal.SUBSCRIPTION
        # Without keys the base says nothing; None keeps "no window" a single state in the table.
        window = KeyWindow(epoch_base, keys) if keys else None
        return SubscriptionChange(topic, window, add.include_commits)

    def remove(self, topic: bytes) -> bytes | Refusal:
        """The topic itself. One that could never have been added is a mistake of the caller."""
        return topic if self._accepts(topic) else Refusal.SUBSCRIPTION

    def _accepts(self, topic: bytes) -> bool:
        if (topic[:1], len(topic)) not in _SUBSCRIBABLE or topic in self._topics:
            return False
        self._topics.add(topic)
        return True
