"""T071: expiry at the edges of a 64-bit number of nanoseconds."""

from __future__ import annotations

import pytest

from pushd.core.expiry import ExpiryOutOfRange, expires_at_ns

LONGEST_S = 9_223_372_036


@pytest.mark.parametrize(
    ("renewed_ns", "ttl_s", "expected"),
    [
        (0, 86_400, 86_400_000_000_000),
        (1_700_000_000_123_456_000, 2_592_000, 1_702_592_000_123_456_000),
        (0, LONGEST_S, LONGEST_S * 10**9),
        (854_775_807, LONGEST_S, 2**63 - 1),
    ],
)
def test_expiry_is_renewal_plus_ttl(renewed_ns: int, ttl_s: int, expected: int) -> None:
    assert expires_at_ns(renewed_ns, ttl_s) == expected


@pytest.mark.parametrize(("renewed_ns", "ttl_s"), [(854_775_808, LONGEST_S), (10**9, LONGEST_S), (-1, 86_400)])
def test_unrepresentable_expiry_is_an_error(renewed_ns: int, ttl_s: int) -> None:
    with pytest.raises(ExpiryOutOfRange):
        expires_at_ns(renewed_ns, ttl_s)
