"""Which bytes name a topic, which topics are pushed, and the lock a topic has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.topics import IDENTIFIER_BYTES, PUSH_KINDS, topic_kind, topic_lock_key, topic_of
from pushd.model import TopicKind

LENGTHS = {
    TopicKind.GROUP_MESSAGE: 17,
    TopicKind.WELCOME: 33,
    TopicKind.IDENTITY_UPDATE: 33,
    TopicKind.KEY_PACKAGE: 33,
    TopicKind.COMMIT_LOG: 17,
}


@pytest.mark.parametrize("kind", TopicKind)
def test_a_topic_is_its_kind_and_identifier(kind: TopicKind) -> None:
    identifier = b"\xaa" * (LENGTHS[kind] - 1)
    topic = topic_of(kind, identifier)
    assert topic == bytes((kind,)) + identifier
    assert topic_kind(topic) is kind


@pytest.mark.parametrize("kind", TopicKind)
@pytest.mark.parametrize("off", [-1, 1])
def test_other_lengths_name_no_topic(kind: TopicKind, off: int) -> None:
    identifier = bytes(IDENTIFIER_BYTES[kind] + off)
    assert topic_of(kind, identifier) is None
    assert topic_kind(bytes((kind,)) + identifier) is None


@pytest.mark.parametrize("topic", [b"", b"\x00", b"\x05" + bytes(16), b"\x05" + bytes(32), b"\xff" * 33, bytes(16)])
def test_unknown_kinds_and_stumps_name_no_topic(topic: bytes) -> None:
    assert topic_kind(topic) is None


@pytest.mark.parametrize("kind", TopicKind)
def test_T162_only_groups_and_welcomes_are_pushed(kind: TopicKind) -> None:
    assert (kind in PUSH_KINDS) == (kind in (TopicKind.GROUP_MESSAGE, TopicKind.WELCOME))


def test_the_lock_key_is_the_head_of_the_hash_as_a_signed_number() -> None:
    assert topic_lock_key(b"\x00" + bytes(range(16))) == -9184710226676836658


@given(st.binary(min_size=1, max_size=128))
def test_lock_keys_fit_a_bigint(topic: bytes) -> None:
    assert -(2**63) <= topic_lock_key(topic) < 2**63
