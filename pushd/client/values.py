"""The frozen values of the SDK's surface. Tokens, URLs, keys and ids are left out of every `repr` (PUSH-096)."""

from __future__ import annotations

import enum
from collections.abc import Set as AbstractSet

from attrs import field, frozen

from pushd.errors import Code
from pushd.model import Channel, DeliveryConfig, TopicKind


class Consent(enum.IntEnum):
    """What the user thinks of a conversation; a conversation without a record is UNKNOWN. Wire numbers."""

    UNKNOWN = 1
    ALLOWED = 2
    DENIED = 3


class GroupKind(enum.IntEnum):
    """What a group is for. SYNC groups connect the installations of one inbox and are hidden from the user."""

    GROUP = 1
    DM = 2
    SYNC = 3


class Override(enum.Enum):
    """The user's word about one conversation; it beats the rules (PUSH-084)."""

    ENABLED = 1
    DISABLED = 0
    NONE = None


def apns(token: str) -> DeliveryConfig:
    """Deliver through Apple's service to a device token in hexadecimal."""
    return DeliveryConfig(Channel.APNS, token)


def fcm(token: str) -> DeliveryConfig:
    """Deliver through Firebase Cloud Messaging to a registration token."""
    return DeliveryConfig(Channel.FCM, token)


def webhook(url: str, signing_key: bytes) -> DeliveryConfig:
    """Deliver to an https URL; every request is signed with `signing_key`, 16 to 64 bytes."""
    return DeliveryConfig(Channel.HTTP, url, signing_key)


@frozen
class NotificationConfig:
    """How this installation is reached, and the rules by which its topics are chosen (spec §4.8).

    Attributes:
        delivery: from `apns()`, `fcm()` or `webhook()`.
        consent_states: conversations in these states are subscribed, unless an override says otherwise.
        include_welcomes: also be told of invitations to new groups.
        include_sync_groups: also subscribe the groups between the inbox's own installations.
        include_commits: also be told of membership changes and other commits and proposals.
    """

    delivery: DeliveryConfig
    consent_states: AbstractSet[Consent] = frozenset((Consent.ALLOWED,))
    include_welcomes: bool = True
    include_sync_groups: bool = False
    include_commits: bool = False


@frozen
class RecipientState:
    """The backend's view of this recipient, as its last answer gave it."""

    topic_count: int
    channel: Channel | None
    """None for a channel number this version does not know."""
    expires_at_ns: int


@frozen
class Disabled:
    """Notifications are off."""


@frozen
class Enabled:
    """Notifications are on and kept in step.

    Attributes:
        channel: how this installation is reached.
        registered: the backend has confirmed the present configuration.
        last_state: what the backend answered last, None before its first answer.
        repairing: every topic is being uploaded again because the backend's count differed.
        limited: the backend's topic limit was reached; some conversations get no pushes.
    """

    channel: Channel
    registered: bool
    last_state: RecipientState | None
    repairing: bool
    limited: bool


@frozen
class Failed:
    """The backend refused for good; only another `enable_notifications` starts again (PUSH-089)."""

    code: Code


NotificationState = Disabled | Enabled | Failed


@frozen
class Push:
    """A received push: something new is stored on `topic`, at `sequence_id` or above.

    Attributes:
        topic: kind byte and identifier.
        sequence_id: position of the envelope that caused the push.
        recipient_id: whom it was meant for; only webhooks carry it.
    """

    topic: bytes = field(repr=False)
    sequence_id: int
    recipient_id: bytes | None = field(default=None, repr=False)

    @property
    def is_welcome(self) -> bool:
        """Whether it announces an invitation to a group, not a message in one."""
        return self.topic[0] == TopicKind.WELCOME

    @property
    def group_id(self) -> bytes | None:
        """The group a message arrived in, or None for a welcome."""
        return None if self.is_welcome else self.topic[1:]
