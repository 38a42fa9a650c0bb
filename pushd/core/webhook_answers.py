"""What one webhook attempt came to (PUSH-065): the table of statuses, and a name for every other end."""

from __future__ import annotations

from pushd import model
from pushd.model import Delivered, Gone, Outcome, Rejected, Transient

# PUSH-069. Retry-After is not honoured here: a receiver answering 503 could park its deliveries for minutes, and what
# is parked counts in the retained work that every channel shares.
RETRY_DELAY_S = 1.0

UNUSABLE_TARGET = Rejected("unusable_target")
"""The stored URL or key could not have been registered; nothing is sent."""
BLOCKED_ADDRESS = Rejected("blocked_address")
"""One of the host's addresses is one that no webhook may reach (PUSH-066); nothing is sent."""
NO_ADDRESS = Transient("no_address", RETRY_DELAY_S)
NOT_CONNECTED = Transient("not_connected", RETRY_DELAY_S)
TLS_FAILED = Transient("tls_failed", RETRY_DELAY_S)
"""The handshake failed: a certificate that does not fit, or no common version. No HTTP byte was sent."""
CONNECTION_LOST = Transient("connection_lost", RETRY_DELAY_S)
"""Lost before a status came. Whether the receiver took the push is unknown; a retry may duplicate it."""
NOT_HTTP = Transient("not_http", RETRY_DELAY_S)
"""An answer that is not HTTP/1.1, or whose head is larger than we accept."""
TIMED_OUT = Transient(model.TIMED_OUT, RETRY_DELAY_S)

_DELIVERED = Delivered()
_SERVER_ERROR = Transient("status_5xx", RETRY_DELAY_S)
_REDIRECT = Rejected("redirect")
_CLIENT_ERROR = Rejected("status_4xx")
_OTHER_STATUS = Rejected("other_status")


def judge_status(status: int) -> Outcome:
    """The outcome of an attempt that was answered; status and head alone decide, no body is read for it.

    A 429 is a client error here like any other: PUSH-065 retries 404 and 410, server errors, and nothing else.
    """
    match status // 100:
        case 2:
            return _DELIVERED
        case 3:
            return _REDIRECT
        case 4:
            return Gone(status) if status in (404, 410) else _CLIENT_ERROR
        case 5:
            return _SERVER_ERROR
    return _OTHER_STATUS  # 101, which nobody asked for, and numbers HTTP does not define
