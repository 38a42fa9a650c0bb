"""Bodies of the three channels: exact bytes, no member beyond the allowed ones, text any JSON reader keeps whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.payloads import apns_body, fcm_body, read_push, topic_text, webhook_body

BIG = 9_007_199_254_740_993  # 2**53 + 1: the first number a double cannot hold


def test_t148_webhook_body_is_byte_exact() -> None:
    body = webhook_body(b"\x01\x02\x03", BIG, b"\x01\x01")
    assert body == b'{"topic":"AQID","sequence_id":"9007199254740993","recipient_id":"0101"}'


def test_t123_apns_body_is_byte_exact() -> None:
    body = apns_body(b"\x01" * 33, BIG)
    topic = topic_text(b"\x01" * 33)
    assert len(topic) == 44
    assert body == (
        b'{"aps":{"content-available":1},"topic":"%s","sequence_id":"9007199254740993"}' % topic.encode("ascii")
    )


def test_t137_fcm_body_holds_exactly_the_named_members() -> None:
    assert json.loads(fcm_body("device-token", b"\x01\x02\x03", BIG)) == {
        "message": {
            "token": "device-token",
            "data": {"topic": "AQID", "sequence_id": "9007199254740993"},
            "android": {"priority": "HIGH"},
            "apns": {
                "headers": {"apns-priority": "5", "apns-push-type": "background"},
                "payload": {"aps": {"content-available": 1}},
            },
        }
    }


@given(token=st.text(min_size=1), topic=st.binary(max_size=40), sequence_id=st.integers(0, 2**64 - 1))
def test_any_token_stays_inside_its_json_string(token: str, topic: bytes, sequence_id: int) -> None:
    message = json.loads(fcm_body(token, topic, sequence_id))["message"]
    assert message["token"] == token
    assert set(message) == {"token", "data", "android", "apns"}
    assert read_push(message["data"]) == (topic, sequence_id)


@given(topic=st.binary(max_size=40), sequence_id=st.integers(0, 2**64 - 1), recipient_id=st.binary(max_size=40))
def test_every_body_reads_back_and_holds_nothing_else(topic: bytes, sequence_id: int, recipient_id: bytes) -> None:
    webhook = json.loads(webhook_body(topic, sequence_id, recipient_id))
    apns = json.loads(apns_body(topic, sequence_id))
    assert read_push(webhook) == read_push(apns) == (topic, sequence_id)
    assert set(webhook) == {"topic", "sequence_id", "recipient_id"}
    assert set(apns) == {"aps", "topic", "sequence_id"}
    assert bytes.fromhex(webhook["recipient_id"]) == recipient_id


def test_t160_largest_sequence_id_keeps_every_digit() -> None:
    members = json.loads(webhook_body(b"\x01\x02\x03", 2**64 - 1, b""))
    assert members["sequence_id"] == "18446744073709551615"
    assert read_push(members) == (b"\x01\x02\x03", 2**64 - 1)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"topic": "AQID"},
        {"topic": "AQID", "sequence_id": 7},
        {"topic": "AQID", "sequence_id": ""},
        {"topic": "AQID", "sequence_id": "+7"},
        {"topic": "AQID", "sequence_id": "7_0"},
        {"topic": "AQID", "sequence_id": " 7"},
        {"topic": "AQID", "sequence_id": "\u0667"},
        {"topic": "AQI", "sequence_id": "7"},
        {"topic": "AQ-_", "sequence_id": "7"},
        {"topic": 3, "sequence_id": "7"},
    ],
)
def test_a_push_that_is_not_ours_is_refused(members: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        read_push(members)
