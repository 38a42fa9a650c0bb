"""When the listener's certificate is valid, and what is said about it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trustme

from pushd.core.certificate import NOTICE, Trouble, Validity, server_validity

BEGINS = datetime(2026, 1, 1, tzinfo=UTC)
ENDS = datetime(2026, 4, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (BEGINS - SECOND, Trouble.NOT_YET_VALID),
        (BEGINS, None),
        (ENDS - NOTICE, None),
        (ENDS - NOTICE + SECOND, Trouble.EXPIRES_SOON),
        (ENDS, Trouble.EXPIRES_SOON),
        (ENDS + SECOND, Trouble.EXPIRED),
    ],
)
def test_certificate_is_spoken_of_out_of_its_time_and_shortly_before_its_end(
    now: datetime, expected: Trouble | None
) -> None:
    assert Validity(BEGINS, ENDS).trouble(now) is expected


def test_validity_is_that_of_the_first_certificate() -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", not_before=BEGINS, not_after=ENDS)
    own = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    for chain in (own, own + authority.cert_pem.bytes(), issued.private_key_pem.bytes() + own):
        assert server_validity(chain) == Validity(BEGINS, ENDS)


@pytest.mark.parametrize(
    "chain", [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_validity_of_what_cannot_be_read_is_not_known(chain: bytes) -> None:
    assert server_validity(chain) is None
