"""The client SDK: notifications that keep themselves in step with what the user wants.

    async with open_client("app.db", "https://push.example.org", installation_key=key) as client:
        await client.enable_notifications(NotificationConfig(fcm(token)))

Runs under Trio and under asyncio. `docs/client.md` has a complete example.
"""

from pushd.client.client import Client, Conversation, Page, open_client, open_with_backend
from pushd.client.errors import (
    CallFailed,
    ClientError,
    InvalidConfig,
    MalformedMessage,
    MalformedPush,
    NotificationsDelayed,
    NotificationsStopped,
    RunnerDisabled,
    Superseded,
    UnknownConversation,
    UnusableFile,
    UnusableToken,
    WebhookRefused,
)
from pushd.client.payloads import parse_push, verify_webhook
from pushd.client.tasks import Backoff, TryAgain
from pushd.client.values import (
    Consent,
    Disabled,
    Enabled,
    Failed,
    GroupKind,
    NotificationConfig,
    NotificationState,
    Override,
    Push,
    RecipientState,
    apns,
    fcm,
    webhook,
)
from pushd.errors import Code

__all__ = [
    "Backoff",
    "CallFailed",
    "Client",
    "ClientError",
    "Code",
    "Consent",
    "Conversation",
    "Disabled",
    "Enabled",
    "Failed",
    "GroupKind",
    "InvalidConfig",
    "MalformedMessage",
    "MalformedPush",
    "NotificationConfig",
    "NotificationState",
    "NotificationsDelayed",
    "NotificationsStopped",
    "Override",
    "Page",
    "Push",
    "RecipientState",
    "RunnerDisabled",
    "Superseded",
    "TryAgain",
    "UnknownConversation",
    "UnusableFile",
    "UnusableToken",
    "WebhookRefused",
    "apns",
    "fcm",
    "open_client",
    "open_with_backend",
    "parse_push",
    "verify_webhook",
    "webhook",
]
