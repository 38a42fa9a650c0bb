"""What provider answers mean: the tables, row by row, and what holds for any answer."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.providers import apns, fcm
from pushd.core.providers.answers import SetupWatch, status_label
from pushd.core.providers.document import render
from pushd.core.providers.retry_after import parse_retry_after
from pushd.model import RETRY_MAX_S, Delivered, Mismatch, Outcome, Rejected, Terminal, Transient

FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
QUOTA_FAILURE = "type.googleapis.com/google.rpc.QuotaFailure"


def apns_body(reason: str) -> bytes:
    return json.dumps({"reason": reason}).encode()


APNS_TABLE = [
    (200, None, Delivered()),
    (201, None, Rejected("http_201")),
    (410, "Unregistered", Terminal("Unregistered")),
    (410, "ExpiredToken", Terminal("ExpiredToken")),
    (400, "BadDeviceToken", Mismatch("BadDeviceToken")),
    (400, "DeviceTokenNotForTopic", Mismatch("DeviceTokenNotForTopic")),
    (400, "Unregistered", Rejected("Unregistered")),
    (410, "BadDeviceToken", Rejected("BadDeviceToken")),
    (410, "Unknown", Rejected("http_410")),
    (400, "Unknown", Rejected("http_400")),
    (403, "InvalidProviderToken", Rejected("InvalidProviderToken")),
    (404, "BadPath", Rejected("BadPath")),
    (405, "MethodNotAllowed", Rejected("MethodNotAllowed")),
    (413, "PayloadTooLarge", Rejected("PayloadTooLarge")),
    (502, None, Rejected("http_502")),
    (302, None, Rejected("http_302")),
    (429, "TooManyRequests", Transient("http_429", 1.0)),
    (500, "InternalServerError", Transient("http_500", 1.0)),
    (503, "ServiceUnavailable", Transient("http_503", 1.0)),
    (410, None, Rejected("http_410")),
    (503, "Unregistered", Transient("http_503", 1.0)),
    (200, "Unregistered", Delivered()),
]


@pytest.mark.parametrize(("status", "reason", "outcome"), APNS_TABLE)
def test_apns_status_and_reason_decide_together_T125(status: int, reason: str | None, outcome: Outcome) -> None:
    assert apns.judge(status, apns_body(reason) if reason else b"") == outcome


@pytest.mark.parametrize("status", [400, 401, 403])
def test_only_a_403_counts_as_an_expired_provider_token(status: int) -> None:
    assert (apns.judge(status, apns_body("ExpiredProviderToken")) is apns.EXPIRED) == (status == 403)


@pytest.mark.parametrize("body", [b"", None, b"[]", b"null", b"{}", b'{"reason":7}', b"\xff", b"[" * 100_000])
def test_an_apns_body_without_a_reason_is_no_error_B033(body: bytes | None) -> None:
    assert apns.judge(410, body) == Rejected("http_410")


@pytest.mark.parametrize(
    ("token", "usable"),
    [
        ("ab" * 32, True),
        ("AB" * 54, True),
        ("ab" * 1_024, True),
        ("", False),
        ("abc", False),
        ("ab cd ", False),
        ("zz", False),
        ("../x", False),
        ("ab\n", False),
        ("\u0661\u0662", False),
    ],
)
def test_only_hex_of_whole_bytes_is_a_device_token_T135_B017_B019(token: str, usable: bool) -> None:
    assert apns.is_device_token(token) == usable


def fcm_body(*codes: str, kind: str = FCM_ERROR, status: str = "SCRIPTED", quota: bool = False) -> bytes:
    details: list[dict[str, object]] = [{"@type": kind, "errorCode": code} for code in codes]
    if quota:
        details.append({"@type": QUOTA_FAILURE, "violations": []})
    return json.dumps({"error": {"status": status, "details": details}}).encode()


FCM_TABLE = [
    (404, fcm_body("UNREGISTERED"), Terminal("UNREGISTERED")),
    (403, fcm_body("SENDER_ID_MISMATCH"), Mismatch("SENDER_ID_MISMATCH")),
    (400, fcm_body("INVALID_ARGUMENT"), Rejected("INVALID_ARGUMENT")),
    (401, fcm_body("THIRD_PARTY_AUTH_ERROR"), Rejected("THIRD_PARTY_AUTH_ERROR")),
    (404, fcm_body(status="UNREGISTERED"), Rejected("http_404")),
    (403, fcm_body(status="SENDER_ID_MISMATCH"), Rejected("http_403")),
    (404, fcm_body("UNREGISTERED", kind="type.googleapis.com/google.rpc.BadRequest"), Rejected("http_404")),
    (404, fcm_body("NEW_CODE"), Rejected("http_404")),
    (404, b'{"error":{"message":"Requested entity was not found."}}', Rejected("http_404")),
    (404, b"", Rejected("http_404")),
    (503, fcm_body(status="UNAVAILABLE"), Transient("http_503", 10.0)),
    (500, fcm_body("INTERNAL"), Transient("http_500", 10.0)),
    (503, fcm_body("UNAVAILABLE"), Transient("http_503", 10.0)),
    (302, b"", Rejected("http_302")),
    (200, b"", Delivered()),
    (500, None, Transient("http_500", 10.0)),
    (500, b"", Transient("http_500", 10.0)),
    (502, b"", Rejected("http_502")),
    (400, fcm_body("UNAVAILABLE"), Transient("http_400", 10.0)),
]


@pytest.mark.parametrize(("status", "body", "outcome"), FCM_TABLE)
def test_fcm_deletes_and_mismatches_only_on_typed_details_T138_B055_B081(
    status: int, body: bytes | None, outcome: Outcome
) -> None:
    assert fcm.judge(status, body, None) == outcome


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (429, fcm_body("UNREGISTERED"), Transient("quota", 60.0)),
        (404, fcm_body("UNREGISTERED", quota=True), Transient("quota", 60.0)),
        (503, fcm_body("UNREGISTERED"), Transient("http_503", 10.0)),
        (500, fcm_body("SENDER_ID_MISMATCH"), Transient("http_500", 10.0)),
        (503, fcm_body(quota=True), Transient("quota", 60.0)),
        (503, fcm_body("QUOTA_EXCEEDED"), Transient("quota", 60.0)),
        (403, fcm_body("SENDER_ID_MISMATCH", "UNREGISTERED"), Terminal("UNREGISTERED")),
    ],
)
def test_fcm_rules_apply_in_the_order_of_the_table(status: int, body: bytes, outcome: Outcome) -> None:
    assert fcm.judge(status, body, None) == outcome


@pytest.mark.parametrize(
    ("status", "body", "header", "delay_s"),
    [
        (429, fcm_body("QUOTA_EXCEEDED"), None, 60),
        (429, fcm_body("QUOTA_EXCEEDED"), "1", 60),
        (429, fcm_body("QUOTA_EXCEEDED"), "120", 120),
        (429, fcm_body("QUOTA_EXCEEDED"), "999", 300),
        (503, fcm_body("UNAVAILABLE"), "42", 42),
        (503, fcm_body("UNAVAILABLE"), "999", 300),
        (500, fcm_body("INTERNAL"), "80", 80),
        (429, fcm_body(status="RESOURCE_EXHAUSTED"), None, 60),
        (429, b"", "120", 120),
        (400, fcm_body(quota=True), "1", 60),
        (500, b"", None, 10),
        (503, b"<html>", "1", 10),
        (503, b"<html>", "120", 120),
        (503, b"<html>", "999", 300),
        (503, b"<html>", "invalid", 10),
        (503, b"", "9999999999", 300),
        (503, b"", "9" * 5_000, 300),
    ],
)
def test_fcm_delays_are_minima_lengthened_by_retry_after_T139_T141_B063(
    status: int, body: bytes, header: str | None, delay_s: float
) -> None:
    outcome = fcm.judge(status, body, parse_retry_after(header, datetime(2026, 1, 1, tzinfo=UTC)))
    assert isinstance(outcome, Transient)
    assert outcome.delay_s == delay_s


def test_only_an_untyped_401_speaks_of_the_oauth_token() -> None:
    assert fcm.drops_credentials(401, b"")
    assert fcm.drops_credentials(401, None)
    assert fcm.drops_credentials(401, fcm_body(status="UNAUTHENTICATED"))
    assert not fcm.drops_credentials(401, fcm_body("THIRD_PARTY_AUTH_ERROR"))
    assert not fcm.drops_credentials(403, b"")


NOW = datetime(2026, 11, 6, 8, 49, 37, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("Fri, 06 Nov 2026 08:51:37 GMT", 120.0),
        ("Friday, 06-Nov-26 08:51:37 GMT", 120.0),
        ("Fri Nov  6 08:51:37 2026", 120.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("Sun Nov  6 08:49:37 1994", 0.0),
        ("120", 120.0),
        (" 120\t", 120.0),
        ("0", 0.0),
        ("000000000000000120", 120.0),
        ("-1", None),
        ("+1", None),
        ("1.5", None),
        ("120.1", None),
        ("120.6", None),
        ("1_000", None),
        ("\u0661\u0662", None),
        ("\u00b2", None),
        ("not a delay", None),
        ("invalid", None),
        ("", None),
        (None, None),
        ("Fri, 06 Nov 2026 08:51:37 +0000", None),
        ("Fri, 06 Nov 2026 08:51:37 UTC", None),
        ("Fri, 31 Feb 2026 08:51:37 GMT", None),
        ("Fri, 06 nov 2026 08:51:37 GMT", None),
        ("2026-11-06T08:51:37Z", None),
        ("120\n", None),
    ],
)
def test_retry_after_takes_digits_and_the_three_http_dates_T140_T196_B061_B065(
    header: str | None, seconds: float | None
) -> None:
    assert parse_retry_after(header, NOW) == seconds


@given(st.text(max_size=60) | st.from_regex(r"[0-9]{1,6000}", fullmatch=True))
def test_no_retry_after_is_an_error_or_a_negative_delay(header: str) -> None:
    seconds = parse_retry_after(header, NOW)
    assert seconds is None or seconds >= 0


@given(st.datetimes(datetime(1980, 1, 1), datetime(2070, 1, 1)))
def test_a_date_is_read_as_the_moment_it_names(moment: datetime) -> None:
    moment = moment.replace(microsecond=0, tzinfo=UTC)
    expected = max(timedelta(0), moment - NOW).total_seconds()
    assert parse_retry_after(moment.strftime("%a, %d %b %Y %H:%M:%S GMT"), NOW) == expected
    assert parse_retry_after(moment.strftime("%A, %d-%b-%y %H:%M:%S GMT"), NOW) == expected
    assert parse_retry_after(moment.strftime(f"%a %b {moment.day:2d} %H:%M:%S %Y"), NOW) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([FCM_ERROR, *fcm.CODES]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "details", "@type", "errorCode", "reason", "status"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
bodies = st.none() | st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode())


def labels(outcome: Outcome) -> set[str]:
    return set() if isinstance(outcome, Delivered) else {str(getattr(outcome, "reason"))}  # noqa: B009


@given(st.integers(100, 999), bodies)
def test_any_apns_answer_has_an_outcome_with_a_label_of_a_closed_list_T133(status: int, body: bytes | None) -> None:
    outcome = apns.judge(status, body)
    assert isinstance(outcome, Delivered) == (status == 200)
    assert isinstance(outcome, Transient) == (status in (429, 500, 503))
    assert labels(outcome) <= apns.REASONS | {status_label(status)}


@given(st.integers(100, 999), bodies, st.none() | st.floats(0, 1e10))
def test_any_fcm_answer_has_an_outcome_with_a_label_and_a_bounded_delay_T146(
    status: int, body: bytes | None, retry_after_s: float | None
) -> None:
    outcome = fcm.judge(status, body, retry_after_s)
    assert labels(outcome) <= fcm.CODES | {status_label(status), "quota"}
    if isinstance(outcome, Transient):
        assert 10.0 <= outcome.delay_s <= RETRY_MAX_S


def test_every_status_above_the_named_ones_shares_one_label() -> None:
    assert status_label(599) == status_label(218) == "http_other"


def test_a_wrong_environment_is_reported_once_at_its_first_answer() -> None:
    watch = SetupWatch(apns.LOOK_AT)
    reports = [watch.notice(Mismatch("BadDeviceToken")) for _ in range(10_000)]
    assert reports[0] == ("BadDeviceToken", "push.apns.environment")
    assert not any(reports[1:])


def test_one_stale_token_among_good_ones_is_not_reported() -> None:
    watch = SetupWatch(apns.LOOK_AT)
    for _ in range(1_000):
        assert watch.notice(Delivered()) is None
        assert watch.notice(Mismatch("BadDeviceToken")) is None


def test_refusals_in_a_row_are_reported_even_after_deliveries() -> None:
    watch = SetupWatch(fcm.LOOK_AT)
    watch.notice(Delivered())
    reports = [watch.notice(Mismatch("SENDER_ID_MISMATCH")) for _ in range(SetupWatch.STREAK)]
    assert not any(reports[:-1])
    assert reports[-1] is not None


def test_the_printed_tables_are_the_tables_in_use() -> None:
    page = Path(__file__).parents[2] / "docs" / "providers.md"
    assert page.read_text() == render(), "print it anew: python -m pushd.core.providers.document > docs/providers.md"
