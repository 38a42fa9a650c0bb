"""The rules as tables (PUSH-082 to PUSH-092)."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pushd.client.decisions import (
    REPEATED_LOSS_NS,
    SYNC_PERIOD_NS,
    Agreement,
    Limit,
    Settings,
    State,
    Verdict,
    compare_counts,
    judge_register,
    judge_update,
    next_look_ns,
    registration_is_due,
    renewal_deadline_ns,
)
from pushd.errors import Code
from tests.client.rig import HOUR_NS

NOW = 1_700_000_000 * 10**9
DAY_NS = 24 * HOUR_NS

STOPS = {
    Code.PERMISSION_DENIED,
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.UNIMPLEMENTED,
    Code.FAILED_PRECONDITION,
}


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_every_status_has_one_meaning(code: Code) -> None:
    expected = Verdict.STOP if code in STOPS else Verdict.RETRY
    assert judge_register(code) is (Verdict.RECREATE if code is Code.NOT_FOUND else expected)
    for had_adds in (True, False):
        verdict = judge_update(code, had_adds=had_adds, since_last_loss_ns=None)
        if code is Code.NOT_FOUND:
            assert verdict is Verdict.RECREATE
        elif code is Code.RESOURCE_EXHAUSTED and had_adds:
            assert verdict is Verdict.WITHHOLD
        else:
            assert verdict is expected


@pytest.mark.parametrize(
    ("since_ns", "verdict"),
    [
        (None, Verdict.RECREATE),
        (0, Verdict.RETRY),
        (REPEATED_LOSS_NS - 1, Verdict.RETRY),
        (REPEATED_LOSS_NS, Verdict.RECREATE),
    ],
)
def test_recipient_that_is_lost_again_within_a_minute_is_waited_for(since_ns: int | None, verdict: Verdict) -> None:
    assert judge_update(Code.NOT_FOUND, had_adds=True, since_last_loss_ns=since_ns) is verdict


@pytest.mark.parametrize(
    ("expires_in_ns", "renewal_in_ns"),
    [
        (30 * DAY_NS, 30 * DAY_NS // 4),
        (DAY_NS, 6 * HOUR_NS),
        (4 * HOUR_NS, HOUR_NS),
        (HOUR_NS, HOUR_NS),
        (0, HOUR_NS),
        (-10 * 365 * DAY_NS, HOUR_NS),
        (-(2**63) - NOW, HOUR_NS),
    ],
)
def test_renewal_is_a_quarter_away_and_never_at_once(expires_in_ns: int, renewal_in_ns: int) -> None:
    assert renewal_deadline_ns(NOW, NOW + expires_in_ns) == NOW + renewal_in_ns


SETTINGS = Settings(
    state=State.ENABLED,
    failure=None,
    identity=None,
    config=None,
    generation=1,
    registration_owed=False,
    renewal_ns=NOW + DAY_NS,
    last_state=None,
    repairing=False,
    known_excess=0,
    withheld=Limit.NONE,
    withheld_set=None,
)


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, False),
        ({"registration_owed": True}, True),
        ({"renewal_ns": None}, True),
        ({"renewal_ns": NOW}, True),
        ({"renewal_ns": NOW + 1}, False),
    ],
)
def test_registration_comes_first_when_it_is_due(changes: dict, due: bool) -> None:
    assert registration_is_due(evolve(SETTINGS, **changes), NOW) == due


@pytest.mark.parametrize(
    ("renewal_in_ns", "look_in_ns"), [(None, HOUR_NS), (DAY_NS, HOUR_NS), (HOUR_NS - 1, HOUR_NS - 1)]
)
def test_idle_run_looks_again_within_the_hour(renewal_in_ns: int | None, look_in_ns: int) -> None:
    renewal_ns = None if renewal_in_ns is None else NOW + renewal_in_ns
    assert next_look_ns(evolve(SETTINGS, renewal_ns=renewal_ns), NOW) == NOW + look_in_ns
    assert look_in_ns <= SYNC_PERIOD_NS


@pytest.mark.parametrize(
    ("backend", "uploaded", "known_excess", "agreement"),
    [
        pytest.param(5, 5, 0, Agreement(False, False, 0), id="agree"),
        pytest.param(5, 5, None, Agreement(False, False, 0), id="agree-after-a-pass"),
        pytest.param(5, 5, 3, Agreement(False, False, 0), id="excess-is-gone"),
        pytest.param(6, 5, 0, Agreement(True, True, 0), id="too-many"),
        pytest.param(4, 5, 0, Agreement(True, True, 0), id="too-few"),
        pytest.param(6, 5, None, Agreement(False, True, 1), id="too-many-after-a-pass"),
        pytest.param(4, 5, None, Agreement(True, True, 0), id="too-few-after-a-pass"),
        pytest.param(8, 7, 1, Agreement(False, False, 1), id="known-excess"),
        pytest.param(9, 7, 1, Agreement(True, True, 0), id="more-than-the-known-excess"),
    ],
)
def test_counts(backend: int, uploaded: int, known_excess: int | None, agreement: Agreement) -> None:
    assert compare_counts(backend, uploaded, known_excess) == agreement


@given(st.integers(0, 10), st.integers(0, 10), st.none() | st.integers(0, 10))
def test_any_count_is_settled_by_one_pass_and_one_comparison(backend: int, uploaded: int, known: int | None) -> None:
    agreement = compare_counts(backend, uploaded, known)
    if agreement.start_repair and backend >= uploaded:
        agreement = compare_counts(backend, uploaded, None)  # the answer after the pass
    if backend >= uploaded:
        assert compare_counts(backend, uploaded, agreement.known_excess) == Agreement(False, False, backend - uploaded)
