"""Key derivation against a vector computed elsewhere, and against the backend's own check."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.hmac_keys import derive_key, epoch_at, key_window, root_key_fingerprint, sender_hmac
from pushd.core.suppression import key_in_window, own_keys

ROOT = bytes(range(42))
GROUP = bytes(range(16))


def test_vector() -> None:
    key = derive_key(ROOT, GROUP, 660)
    assert key.hex() == "5033e1c886f72920a9efe18bba2ef8d800b7735adac39403a5b4e0cab09a73512d31f4da00d6285e2012"
    assert sender_hmac(key, b"hello").hex() == "ee77d18d5bd00395279eae47bf0a9df4f81be358194b5fb8f386923f89aec7d3"


@pytest.mark.parametrize(
    ("time_s", "epoch"), [(0, 0), (2_591_999, 0), (2_592_000, 1), (5_183_999, 1), (1_710_720_000, 660)]
)
def test_epoch_boundaries(time_s: int, epoch: int) -> None:
    assert epoch_at(time_s * 10**9) == epoch


def test_window_has_the_epoch_before_the_current_one_and_the_next() -> None:
    window = key_window(ROOT, GROUP, 660)
    assert window.epoch_base == 659
    assert window.keys == tuple(derive_key(ROOT, GROUP, epoch) for epoch in (659, 660, 661))


@given(st.binary(min_size=42, max_size=42), st.binary(min_size=16, max_size=16), st.integers(-(2**63), 2**63 - 1))
def test_derivation_is_hkdf_of_rfc_5869(root: bytes, group: bytes, epoch: int) -> None:
    info = group + epoch.to_bytes(8, "little", signed=True)
    extracted = hmac.digest(b"libXMTP HKDF salt!", root + group, "sha256")
    first = hmac.digest(extracted, info + b"\x01", "sha256")
    second = hmac.digest(extracted, first + info + b"\x02", "sha256")
    assert derive_key(root, group, epoch) == (first + second)[:42]


@pytest.mark.parametrize(("epochs_later", "covered"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_backend_recognises_a_message_while_the_window_covers_its_epoch(epochs_later: int, covered: bool) -> None:
    window = key_window(ROOT, GROUP, 660)
    epoch = 660 + epochs_later
    tag = sender_hmac(derive_key(ROOT, GROUP, epoch), b"data")
    key = key_in_window(epoch * 2_592_000 * 10**9, window.epoch_base, window.keys)
    assert (key is not None) == covered
    assert own_keys(b"data", [key] if key else [], tag) == ({key} if covered else set())


def test_fingerprint_tells_keys_apart_without_holding_one() -> None:
    assert root_key_fingerprint(ROOT) == hashlib.sha256(ROOT).digest()
    assert root_key_fingerprint(ROOT) != root_key_fingerprint(bytes(42))
