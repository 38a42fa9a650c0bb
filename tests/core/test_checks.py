"""The rows of the check table that are decided without a database: each input with the answer it must get."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from pushd.core import checks
from pushd.core.checks import Claim, Refusal
from pushd.errors import Code
from pushd.model import Channel, DeliveryConfig, KeyWindow, SubscriptionChange

GROUP = b"\x00" + b"g" * 16
WELCOME = b"\x01" + b"w" * 32
KEY = b"k" * 42
CLAIM = Claim(b"i" * 32, hashlib.sha256(b"s" * 32).digest())


@frozen
class Add:
    topic: bytes = GROUP
    hmac_epoch_base: int = 0
    hmac_keys: tuple[bytes, ...] = ()
    include_commits: bool = False


def test_every_refusal_has_its_status_and_text() -> None:
    assert {refusal.text: refusal.code for refusal in Refusal} == {
        "request is malformed": Code.INVALID_ARGUMENT,
        "recipient is not registered": Code.NOT_FOUND,
        "recipient secret is not valid": Code.PERMISSION_DENIED,
        "channel is not configured": Code.FAILED_PRECONDITION,
        "webhook url is not allowed": Code.INVALID_ARGUMENT,
        "webhook host cannot be resolved now": Code.UNAVAILABLE,
        "webhook signing key length is not allowed": Code.INVALID_ARGUMENT,
        "subscription is malformed": Code.INVALID_ARGUMENT,
        "recipient topic limit reached": Code.RESOURCE_EXHAUSTED,
    }


def test_identity_keeps_the_hash_and_not_the_secret() -> None:
    claim = checks.check_identity(b"\x11" * 32, b"\x22" * 32)
    assert claim == Claim(b"\x11" * 32, hashlib.sha256(b"\x22" * 32).digest())
    assert repr(claim) == "Claim()"


@pytest.mark.parametrize(
    ("id_bytes", "secret_bytes"), [(0, 32), (32, 0), (33, 32), (32, 33), (31, 32), (32, 31), (0, 0)]
)
def test_identity_of_another_size_is_malformed(id_bytes: int, secret_bytes: int) -> None:
    assert checks.check_identity(bytes(id_bytes), bytes(secret_bytes)) is Refusal.MALFORMED


@pytest.mark.parametrize(
    ("stored", "answer"),
    [
        pytest.param(None, Refusal.NOT_REGISTERED, id="unknown"),
        pytest.param(CLAIM.secret_hash, None, id="owner"),
        pytest.param(b"s" * 32, Refusal.WRONG_SECRET, id="the secret itself is stored"),
        pytest.param(CLAIM.secret_hash[:-1] + b"\x00", Refusal.WRONG_SECRET, id="last byte differs"),
        pytest.param(b"\x00" + CLAIM.secret_hash[1:], Refusal.WRONG_SECRET, id="first byte differs"),
    ],
)
def test_ownership(stored: bytes | None, answer: Refusal | None) -> None:
    assert checks.check_ownership(CLAIM, stored) is answer


def test_ownership_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert checks.check_ownership(CLAIM, b"\x00" * 32) is Refusal.WRONG_SECRET
    assert compared == [(CLAIM.secret_hash, b"\x00" * 32)]


def test_stored_hash_is_no_secret() -> None:
    claim = checks.check_identity(CLAIM.recipient_id, CLAIM.secret_hash)
    assert isinstance(claim, Claim)
    assert checks.check_ownership(claim, CLAIM.secret_hash) is Refusal.WRONG_SECRET


@pytest.mark.parametrize(
    ("channel", "configured", "refusal"),
    [
        (None, set(), Refusal.CHANNEL_NOT_CONFIGURED),
        (None, {Channel.FCM}, Refusal.MALFORMED),
        (Channel.APNS, set(), Refusal.CHANNEL_NOT_CONFIGURED),
        (Channel.FCM, {Channel.APNS, Channel.HTTP}, Refusal.CHANNEL_NOT_CONFIGURED),
        (Channel.HTTP, {Channel.APNS, Channel.FCM}, Refusal.CHANNEL_NOT_CONFIGURED),
        *[(channel, set(Channel), None) for channel in Channel],
        *[(channel, {channel}, None) for channel in Channel],
    ],
)
def test_channel(channel: Channel | None, configured: set[Channel], refusal: Refusal | None) -> None:
    config = None if channel is None else DeliveryConfig(channel, "")
    assert checks.check_channel(config, configured) is (refusal or config)


URL = "https://hooks.example.com/"


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        *[
            pytest.param(
                DeliveryConfig(Channel.HTTP, URL, bytes(size)),
                None if 16 <= size <= 64 else Refusal.SIGNING_KEY,
                id=f"signing key of {size}",
            )
            for size in (0, 15, 16, 64, 65)
        ],
        pytest.param(DeliveryConfig(Channel.HTTP, URL + "x" * 2048, bytes(15)), Refusal.SIGNING_KEY, id="key first"),
        pytest.param(DeliveryConfig(Channel.HTTP, URL + "x" * 2048, bytes(16)), Refusal.MALFORMED, id="long URL"),
        *[
            pytest.param(DeliveryConfig(channel, target), answer, id=f"{channel.label} {name}")
            for channel in (Channel.APNS, Channel.FCM)
            for name, target, answer in [
                ("empty", "", Refusal.MALFORMED),
                ("one", "a", None),
                ("longest", "a" * 2048, None),
                ("too long", "a" * 2049, Refusal.MALFORMED),
                ("longest in characters, not bytes", "é" * 2048, None),
                ("NUL", "a\0b", Refusal.MALFORMED),
            ]
        ],
    ],
)
def test_delivery(config: DeliveryConfig, answer: Refusal | None) -> None:
    assert checks.check_delivery(config) is answer


def check_update(
    adds: list[Add], removes: list[bytes]
) -> tuple[list[SubscriptionChange], list[bytes]] | Literal[Refusal.SUBSCRIPTION]:
    """What a whole request comes to."""
    check = checks.UpdateCheck()
    changes, gone = [check.add(add) for add in adds], [check.remove(topic) for topic in removes]
    kept = [change for change in changes if not isinstance(change, Refusal)]
    kept_topics = [topic for topic in gone if not isinstance(topic, Refusal)]
    refused = {answer for answer in (*changes, *gone) if isinstance(answer, Refusal)}
    assert refused <= {Refusal.SUBSCRIPTION}
    return Refusal.SUBSCRIPTION if refused else (kept, kept_topics)


def test_update_is_translated_as_it_stands() -> None:
    other = b"\x00" + b"h" * 16
    adds = [Add(GROUP, 7, (KEY,), True), Add(WELCOME, 7), Add(other, 0, (KEY, b"l" * 42, b"m" * 42))]
    assert check_update(adds, [b"\x00" * 17]) == (
        [
            SubscriptionChange(GROUP, KeyWindow(7, (KEY,)), True),
            SubscriptionChange(WELCOME, None, False),
            SubscriptionChange(other, KeyWindow(0, (KEY, b"l" * 42, b"m" * 42)), False),
        ],
        [b"\x00" * 17],
    )


def test_update_of_nothing_is_fine() -> None:
    assert check_update([], []) == ([], [])


BAD_TOPICS = [
    b"",
    b"\x00",
    bytes(16),
    bytes(18),
    b"\x01" * 32,
    b"\x01" * 34,
    b"\x00" + bytes(32),
    b"\x01" + bytes(16),
    b"\x02" * 33,
    b"\x03" * 33,
    b"\x04" * 17,
    b"\xff" * 33,
]


@pytest.mark.parametrize(
    ("adds", "removes"),
    [
        *[pytest.param([Add(topic)], [], id=f"add {len(topic)} bytes of {topic[:1].hex()}") for topic in BAD_TOPICS],
        *[pytest.param([], [topic], id=f"remove {len(topic)} bytes of {topic[:1].hex()}") for topic in BAD_TOPICS],
        pytest.param([Add(hmac_keys=(KEY,) * 4)], [], id="four keys"),
        *[pytest.param([Add(hmac_keys=(bytes(size),))], [], id=f"key of {size}") for size in (0, 41, 43)],
        pytest.param([Add(hmac_keys=(KEY, KEY, bytes(41)))], [], id="third key short"),
        pytest.param([Add(hmac_epoch_base=-1, hmac_keys=(KEY,))], [], id="negative base"),
        pytest.param([Add(hmac_epoch_base=-1)], [], id="negative base without keys"),
        pytest.param([Add(), Add(WELCOME), Add(include_commits=True)], [], id="added twice"),
        pytest.param([], [GROUP, WELCOME, GROUP], id="removed twice"),
        pytest.param([Add()], [WELCOME, GROUP], id="added and removed"),
        pytest.param([Add(), Add(WELCOME), Add(b"\x02" * 33)], [], id="last of several"),
    ],
)
def test_malformed_update(adds: list[Add], removes: list[bytes]) -> None:
    assert check_update(adds, removes) is Refusal.SUBSCRIPTION


def test_keys_are_counted_before_they_are_read() -> None:
    class Endless(tuple[bytes, ...]):
        def __iter__(self) -> Iterator[bytes]:
            raise AssertionError("read")

    assert check_update([Add(hmac_keys=Endless([KEY] * 4))], []) is Refusal.SUBSCRIPTION


group_topics = st.binary(min_size=16, max_size=16).map(b"\x00".__add__)
welcome_topics = st.binary(min_size=32, max_size=32).map(b"\x01".__add__)
topics = group_topics | welcome_topics
keys = st.lists(st.binary(min_size=42, max_size=42), max_size=3).map(tuple)
bases = st.integers(0, 2**63 - 1)


@given(st.data())
def test_well_formed_updates_pass_whole_and_in_order(data: Any) -> None:
    names = data.draw(st.lists(topics, unique=True, max_size=20))
    cut = data.draw(st.integers(0, len(names)))
    adds = [Add(name, data.draw(bases), data.draw(keys), data.draw(st.booleans())) for name in names[:cut]]
    checked = check_update(adds, names[cut:])
    assert checked is not Refusal.SUBSCRIPTION
    changes, removes = checked
    assert removes == names[cut:]
    for add, change in zip(adds, changes, strict=True):
        assert (change.topic, change.include_commits) == (add.topic, add.include_commits)
        window = KeyWindow(add.hmac_epoch_base, tuple(add.hmac_keys)) if add.hmac_keys else None
        assert change.key_window == window


@given(st.binary(max_size=40))
def test_only_the_two_subscribable_shapes_pass(topic: bytes) -> None:
    fits = (len(topic), topic[:1]) in {(17, b"\x00"), (33, b"\x01")}
    assert (check_update([Add(topic)], []) is not Refusal.SUBSCRIPTION) == fits
