"""Reading stored envelopes and comparing tags; every doubt must come out as `send`."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.suppression import key_in_window, message_data, own_keys
from pushd.model import HMAC_EPOCH_NS
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope, GroupMessage, WelcomeMessage

KEYS = tuple(bytes([n]) * 42 for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("server_ns", "base", "keys", "slot"),
    [
        (9 * HMAC_EPOCH_NS, 9, KEYS, 0),
        (10 * HMAC_EPOCH_NS - 1, 9, KEYS, 0),
        (10 * HMAC_EPOCH_NS, 9, KEYS, 1),
        (11 * HMAC_EPOCH_NS, 9, KEYS, 2),
        (12 * HMAC_EPOCH_NS, 9, KEYS, None),
        (8 * HMAC_EPOCH_NS, 9, KEYS, None),
        (9 * HMAC_EPOCH_NS, None, KEYS, None),
        (10 * HMAC_EPOCH_NS, 9, (KEYS[0], None, None), None),
        (0, 0, KEYS, 0),
        (2_591_999 * 10**9, 0, KEYS, 0),  # T161
        (2_592_000 * 10**9, 0, KEYS, 1),
        (5_184_000 * 10**9, 0, KEYS, 2),
    ],
)
def test_key_in_window(server_ns: int, base: int | None, keys: tuple[bytes | None, ...], slot: int | None) -> None:
    assert key_in_window(server_ns, base, keys) == (None if slot is None else KEYS[slot])


def field(number: int, value: bytes) -> bytes:
    length = len(value)
    size = bytearray()
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return bytes([number << 3 | 2]) + bytes(size) + value


DATA = b"mls message"
GROUP = field(1, DATA) + field(2, b"h" * 32) + b"\x18\x01"


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        (field(1, GROUP), DATA),
        (field(1, field(1, b"d" * 70_000)), b"d" * 70_000),
        (field(1, b"\x18\x01" + field(1, DATA)), DATA),
        (field(1, b""), b""),
        (field(1, b"\x18\x01"), b""),
        (b"\x49" + b"8bytesaa" + b"\x4d" + b"4byt" + field(1, GROUP), DATA),  # fields of other types are stepped over
        (field(2, field(1, DATA)), None),  # a welcome
        (b"", None),
        (b"payload", None),
        (field(1, GROUP)[:-1], None),
        (field(1, GROUP) + b"\x0a", None),
        (b"\x08\x01", None),  # field 1 as a number
        (field(1, b"\x08\x01"), None),
        (b"\x0b", None),  # a group, gone from protobuf
        (b"\x0a" + b"\xff" * 11, None),  # a length that does not end
        (b"\x0a\xff\xff\xff\xff\x0f", None),  # a length beyond the end
    ],
)
def test_message_data(payload: bytes, data: bytes | None) -> None:
    assert message_data(payload) == data


@given(st.binary(max_size=64))
def test_message_data_of_any_bytes_never_raises(payload: bytes) -> None:
    message_data(payload)


@given(st.binary(max_size=300), st.binary(max_size=32), st.booleans())
def test_message_data_is_what_the_protobuf_runtime_wrote(data: bytes, tag: bytes, should_push: bool) -> None:
    envelope = ClientEnvelope(group_message=GroupMessage(data=data, sender_hmac=tag, should_push=should_push))
    assert message_data(envelope.SerializeToString()) == data


def test_data_of_other_envelopes_is_not_taken_for_a_message() -> None:
    welcome = ClientEnvelope(welcome_message=WelcomeMessage(v1=WelcomeMessage.V1(data=DATA)))
    assert message_data(welcome.SerializeToString()) is None


def test_own_keys_finds_the_senders_key_only() -> None:
    tag = hmac.new(KEYS[1], DATA, hashlib.sha256).digest()
    assert own_keys(DATA, KEYS, tag) == {KEYS[1]}
    assert own_keys(DATA + b"x", KEYS, tag) == set()
    assert own_keys(DATA, [], tag) == set()
    assert own_keys(DATA, KEYS, tag[:31]) == set()
