"""What follows from an attempt, as a table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.retry import Result, Retry, next_step
from pushd.model import Channel, Delivered, Gone, Mismatch, Outcome, Rejected, Terminal, Transient

APNS, FCM, HTTP = Channel


@pytest.mark.parametrize(
    ("outcome", "channel", "attempts", "maximum", "all_gone", "expected"),
    [
        (Delivered(), APNS, 1, 3, True, Result.DELIVERED),
        (Delivered(), HTTP, 3, 3, False, Result.DELIVERED),
        (Rejected("x"), APNS, 1, 3, True, Result.REJECTED),
        (Mismatch("x"), APNS, 1, 3, True, Result.MISMATCH),
        (Terminal("x"), APNS, 1, 3, True, Result.DEAD),
        # T092: delays before jitter
        (Transient("x", 0), APNS, 1, 3, False, Retry(1.0)),
        (Transient("x", 60), APNS, 1, 3, False, Retry(60.0)),
        (Transient("x", 999), APNS, 2, 3, False, Retry(300.0)),
        (Transient("x", float("inf")), APNS, 2, 3, False, Retry(300.0)),
        (Transient("timeout", 0), FCM, 1, 3, False, Retry(10.0)),
        (Transient("quota", 60), FCM, 1, 3, False, Retry(60.0)),
        (Transient("timeout", 0), HTTP, 1, 3, False, Retry(1.0)),
        (Transient("x", 0), APNS, 3, 3, False, Result.FAILED),
        (Transient("x", 0), APNS, 1, 1, True, Result.FAILED),
        # T093, T094: gone on every attempt, or not
        (Gone(404), HTTP, 1, 3, True, Retry(1.0)),
        (Gone(410), HTTP, 2, 3, True, Retry(1.0)),
        (Gone(404), HTTP, 3, 3, True, Result.DEAD),
        (Gone(404), HTTP, 3, 3, False, Result.FAILED),
        (Gone(404), HTTP, 1, 1, True, Result.DEAD),
    ],
)
def test_next_step(
    outcome: Outcome, channel: Channel, attempts: int, maximum: int, all_gone: bool, expected: Retry | Result
) -> None:
    assert next_step(outcome, channel, attempts, maximum, all_gone=all_gone, jitter=0.0) == expected


@given(
    asked=st.floats(0, 10_000),
    channel=st.sampled_from(Channel),
    jitter=st.floats(0, 1, exclude_max=True),
    attempts=st.integers(1, 9),
)
def test_jitter_only_lengthens_by_a_fifth_and_never_beyond_the_cap(
    asked: float, channel: Channel, jitter: float, attempts: int
) -> None:
    def delay(share: float) -> float:
        step = next_step(Transient("x", asked), channel, attempts, 10, all_gone=False, jitter=share)
        assert isinstance(step, Retry)
        return step.delay_s

    assert delay(0.0) <= delay(jitter) <= min(delay(0.0) * 1.2, 300.0)


def test_jitter_spreads_delays() -> None:
    delays = {
        next_step(Transient("x", 10), APNS, 1, 3, all_gone=False, jitter=share) for share in (0.0, 0.25, 0.5, 0.75)
    }
    assert len(delays) == 4
