"""Frozen value types shared by every layer.

Private fields (ids, secrets, targets, keys, topics) are left out of every `repr`, because a value object is what ends
up in a traceback or a log line by accident (PUSH-096).
"""

from __future__ import annotations

import enum

from attrs import field, frozen

MAX_SEQUENCE_ID = 2**63 - 1  # the column is a signed 64-bit number, the wire's field an unsigned one
RECIPIENT_ID_BYTES = 32
RECIPIENT_SECRET_BYTES = 32
HMAC_KEY_BYTES = 42
HMAC_BYTES = 32
KEY_WINDOW_KEYS = 3
HMAC_EPOCH_S = 2_592_000  # 30 days (spec §4.7, fixed protocol constant)
HMAC_EPOCH_NS = HMAC_EPOCH_S * 1_000_000_000

WINDOW_ROWS = 1_024  # eligible rows a window (spec §4.7, as the next four)
PAGE_DELIVERIES = 1_000
RETAINED_DELIVERIES = 10_000
IN_FLIGHT_PER_CHANNEL = 256
ATTEMPT_S = 10.0  # one attempt: credentials, DNS, connect, headers, body
RETRY_MAX_S = 300.0
TIMED_OUT = "timeout"  # reason of a transient outcome whose attempt ran out of time
MAX_TARGET_CHARACTERS = 2_048  # device token or webhook URL; providers' are a tenth of that, and rows must stay small


class Channel(enum.IntEnum):
    """How the backend reaches a recipient. Numbers are those of the wire and of the `channel` column."""

    APNS = 1
    FCM = 2
    HTTP = 3

    @property
    def label(self) -> str:
        """The value of the `channel` metric label: apns, fcm or http."""
        return self.name.lower()


class TopicKind(enum.IntEnum):
    """First byte of a topic (spec 001 topic layout)."""

    GROUP_MESSAGE = 0
    WELCOME = 1
    IDENTITY_UPDATE = 2
    KEY_PACKAGE = 3
    COMMIT_LOG = 4


@frozen
class DeliveryConfig:
    """Where one recipient's pushes go: device token or webhook URL, with the webhook's signing key."""

    channel: Channel
    target: str = field(repr=False)
    signing_key: bytes | None = field(default=None, repr=False)


@frozen
class KeyWindow:
    """Up to three HMAC keys for consecutive 30-day epochs; the key of `epoch_base + n` is `keys[n]`."""

    epoch_base: int
    keys: tuple[bytes, ...] = field(repr=False)


@frozen
class SubscriptionChange:
    """One add of UpdateSubscriptions after its shape was checked."""

    topic: bytes = field(repr=False)
    key_window: KeyWindow | None
    include_commits: bool


@frozen
class RecipientState:
    """What Register and UpdateSubscriptions answer (PUSH-023)."""

    topic_count: int
    channel: Channel
    renewed_ns: int


@frozen(eq=False)
class Delivery:
    """One (row, subscription) send. Compared by identity: a replayed window makes new deliveries."""

    sequence_id: int
    topic: bytes = field(repr=False)
    recipient_id: bytes = field(repr=False)
    config: DeliveryConfig
    secret_hash: bytes = field(repr=False)
    """SHA-256 of the owner's secret: part of the guard of the delete in PUSH-046, because whoever
    registers with another secret is another owner, even with the same token."""
    server_ns: int = 0
    """When the row was stored, by the database's clock; 0 for a push that no row stands behind."""


@frozen
class NewEnvelope:
    """One envelope of a publish after it was parsed: everything its row will hold but the ids and times."""

    kind: TopicKind
    topic: bytes = field(repr=False)
    payload: bytes = field(repr=False)
    """Canonical ClientEnvelope bytes."""
    message_hash: bytes = field(repr=False)
    is_commit_or_proposal: bool = False
    push_eligible: bool = False
    sender_hmac: bytes | None = field(default=None, repr=False)
    is_admissible: bool = True
    """False when it failed validation: it may then only succeed as a duplicate of a stored envelope."""


@frozen
class EnvelopeMeta:
    """What a publisher and a reader are told about a stored envelope."""

    sequence_id: int
    server_ns: int
    expiry_ns: int | None
    message_hash: bytes = field(repr=False)
    topic: bytes = field(repr=False)
    is_commit_or_proposal: bool


@frozen
class StoredEnvelope:
    """One row read back."""

    meta: EnvelopeMeta
    payload: bytes = field(repr=False)


# What one attempt came to. Closed: take it apart with `match` and end with `assert_never`.


@frozen
class Delivered:
    """The provider took it."""


@frozen
class Rejected:
    """The provider refused this message; no retry, the recipient stays. `reason` is from a closed list."""

    reason: str


@frozen
class Mismatch:
    """The token does not belong to this sender (environment, bundle id, project); no retry, the recipient stays."""

    reason: str


@frozen
class Terminal:
    """The provider named the token as dead; the recipient is deleted if its configuration is still the one used."""

    reason: str


@frozen
class Gone:
    """A webhook answered 404 or 410: retried; terminal only if every attempt answered so (PUSH-065)."""

    status: int


@frozen
class Transient:
    """Failed or unknown; retried after at least `delay_s` seconds (PUSH-069). `reason` is from a closed list."""

    reason: str
    delay_s: float


Outcome = Delivered | Rejected | Mismatch | Terminal | Gone | Transient
