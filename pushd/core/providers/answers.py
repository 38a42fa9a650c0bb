"""The shape both answer tables share, and the watch that notices when a whole channel is set up wrongly."""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping

from attrs import frozen

from pushd.model import Delivered, Mismatch, Outcome, Rejected


class Becomes(enum.Enum):
    """What an answer comes to; the value is the word the documentation uses."""

    DELIVERED = "delivered"
    TERMINAL = "terminal: the recipient is deleted"
    MISMATCH = "mismatch: one attempt, the recipient stays"
    REJECTED = "rejected: one attempt, the recipient stays"
    TRANSIENT = "transient: retried"


@frozen
class Row:
    """One row of an answer table.

    Args:
        statuses: HTTP statuses it applies to; empty for any.
        codes: provider reasons or typed codes it applies to; empty for any, an absent one included.
        becomes: the outcome.
        why: one sentence for the reader of `docs/providers.md`.
        delay_s: least seconds before a retry, for transient rows.
    """

    statuses: tuple[int, ...]
    codes: tuple[str, ...]
    becomes: Becomes
    why: str
    delay_s: float = 0.0

    def matches(self, status: int, codes: Container[str]) -> bool:
        """Whether an answer with this status and these codes falls under the row."""
        return (not self.statuses or status in self.statuses) and (
            not self.codes or any(code in codes for code in self.codes)
        )


# Attempts that brought no answer: the reasons of their transient outcomes.
FAILURES = {
    "timeout": "no answer within the attempt",
    "credentials": "no provider token or OAuth token to send with",
    "connect": "nobody answers at the address, or its name does not resolve",
    "tls": "the certificate is not the provider's, or the peer does not speak HTTP/2",
    "closed": "the connection ended before the answer",
    "reset": "the provider reset the stream",
    "refused": "the provider refused the stream twice",
    "goaway": "the provider asked twice to use another connection",
    "protocol": "the provider broke the rules of HTTP/2",
}

_NAMED_STATUSES = frozenset({201, 204, 301, 302, 307, 308, 400, 401, 403, 404, 405, 408, 410, 413, 429, 500, 502, 503})


def status_label(status: int) -> str:
    """A reason for an answer that brought none: from a closed list, whatever number a peer invents."""
    return f"http_{status}" if status in _NAMED_STATUSES else "http_other"


class SetupWatch:
    """Notices answers that speak of this server's set-up rather than of one recipient.

    A single stale token earns the same answer as a wrong `environment`. So a reason is reported when it comes before
    anything was ever delivered, or many times in a row; and only once, because 10,000 recipients would repeat it.
    """

    STREAK = 20

    def __init__(self, look_at: Mapping[str, str]) -> None:
        self._look_at = look_at
        self._delivered = False
        self._streak = 0
        self._reported: set[str] = set()

    def notice(self, outcome: Outcome) -> tuple[str, str] | None:
        """The reason and what to look at, when `outcome` is worth a warning; else None."""
        match outcome:
            case Delivered():
                self._delivered = True
                self._streak = 0
            case Mismatch(reason) | Rejected(reason) if reason in self._look_at:
                self._streak += 1
                if reason not in self._reported and (not self._delivered or self._streak >= self.STREAK):
                    self._reported.add(reason)
                    return reason, self._look_at[reason]
            case _:
                pass
        return None
