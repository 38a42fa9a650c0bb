"""What follows from one attempt: another one after a delay, or a final result (PUSH-046, PUSH-065, PUSH-069)."""

from __future__ import annotations

import enum
from typing import assert_never

from attrs import frozen

from pushd.model import (
    RETRY_MAX_S,
    Channel,
    Delivered,
    Gone,
    Mismatch,
    Outcome,
    Rejected,
    Terminal,
    Transient,
)

# FCM asks for 10 s after any failure that is no quota failure; a longer delay comes with the outcome (PUSH-069).
RETRY_MIN_S = {Channel.APNS: 1.0, Channel.FCM: 10.0, Channel.HTTP: 1.0}
JITTER_SHARE = 0.2  # delays are minima, so they are spread upwards only; 256 failures at once must not retry at once


class Result(enum.StrEnum):
    """How a delivery ended: the `outcome` label of `xmtp_push_deliveries_total` (PUSH-095)."""

    DELIVERED = "delivered"
    FAILED = "failed"
    REJECTED = "rejected"
    MISMATCH = "mismatch"
    DEAD = "dead"
    SUPPRESSED = "suppressed"


@frozen
class Retry:
    """Try again no earlier than `delay_s` seconds from now."""

    delay_s: float


def next_step(
    outcome: Outcome, channel: Channel, attempts: int, max_attempts: int, *, all_gone: bool, jitter: float
) -> Retry | Result:
    """Decide after attempt number `attempts` (from 1) came to `outcome`.

    Args:
        outcome: what the attempt came to.
        channel: sets the least delay.
        attempts: attempts made so far, this one included.
        max_attempts: the configured bound.
        all_gone: whether every attempt before this one answered 404 or 410. A single other answer in between shows
            that the receiver is not simply gone, so it is kept.
        jitter: random number in [0, 1).
    """
    match outcome:
        case Delivered():
            return Result.DELIVERED
        case Rejected():
            return Result.REJECTED
        case Mismatch():
            return Result.MISMATCH
        case Terminal():
            return Result.DEAD
        case Gone():
            if attempts < max_attempts:
                return Retry(_delay_s(0.0, channel, jitter))
            return Result.DEAD if all_gone else Result.FAILED
        case Transient(delay_s=asked_s):
            return Retry(_delay_s(asked_s, channel, jitter)) if attempts < max_attempts else Result.FAILED
        case _:
            assert_never(outcome)


def _delay_s(asked_s: float, channel: Channel, jitter: float) -> float:
    least_s = min(max(asked_s, RETRY_MIN_S[channel]), RETRY_MAX_S)
    return min(least_s * (1.0 + JITTER_SHARE * jitter), RETRY_MAX_S)
