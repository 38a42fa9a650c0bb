"""Prints the answer tables as `docs/providers.md`: `python -m pushd.core.providers.document > docs/providers.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pushd.core.providers import apns, fcm
from pushd.core.providers.answers import FAILURES, Becomes, Row
from pushd.model import ATTEMPT_S, RETRY_MAX_S

_INTRODUCTION = f"""\
# Answers of the providers

This page is printed from the tables the senders use. Rows are tried from top to bottom; the first that matches decides.

An attempt lasts at most {ATTEMPT_S:g} s in all. No answer within it, no connection, or no credentials is transient like
a row that says so. A retry waits at least the delay of its row and never more than {RETRY_MAX_S:g} s, except that up to
a fifth is added at random so that failures do not come back together.

A rejected or mismatched delivery has one attempt and keeps its recipient. Only a terminal answer deletes one, and only
while the stored configuration is still the one the attempt used.
"""

_FAILURES = """\
Reasons of an attempt without an answer, on both channels:
"""

_APNS = f"""\
## APNs

Status and reason must both match. A reason outside Apple's published list is treated as no reason.

For {{early}} the status decides and the rest of the answer is not waited for. Any other answer is
read up to 16 KiB, and one that is longer counts as having no reason. A token that is not hex of whole bytes is rejected
without a request.

The first `403 {apns.EXPIRED_JWT}` of an attempt drops the provider token it was sent with, and the push is sent once
more at once, with a new token and within the same {ATTEMPT_S:g} s.
"""

_FCM = """\
## FCM

A code counts only inside a detail of type `google.firebase.fcm.v1.FcmError`; `QuotaFailure` is a detail of type
`google.rpc.QuotaFailure`. A longer Retry-After (seconds or an HTTP date) is honoured.

For {early} the status settles the outcome; of a 500 or 503 the body is awaited for a second, because a
quota detail in it lengthens the delay. A 401 without a typed detail drops the OAuth token it was sent with, and is
still rejected.
"""

_LOOK = """\
Answers that usually mean a mistake in the configuration are logged once per process as `provider_refuses`, when nothing
was delivered yet or many come in a row:
"""


def render() -> str:
    """The whole page."""
    return "\n".join(
        (
            _INTRODUCTION,
            _FAILURES,
            _pairs("Reason", "Meaning", FAILURES),
            _APNS.format(early=_statuses(apns.BODY_WAIT_S)),
            _table("Reason", apns.ROWS),
            _LOOK,
            _pairs("Reason", "Look at", apns.LOOK_AT),
            _FCM.format(early=_statuses(fcm.BODY_WAIT_S)),
            _table("Typed code", fcm.ROWS),
            _LOOK,
            _pairs("Reason", "Look at", fcm.LOOK_AT),
        )
    )


def _table(code_title: str, rows: Iterable[Row]) -> str:
    lines = [f"| Status | {code_title} | Outcome | Retry after | Why |", "|---|---|---|---|---|"]
    lines.extend(
        f"| {_statuses(row.statuses) or 'any'} | {', '.join(f'`{code}`' for code in row.codes) or 'any'} "
        f"| {row.becomes.value} | {f'{row.delay_s:g} s' if row.becomes is Becomes.TRANSIENT else ''} | {row.why} |"
        for row in rows
    )
    return "\n".join(lines) + "\n"


def _pairs(left: str, right: str, pairs: Mapping[str, str]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in pairs.items())]
    return "\n".join(lines) + "\n"


def _statuses(statuses: Iterable[int]) -> str:
    return ", ".join(map(str, statuses))


if __name__ == "__main__":
    print(render(), end="")  # noqa: T201
