"""The one encoding of an envelope that is stored and hashed, whatever bytes it came in."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.canonical import canonical_bytes, element_bytes, message_hash
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishRequest
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope
from tests.support.envelopes import (
    commit_log_envelope,
    group_envelope,
    key_package,
    welcome_envelope,
    welcome_pointer_envelope,
)


def canonical(encoded: str) -> str:
    return canonical_bytes(ClientEnvelope.FromString(bytes.fromhex(encoded))).hex()


# ClientEnvelope{group_message{data "ab", sender_hmac "c", should_push true}}
GROUP = "0a09" + "0a026162" + "120163" + "1801"
SPELLINGS = {
    "as it is": GROUP,
    "fields out of order": "0a09" + "1801" + "120163" + "0a026162",
    "padded numbers": "8a00" + "8b00" + "0a820061" + "62" + "120163" + "188100",
    "a number above one for true": "0a0a" + "0a026162" + "120163" + "18b902",
    "a field given twice": "0a0c" + "0a0178" + "0a026162" + "120163" + "1801",
    "a message given in two parts": "0a04" + "0a026162" + "0a05" + "120163" + "1801",
    "an unknown field inside": "0a0b" + "0a026162" + "120163" + "1801" + "2001",
    "an unknown field outside": GROUP + "9a0603616263",
    "an unknown group": GROUP + "3b" + "0801" + "3c",
    "another member of the oneof first": "1a050a03616263" + GROUP,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_equal_envelopes_have_equal_bytes(name: str) -> None:
    assert canonical(SPELLINGS[name]) == GROUP


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),  # nothing
        ("0a00", "0a00"),  # an empty member of the oneof is still that member
        ("0a06" + "0a00" + "1200" + "1800", "0a00"),  # defaults spelled out
        ("1202" + "0a00", "12020a00"),  # an empty V1 inside a welcome
        ("1204" + "0a02" + "2007", "1204" + "0a02" + "2007"),  # an enum value nobody has named yet
        ("2a04" + "0a00" + "1200", "2a02" + "1200"),  # a message field keeps its presence, empty or not
        ("22020a00", "22020a00"),
        ("2204" + "0a02" + "0a00", "22040a020a00"),
        ("2206" + "0a04" + "0a02" + "2a00", "22060a040a022a00"),  # an optional text that is present and empty
    ],
)
def test_defaults_are_left_out_and_presence_is_kept(given: str, expected: str) -> None:
    assert canonical(given) == expected


ENVELOPES = st.builds(
    lambda kind, body: {
        "group": group_envelope(body=body, sender_hmac=body[:32]),
        "welcome": welcome_envelope(data=body),
        "pointer": welcome_pointer_envelope(),
        "log": commit_log_envelope(number=len(body)),
        "package": key_package().envelope(),
    }[kind],
    st.sampled_from(["group", "welcome", "pointer", "log", "package"]),
    st.binary(max_size=300),
)


@given(ENVELOPES, st.binary(max_size=20))
def test_canonical_bytes_are_a_fixed_point_that_unknown_fields_do_not_move(
    envelope: ClientEnvelope, extra: bytes
) -> None:
    once = canonical_bytes(envelope)
    again = ClientEnvelope.FromString(once)
    assert again == envelope
    assert canonical_bytes(again) == once
    unknown = b"\xa2\x06" + bytes((len(extra),)) + extra  # field 100
    assert canonical_bytes(ClientEnvelope.FromString(once + unknown)) == once


@given(st.lists(ENVELOPES, max_size=5))
def test_the_size_of_a_request_is_that_of_its_encoding(envelopes: list[ClientEnvelope]) -> None:
    sizes = [len(canonical_bytes(envelope)) for envelope in envelopes]
    assert sum(map(element_bytes, sizes)) == PublishRequest(envelopes=envelopes).ByteSize()


def test_empty_envelopes_count_too() -> None:
    assert [element_bytes(size) for size in (0, 127, 128)] == [2, 129, 131]


def test_the_hash_is_over_the_stored_bytes() -> None:
    assert message_hash(bytes.fromhex(GROUP)) == hashlib.sha256(bytes.fromhex(GROUP)).digest()
