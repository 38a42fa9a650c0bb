"""How long the certificate of the gRPC listener is good, and when to speak of it.

Clients refuse a certificate out of its time, and pushd reads its own only at the start: what is found here is the only
notice an operator gets before every client is cut off.
"""

from __future__ import annotations

import enum
from datetime import datetime, timedelta

from attrs import frozen
from cryptography.x509 import load_pem_x509_certificate

NOTICE = timedelta(days=14)
"""An end nearer than this is warned of. The alert in docs/kit/prometheus-rules.yaml says the same."""


class Trouble(enum.StrEnum):
    """What is the matter with a certificate at some moment."""

    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRES_SOON = "expires_soon"


@frozen
class Validity:
    """The first and the last moment of a certificate, in UTC."""

    begins: datetime
    ends: datetime

    def trouble(self, now: datetime) -> Trouble | None:
        """What is the matter at `now`, a time with a zone; None if nothing is."""
        if now > self.ends:
            return Trouble.EXPIRED
        if now < self.begins:
            return Trouble.NOT_YET_VALID
        return Trouble.EXPIRES_SOON if self.ends - now < NOTICE else None


def server_validity(chain: bytes) -> Validity | None:
    """When the first certificate of the PEM text is valid, which is the server's own; None if it cannot be read.

    The others of a chain are left alone: clients find a way around one that has ended, so its date says little.
    """
    try:
        certificate = load_pem_x509_certificate(chain)
        return Validity(certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    except ValueError:
        return None
