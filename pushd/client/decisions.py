"""What to do next, and what an answer means: the notification rules of spec §4.8 without I/O.

Time comes in as nanoseconds since 1970, the stored record as a `Settings` value; the caller makes the call and writes
the result.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from attrs import field, frozen

from pushd.client.values import NotificationConfig, RecipientState
from pushd.errors import Code

SECOND_NS = 1_000_000_000
BATCH_TOPICS = 1_000  # adds a request, and removes a request (PUSH-082)
REQUEST_S = 30.0  # one request, its wait behind another one included (PUSH-091)
SYNC_PERIOD_NS = 3_600 * SECOND_NS  # a wake lost to a crash costs at most this (PUSH-083)
REPEATED_LOSS_NS = 60 * SECOND_NS


class State(enum.IntEnum):
    """The stored notification state."""

    DISABLED = 0
    ENABLED = 1
    FAILED = 2


class Limit(enum.IntEnum):
    """Which adds are withheld since the backend said that the topic limit is reached (PUSH-089).

    GROWTH withholds new topics only: refreshing the keys of a stored topic takes no room, and letting keys run out
    would wake the user for every message of their own (PUSH-086). ALL is for a backend that refuses that as well.
    """

    NONE = 0
    GROWTH = 1
    ALL = 2


@frozen
class Identity:
    """The recipient's id and secret: made once a file and kept (PUSH-080, PUSH-081)."""

    recipient_id: bytes = field(repr=False)
    recipient_secret: bytes = field(repr=False)


@frozen
class Settings:
    """The notification part of the settings row.

    Attributes:
        generation: counts enables and disables, so that a late answer knows that it is late.
        registration_owed: a Register has to succeed before anything is uploaded.
        renewal_ns: when to register anew, None before the first answer.
        repairing: stale rows are being uploaded again; counts are not compared meanwhile.
        known_excess: how many topics the backend is known to hold beyond ours; None right after a repair pass, when
            the next answer decides.
        withheld, withheld_set: which adds are kept back, and the fingerprint of the wanted topics it is withheld for.
    """

    state: State
    failure: Code | None
    identity: Identity | None
    config: NotificationConfig | None
    generation: int
    registration_owed: bool
    renewal_ns: int | None
    last_state: RecipientState | None
    repairing: bool
    known_excess: int | None
    withheld: Limit
    withheld_set: bytes | None = field(repr=False)


def registration_is_due(settings: Settings, now_ns: int) -> bool:
    """Whether the next request has to be a Register: owed, never answered, or past the renewal deadline (PUSH-087)."""
    return settings.registration_owed or settings.renewal_ns is None or settings.renewal_ns <= now_ns


def renewal_deadline_ns(now_ns: int, expires_at_ns: int) -> int:
    """A quarter of the remaining time from now (PUSH-087).

    Never sooner than one sync period: with a clock far ahead of the backend's the remaining time is negative, and every
    run would register again at once. The shortest legal lifetime is a day, whose quarter is six hours.
    """
    return now_ns + max((expires_at_ns - now_ns) // 4, SYNC_PERIOD_NS)


def next_look_ns(settings: Settings, now_ns: int) -> int:
    """When to run again after a run that found nothing to do."""
    look = now_ns + SYNC_PERIOD_NS
    return look if settings.renewal_ns is None else min(look, settings.renewal_ns)


class Verdict(enum.Enum):
    """What a failed notification call means (PUSH-088, PUSH-089)."""

    STOP = "stop"
    RECREATE = "recreate"
    WITHHOLD = "withhold"
    RETRY = "retry"


_VERDICTS: Mapping[Code, Verdict] = {
    Code.PERMISSION_DENIED: Verdict.STOP,
    Code.INVALID_ARGUMENT: Verdict.STOP,
    Code.OUT_OF_RANGE: Verdict.STOP,
    Code.UNIMPLEMENTED: Verdict.STOP,
    Code.FAILED_PRECONDITION: Verdict.STOP,
}


def judge_register(code: Code) -> Verdict:
    """The meaning of a failed Register.

    A topic limit cannot be its answer, so try again later. Nor can a missing recipient, but any call that says so
    starts the uploaded set over (PUSH-088); the next Register is a retry.
    """
    return Verdict.RECREATE if code is Code.NOT_FOUND else _VERDICTS.get(code, Verdict.RETRY)


def judge_update(code: Code, *, had_adds: bool, since_last_loss_ns: int | None) -> Verdict:
    """The meaning of a failed UpdateSubscriptions.

    Args:
        code: the status; texts are never looked at.
        had_adds: whether the request added topics. Removes alone cannot exceed a limit, so such an answer is trouble
            like any other.
        since_last_loss_ns: time since the last NOT_FOUND. A backend that forgets the recipient within a minute of its
            registration would otherwise be asked in a tight loop.
    """
    if code is Code.NOT_FOUND:
        repeated = since_last_loss_ns is not None and since_last_loss_ns < REPEATED_LOSS_NS
        return Verdict.RETRY if repeated else Verdict.RECREATE
    if code is Code.RESOURCE_EXHAUSTED:
        return Verdict.WITHHOLD if had_adds else Verdict.RETRY
    return _VERDICTS.get(code, Verdict.RETRY)


@frozen
class Agreement:
    """What a comparison of topic counts leads to."""

    start_repair: bool
    warn: bool
    known_excess: int | None


def compare_counts(backend_count: int, uploaded_count: int, known_excess: int | None) -> Agreement:
    """Compare the backend's count with our own record while no repair pass runs (PUSH-088).

    Uploading again cannot make a count smaller. So what is too many right after a completed pass is warned about once
    and accepted (spec §4.8); any other difference is news and starts a pass.
    """
    excess = backend_count - uploaded_count
    if excess == 0:
        return Agreement(start_repair=False, warn=False, known_excess=0)
    if excess > 0 and known_excess is None:
        return Agreement(start_repair=False, warn=True, known_excess=excess)
    if excess == known_excess:
        return Agreement(start_repair=False, warn=False, known_excess=known_excess)
    return Agreement(start_repair=True, warn=True, known_excess=0)
