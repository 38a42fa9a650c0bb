"""APNs answers (PUSH-061). Status and reason must both match; what no row names is rejected."""

from __future__ import annotations

import json

from pushd.core.providers.answers import Becomes, Row, status_label
from pushd.model import Delivered, Mismatch, Outcome, Rejected, Terminal, Transient

RETRY_S = 1.0  # PUSH-069
DELIVERED = Delivered()
EXPIRED_JWT = "ExpiredProviderToken"
EXPIRED = Rejected(EXPIRED_JWT)
"""The one answer that a sender acts on: compare by identity."""
UNUSABLE_TOKEN = Rejected("token_not_hex")

# Statuses that say it all, with the seconds to wait for the rest of such an answer: their reasons decide nothing.
BODY_WAIT_S = {200: 0.0, 429: 0.0, 500: 0.0, 503: 0.0}

ROWS = (
    Row((200,), (), Becomes.DELIVERED, "APNs took the push."),
    Row((429, 500, 503), (), Becomes.TRANSIENT, "APNs is busy or failing, or this topic is throttled.", RETRY_S),
    Row((410,), ("Unregistered", "ExpiredToken"), Becomes.TERMINAL, "APNs names the token as dead."),
    Row((400,), ("BadDeviceToken",), Becomes.MISMATCH, "The token may belong to the other environment."),
    Row((400,), ("DeviceTokenNotForTopic",), Becomes.MISMATCH, "The token belongs to another app."),
    Row(
        (403,),
        (EXPIRED_JWT,),
        Becomes.REJECTED,
        "Only when a new provider token is refused as well: the first such answer causes one resend in the attempt.",
    ),
    Row((), (), Becomes.REJECTED, "Everything else: trying again would not change the answer."),
)

# Apple's published reasons: the closed list of what a reason label may be. Text outside it is never repeated.
REASONS = frozenset(
    """
    BadCertificate BadCertificateEnvironment BadCollapseId BadDeviceToken BadEnvironmentKeyIdInToken BadExpirationDate
    BadMessageId BadPath BadPriority BadTopic DeviceTokenNotForTopic DuplicateHeaders ExpiredProviderToken ExpiredToken
    Forbidden IdleTimeout InternalServerError InvalidProviderToken InvalidPushType MethodNotAllowed MissingDeviceToken
    MissingProviderToken MissingTopic PayloadEmpty PayloadTooLarge ServiceUnavailable Shutdown
    TooManyProviderTokenUpdates TooManyRequests TopicDisallowed UnrelatedKeyIdInToken Unregistered
    """.split()  # noqa: SIM905
)

# Reasons that usually mean a mistake in this server's configuration, with the place to look.
LOOK_AT = {
    "BadDeviceToken": "push.apns.environment",
    "DeviceTokenNotForTopic": "push.apns.bundle_id",
    "BadTopic": "push.apns.bundle_id",
    "TopicDisallowed": "push.apns.bundle_id",
    "InvalidProviderToken": "push.apns.key, push.apns.key_id and push.apns.team_id",
    "UnrelatedKeyIdInToken": "push.apns.key_id",
    "BadEnvironmentKeyIdInToken": "push.apns.environment",
    EXPIRED_JWT: "the clock of this machine",
}


def judge(status: int, body: bytes | None) -> Outcome:
    """What an APNs answer comes to.

    Args:
        status: HTTP status.
        body: the whole body, or None when it was not read, too long or cut.
    """
    reason = _reason(body)
    label = reason if reason in REASONS else status_label(status)
    row = next(row for row in ROWS if row.matches(status, (reason,)))
    match row.becomes:
        case Becomes.DELIVERED:
            return DELIVERED
        case Becomes.TRANSIENT:
            return Transient(status_label(status), row.delay_s)
        case Becomes.TERMINAL:
            return Terminal(label)
        case Becomes.MISMATCH:
            return Mismatch(label)
        case Becomes.REJECTED:
            return EXPIRED if EXPIRED_JWT in row.codes else Rejected(label)


def is_device_token(token: str) -> bool:
    """Whether `token` is hex of whole bytes: all that APNs takes, and nothing that could leave its path segment."""
    return len(token) % 2 == 0 and token != "" and not token.strip("0123456789abcdefABCDEF")


def _reason(body: bytes | None) -> str:
    if not body:
        return ""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    reason = document.get("reason") if isinstance(document, dict) else None
    return reason if isinstance(reason, str) else ""
