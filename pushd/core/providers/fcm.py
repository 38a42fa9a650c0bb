"""FCM answers (PUSH-063, PUSH-069). The first row that matches decides; only typed details delete or mismatch."""

from __future__ import annotations

import json
from typing import Any

from pushd.core.providers.answers import Becomes, Row, status_label
from pushd.model import RETRY_MAX_S, Delivered, Mismatch, Outcome, Rejected, Terminal, Transient

RETRY_S = 10.0  # after any failure that is no quota failure
QUOTA_RETRY_S = 60.0  # FCM denylists senders that come back sooner

DELIVERED = Delivered()
QUOTA_FAILURE = "QuotaFailure"
_FCM_ERROR_TYPE = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
_QUOTA_FAILURE_TYPE = "type.googleapis.com/google.rpc.QuotaFailure"

# Statuses that settle the outcome, with the seconds to wait for the rest of such an answer. A detail in a 500 or 503
# can still make it a quota failure, which only lengthens the delay: worth a moment, not the attempt.
BODY_WAIT_S = {200: 0.0, 429: 0.0, 500: 1.0, 503: 1.0}

ROWS = (
    Row((200,), (), Becomes.DELIVERED, "FCM took the message."),
    Row((429,), (), Becomes.TRANSIENT, "Quota failure by status, with or without a detail.", QUOTA_RETRY_S),
    Row((), (QUOTA_FAILURE, "QUOTA_EXCEEDED"), Becomes.TRANSIENT, "Quota failure by typed detail.", QUOTA_RETRY_S),
    Row((500, 503), (), Becomes.TRANSIENT, "FCM is failing, whatever the body says or lacks.", RETRY_S),
    Row((), ("UNREGISTERED",), Becomes.TERMINAL, "FCM names the token as dead."),
    Row((), ("SENDER_ID_MISMATCH",), Becomes.MISMATCH, "The token belongs to another project."),
    Row((), ("UNAVAILABLE", "INTERNAL"), Becomes.TRANSIENT, "FCM is failing and says so in a detail.", RETRY_S),
    Row((), (), Becomes.REJECTED, "Everything else, untyped 404 included: only a typed detail deletes."),
)

# Google's published error codes: the closed list of what a reason label may be.
CODES = frozenset(
    """
    UNSPECIFIED_ERROR INVALID_ARGUMENT UNREGISTERED SENDER_ID_MISMATCH QUOTA_EXCEEDED UNAVAILABLE INTERNAL
    THIRD_PARTY_AUTH_ERROR
    """.split()  # noqa: SIM905
)

LOOK_AT = {
    "SENDER_ID_MISMATCH": "push.fcm.service_account (its project is not the app's)",
    "THIRD_PARTY_AUTH_ERROR": "the APNs key in the Firebase console",
    "http_401": "push.fcm.service_account (key revoked?)",
    "http_403": "push.fcm.service_account (role, or the FCM API of its project, missing)",
    "http_404": "push.fcm.service_account (project_id)",
}


def judge(status: int, body: bytes | None, retry_after_s: float | None) -> Outcome:
    """What an FCM answer comes to.

    Args:
        status: HTTP status.
        body: the whole body, or None when it was not read, too long or cut.
        retry_after_s: seconds the Retry-After header asked for, or None.
    """
    codes = () if body is None else _typed_codes(body)
    known = next((code for code in codes if code in CODES), None)
    row = next(row for row in ROWS if row.matches(status, codes))
    match row.becomes:
        case Becomes.DELIVERED:
            return DELIVERED
        case Becomes.TRANSIENT:
            reason = "quota" if row.delay_s == QUOTA_RETRY_S else status_label(status)
            return Transient(reason, min(max(row.delay_s, retry_after_s or 0.0), RETRY_MAX_S))
        case Becomes.TERMINAL:
            return Terminal("UNREGISTERED")
        case Becomes.MISMATCH:
            return Mismatch("SENDER_ID_MISMATCH")
        case Becomes.REJECTED:
            return Rejected(known or status_label(status))


def drops_credentials(status: int, body: bytes | None) -> bool:
    """Whether the answer says that the OAuth token itself is refused: 401 without a typed detail.

    A typed 401 (THIRD_PARTY_AUTH_ERROR) is about the APNs key stored at Google; a new OAuth token would not help.
    """
    return status == 401 and not (body and _typed_codes(body))


def _typed_codes(body: bytes) -> tuple[str, ...]:
    """Codes of the FcmError details, and `QuotaFailure` where such a detail is present."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    error = document.get("error") if isinstance(document, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    if not isinstance(details, list):
        return ()
    return tuple(code for detail in details if isinstance(detail, dict) and (code := _code(detail)))


def _code(detail: dict[str, Any]) -> str | None:
    kind = detail.get("@type")
    if kind == _QUOTA_FAILURE_TYPE:
        return QUOTA_FAILURE
    code = detail.get("errorCode") if kind == _FCM_ERROR_TYPE else None
    return code if isinstance(code, str) else None
