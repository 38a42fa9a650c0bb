"""Signatures against a fixed vector and an independent library; ids against the promise made to receivers."""

import base64
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pushd.core.payloads import webhook_body
from pushd.core.signing import signature, webhook_id

KEY = b"\x07" * 32


def test_t148_fixed_vector() -> None:
    body = webhook_body(b"\x01\x02\x03", 9_007_199_254_740_993, b"\x01\x01")
    assert signature(KEY, "fixed-id", 1_700_000_000, body) == "v1,IszeBLRjxb7spJ5RLi+KW0w/aK3Buioq9E6jl3MKWZw="


@pytest.mark.parametrize("key_bytes", [16, 32, 64])
def test_public_library_accepts_our_signature_and_no_other(key_bytes: int) -> None:
    key = bytes(range(key_bytes))
    body = webhook_body(b"\x00" * 17, 7, b"\x11" * 32)
    message_id = webhook_id(b"\x11" * 32, b"\x00" * 17, 7)
    timestamp_s = int(datetime.now(UTC).timestamp())
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": signature(key, message_id, timestamp_s, body),
    }
    receiver = Webhook("whsec_" + base64.b64encode(key).decode())
    assert receiver.verify(body, headers)["sequence_id"] == "7"
    with pytest.raises(WebhookVerificationError):
        receiver.verify(body.replace(b'"7"', b'"8"'), headers)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(b"\x08" * key_bytes).decode()).verify(body, headers)


def test_id_is_a_uuid_and_the_same_every_time() -> None:
    # A fixed value: a change here would make receivers see each delivery twice across an upgrade.
    first = webhook_id(b"\x11" * 32, b"\x00" * 17, 7)
    assert first == webhook_id(b"\x11" * 32, b"\x00" * 17, 7) == "7d4dbef7-6445-859f-a097-2820c275a36b"
    assert uuid.UUID(first).version == 8
    assert uuid.UUID(first).variant == uuid.RFC_4122


RECEIVERS = (Path(__file__).parents[2] / "docs" / "receivers.md").read_text()


def test_documented_request_is_one_of_ours() -> None:
    head, _, body = RECEIVERS.split("```\n")[1].partition("\n\n")
    sent = dict(line.split(": ", 1) for line in head.splitlines()[1:])
    topic, sequence_id, recipient_id = b"\x01\x02\x03", 9_007_199_254_740_993, b"\x01\x01"
    assert body.strip().encode() == webhook_body(topic, sequence_id, recipient_id)
    assert sent["webhook-id"] == webhook_id(recipient_id, topic, sequence_id)
    stamp_s = int(sent["webhook-timestamp"])
    assert sent["webhook-signature"] == signature(KEY, sent["webhook-id"], stamp_s, body.strip().encode())


@pytest.mark.parametrize("number", [0, 1])
def test_documented_python_takes_our_requests_and_no_others(number: int) -> None:
    names: dict[str, Any] = {"signing_key": KEY}
    exec(RECEIVERS.split("```python\n")[1 + number].partition("```")[0], names)
    body = webhook_body(b"\x01\x02\x03", 7, b"\x01\x01")
    stamp_s = int(datetime.now(UTC).timestamp())

    def received(stamp_s: int, key: bytes = KEY) -> Any:
        return names["on_post"](
            body,
            {
                "webhook-id": "an-id",
                "webhook-timestamp": str(stamp_s),
                "webhook-signature": signature(key, "an-id", stamp_s, body),
            },
        )

    assert received(stamp_s)["sequence_id"] == "7"
    for stamp, key in ((stamp_s - 400, KEY), (stamp_s + 400, KEY), (stamp_s, b"\x08" * 32)):
        with pytest.raises((ValueError, WebhookVerificationError)):
            received(stamp, key)


@given(
    st.lists(
        st.tuples(st.binary(max_size=4), st.binary(max_size=4), st.integers(0, 2**63 - 1)),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
def test_b079_no_two_deliveries_share_an_id(deliveries: list[tuple[bytes, bytes, int]]) -> None:
    assert len({webhook_id(*delivery) for delivery in deliveries}) == len(deliveries)
