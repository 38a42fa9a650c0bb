"""When a recipient that is not renewed expires (PUSH-023, PUSH-024)."""

from __future__ import annotations

from pushd.errors import PushdError

NS_PER_S = 1_000_000_000
MAX_NS = 2**63 - 1  # bigint of the database, int64 of the wire


class ExpiryOutOfRange(PushdError):
    """The clock and `push.recipient_ttl_seconds` together leave the range of a 64-bit number of nanoseconds."""


def expires_at_ns(renewed_ns: int, recipient_ttl_seconds: int) -> int:
    """Nanoseconds since 1970 at which a recipient renewed at `renewed_ns` is due for deletion.

    Checked once at the start with the database's clock, so that no call meets the exception in practice.

    Raises:
        ExpiryOutOfRange: the sum does not fit, or the clock is before 1970.
    """
    expires = renewed_ns + recipient_ttl_seconds * NS_PER_S
    if renewed_ns < 0 or expires > MAX_NS:
        raise ExpiryOutOfRange("the clock plus push.recipient_ttl_seconds is no 64-bit number of nanoseconds")
    return expires
