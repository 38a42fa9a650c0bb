"""What a publish makes of each envelope before the database is asked: its topic, its push fields, or a refusal."""

import itertools
from collections.abc import Iterable

import pytest
from attrs import evolve

from pushd.core import admission
from pushd.core.admission import (
    Batch,
    Folding,
    Identity,
    Intake,
    PublishLimits,
    PublishRefusal,
    Reason,
    Retention,
    Unroutable,
    offer_commit_log_entry,
    offer_group_message,
    offer_key_package,
    offer_welcome,
)
from pushd.errors import Code
from pushd.model import NewEnvelope, TopicKind
from tests.support.envelopes import (
    APPLICATION,
    COMMIT,
    GROUP,
    INSTALLATION,
    PROPOSAL,
    key_package,
    private_message,
    public_message,
)

FRAMINGS = {"private": private_message, "public": public_message}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("hmac_bytes", [0, 31, 32, 33])
@pytest.mark.parametrize(
    ("content_type", "should_push", "eligible"),
    [
        (APPLICATION, True, True),
        (APPLICATION, False, False),
        (PROPOSAL, True, True),
        (PROPOSAL, False, True),
        (COMMIT, True, True),
        (COMMIT, False, True),
    ],
)
def test_push_fields_of_a_group_message(
    framing: str, hmac_bytes: int, content_type: int, should_push: bool, eligible: bool
) -> None:
    hmac = b"h" * hmac_bytes
    offer = offer_group_message(FRAMINGS[framing](GROUP, content_type), hmac, should_push, b"payload")
    assert isinstance(offer, NewEnvelope)
    assert offer.topic == b"\x00" + GROUP
    assert offer.push_eligible == eligible
    assert offer.is_commit_or_proposal == (content_type != APPLICATION)
    assert offer.sender_hmac == (hmac if hmac_bytes == 32 else None)
    assert offer.payload == b"payload"
    plain = offer_group_message(FRAMINGS[framing](GROUP, content_type), b"", False, b"payload")
    assert isinstance(plain, NewEnvelope)
    assert (offer.topic, offer.message_hash) == (plain.topic, plain.message_hash)


def test_a_welcome_is_eligible_and_has_no_hmac() -> None:
    offer = offer_welcome(INSTALLATION, b"payload")
    assert isinstance(offer, NewEnvelope)
    assert (offer.kind, offer.topic) == (TopicKind.WELCOME, b"\x01" + INSTALLATION)
    assert (offer.push_eligible, offer.sender_hmac, offer.is_commit_or_proposal) == (True, None, False)


@pytest.mark.parametrize(
    ("offer", "topic"),
    [
        (offer_key_package(key_package().serialized(), b"payload", 2_000), b"\x03" + key_package().public_key),
        (offer_commit_log_entry(GROUP, b"payload"), b"\x04" + GROUP),
    ],
)
def test_other_kinds_are_never_pushed(offer: admission.Offer, topic: bytes) -> None:
    assert isinstance(offer, NewEnvelope)
    assert offer.topic == topic
    assert (offer.push_eligible, offer.sender_hmac, offer.is_commit_or_proposal) == (False, None, False)


@pytest.mark.parametrize(
    "offer",
    [
        offer_group_message(b"", b"", True, b"payload"),
        offer_group_message(private_message(GROUP + b"\x00"), b"", True, b"payload"),
        offer_group_message(private_message(GROUP[:-1]), b"", True, b"payload"),
        offer_group_message(private_message(b""), b"", True, b"payload"),
        offer_welcome(INSTALLATION[:-1], b"payload"),
        offer_welcome(INSTALLATION + b"\x00", b"payload"),
        offer_welcome(b"", b"payload"),
        offer_commit_log_entry(GROUP[:-1], b"payload"),
        offer_commit_log_entry(b"", b"payload"),
        offer_key_package(b"", b"payload", 2_000),
        offer_key_package(key_package().serialized() + b"\x00", b"payload", 2_000),
    ],
)
def test_what_names_no_topic_is_unroutable(offer: admission.Offer) -> None:
    assert offer == Unroutable(len(b"payload"))


@pytest.mark.parametrize(("now_s", "admissible"), [(999, False), (1_000, True)])
def test_a_key_package_outside_its_lifetime_may_only_be_a_duplicate(now_s: int, admissible: bool) -> None:
    offer = offer_key_package(key_package(not_before_s=1_000).serialized(), b"payload", now_s)
    assert isinstance(offer, NewEnvelope)
    assert offer.is_admissible == admissible


def message(number: int = 0, *, topic: bytes = b"\x00" + GROUP, size: int = 10) -> NewEnvelope:
    return NewEnvelope(TopicKind.GROUP_MESSAGE, topic, b"p" * size, number.to_bytes(32, "big"))


LIMITS = PublishLimits(max_request_bytes=100, max_envelope_bytes=60, max_publish_topics=2)
TOPICS = [bytes(17), b"\x00" * 16 + b"\x01", b"\x00" * 16 + b"\x02"]
TOO_LARGE_REQUEST = PublishRefusal(Code.INVALID_ARGUMENT, "publish request exceeds byte limit", Reason.TOO_LARGE)


@pytest.mark.parametrize(
    ("offers", "refusal"),
    [
        ([], None),
        ([message(size=48), message(size=48)], None),  # 2 × (2 + 48) = 100 bytes
        ([message(size=48), message(size=49)], TOO_LARGE_REQUEST),
        ([Unroutable(98)], PublishRefusal(Code.INVALID_ARGUMENT, "envelope exceeds byte limit", Reason.TOO_LARGE, 0)),
        ([message(), message(size=60)], None),
        (
            [message(), message(size=61)],
            PublishRefusal(Code.INVALID_ARGUMENT, "envelope exceeds byte limit", Reason.TOO_LARGE, 1),
        ),
        ([Identity(61)], PublishRefusal(Code.INVALID_ARGUMENT, "envelope exceeds byte limit", Reason.TOO_LARGE, 0)),
        ([message(), Identity(2)], PublishRefusal(Code.UNIMPLEMENTED, "identity updates are not supported")),
        ([Unroutable(2), Identity(2)], PublishRefusal(Code.UNIMPLEMENTED, "identity updates are not supported")),
        ([message(topic=topic) for topic in TOPICS[:2] * 3], None),
        (
            [message(topic=topic) for topic in TOPICS],
            PublishRefusal(Code.INVALID_ARGUMENT, "publish exceeds topic limit", Reason.TOO_LARGE),
        ),
    ],
)
def test_refusals_before_the_database(offers: list[admission.Offer], refusal: PublishRefusal | None) -> None:
    intake = taken_in(offers)
    assert intake.refusal() == refusal
    assert intake.count == len(offers)


def taken_in(offers: Iterable[admission.Offer]) -> Intake:
    intake = Intake(LIMITS)
    for offer in offers:
        intake.add(offer)
    return intake


def test_repeats_are_folded_in_order_of_first_appearance() -> None:
    a, b = message(1), message(2)
    elsewhere = evolve(a, topic=TOPICS[1])  # the same hash under another topic is another envelope
    folding = Folding()
    assert folding.batch() == Batch((), ())
    for envelope in (b, a, b, elsewhere, a):
        folding.add(envelope)
    batch = folding.batch()
    assert batch.distinct == (b, a, elsewhere)
    assert batch.places == (0, 1, 0, 2, 1)


def test_the_first_unroutable_envelope() -> None:
    for offers in itertools.product([message(), Unroutable(1)], repeat=3):
        expected = next((index for index, offer in enumerate(offers) if isinstance(offer, Unroutable)), None)
        intake = taken_in(offers)
        assert intake.unroutable == expected
        assert len(intake.routable.batch().places) == (3 if expected is None else expected)


@pytest.mark.parametrize(
    ("envelope", "seconds"),
    [
        (message(), 1),
        (evolve(message(), is_commit_or_proposal=True), None),
        (evolve(message(), kind=TopicKind.WELCOME), 2),
        (evolve(message(), kind=TopicKind.KEY_PACKAGE), 3),
        (evolve(message(), kind=TopicKind.COMMIT_LOG), None),
    ],
)
def test_retention_by_kind(envelope: NewEnvelope, seconds: int | None) -> None:
    retention = Retention(group_message_s=1, welcome_s=2, key_package_s=3)
    assert retention.of(envelope) == (None if seconds is None else seconds * 10**9)


def test_nothing_private_shows_in_a_repr() -> None:
    shown = repr(message(7, topic=b"\x00" + b"topic-topic-topi"))
    assert "topic-topic" not in shown
    assert "ppp" not in shown
