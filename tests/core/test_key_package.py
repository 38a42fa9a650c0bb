"""Which key packages are read, and which of those are accepted."""

import pytest
from attrs import evolve
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.key_package import is_acceptable, is_signed, read_key_package
from pushd.core.mls import Malformed
from tests.support.envelopes import key_package, vector

NOW_S = 2_000

# The first key package of the RFC's passive-client vectors (cipher suite 1, credential "Arnold"), without the four
# bytes that wrap it in an MLSMessage. Its lifetime is 0x64008b8c to 0x65e1bf0c.
ARNOLD = bytes.fromhex(
    "0001000120f11516e18bb8b032171968edc494d945da05a6fe4f02b06dfc59078155478c7820aa48050754cf84dc751cc13970e1de1c49d2180f"
    "748d82dba2b1bbf6e003543620507258f7fa5e45187a22fb1315c4b36424837eef2cf9a76c4d85919959648d4300010641726e6f6c640200010e"
    "00010002000300040005000600070000020001010000000064008b8c0000000065e1bf0c004040225335d96c9702620b6fe3d0d879a5f8c2dec8"
    "e8d8f0844a44bcf08570d73325a005c818eea0685a20f25389c26122f5342b3ce97faffe32440586a1782ad9090040401bd9022afb72d591f1db"
    "5015bc0677962bee7494a3bf2a954e414cecdcd95ca22b97887e9d73e14fec17526c651e1c41a437d8143626e56e2b2e85f7aa56d00c"
)


def test_a_key_package_of_another_implementation_is_read_and_its_signatures_hold() -> None:
    package = read_key_package(ARNOLD)
    assert package.cipher_suite == 1
    assert package.leaf_node.credential == b"Arnold"
    assert (package.leaf_node.not_before_s, package.leaf_node.not_after_s) == (0x64008B8C, 0x65E1BF0C)
    leaf = package.leaf_node
    assert is_signed(leaf.signature_key, b"LeafNodeTBS", leaf.signed_part, leaf.signature)
    assert is_signed(leaf.signature_key, b"KeyPackageTBS", package.signed_part, package.signature)
    assert not is_signed(leaf.signature_key, b"KeyPackageTBS", leaf.signed_part, leaf.signature)
    # Its identity is a plain name and not a message that names an inbox.
    assert not is_acceptable(package, 0x64008B8C)


def test_a_right_key_package_is_acceptable() -> None:
    maker = key_package()
    package = read_key_package(maker.serialized())
    assert package.leaf_node.signature_key == maker.public_key
    assert is_acceptable(package, NOW_S)


@pytest.mark.parametrize(
    ("now_s", "accepted"), [(0, False), (999, False), (1_000, True), (4_999, True), (5_000, False), (2**63, False)]
)
def test_the_lifetime_includes_its_start_and_not_its_end(now_s: int, accepted: bool) -> None:
    package = read_key_package(key_package(not_before_s=1_000, not_after_s=5_000).serialized())
    assert is_acceptable(package, now_s) == accepted


@pytest.mark.parametrize("cipher_suite", [1, 3, 0x4D])
def test_suites_that_sign_with_ed25519(cipher_suite: int) -> None:
    assert is_acceptable(read_key_package(key_package(cipher_suite=cipher_suite).serialized()), NOW_S)


BENT = {
    "suite that signs otherwise": {"cipher_suite": 2},
    "unknown suite": {"cipher_suite": 0x0A0A},
    "leaf made for an update": {"source": 2},
    "leaf made for a commit": {"source": 3},
    "equal keys": {"init_key": b"\x02" * 32},
    "certificate": {"credential_type": 2},
    "unknown credential": {"credential_type": 0xF000},
    "identity that does not decode": {"credential": b"\x0a\x09abc"},
    "identity that is not text": {"credential": b"\x0a\x01\xff"},
    "leaf signed for another purpose": {"leaf_label": b"MLS 1.0 KeyPackageTBS"},
    "package signed for another purpose": {"package_label": b"MLS 1.0 LeafNodeTBS"},
}


@pytest.mark.parametrize("name", BENT)
def test_readable_key_packages_that_are_not_acceptable(name: str) -> None:
    assert not is_acceptable(read_key_package(key_package(**BENT[name]).serialized()), NOW_S)


def test_extensions_of_the_leaf_are_walked() -> None:
    grease = b"\x0a\x0a" + vector(b"anything") + b"\xff\x01" + vector(b"")
    assert is_acceptable(read_key_package(key_package(extensions=grease).serialized()), NOW_S)
    with pytest.raises(Malformed):
        read_key_package(key_package(extensions=grease[:-1]).serialized())


def test_an_unknown_leaf_source_is_malformed() -> None:
    with pytest.raises(Malformed):
        read_key_package(key_package(source=4).serialized())


def test_a_key_package_fills_its_field_exactly() -> None:
    serialized = key_package().serialized()
    for wrong in (serialized + b"\x00", serialized[:-1], b"\x00\x01\x00\x05" + serialized, b""):
        with pytest.raises(Malformed):
            read_key_package(wrong)


@given(st.data())
def test_no_changed_byte_is_accepted(data: st.DataObject) -> None:
    serialized = bytearray(key_package().serialized())
    position = data.draw(st.integers(0, len(serialized) - 1))
    serialized[position] ^= data.draw(st.integers(1, 255))
    try:
        package = read_key_package(bytes(serialized))
    except Malformed:
        return
    assert not is_acceptable(package, NOW_S)


def test_a_key_that_is_not_on_the_curve_or_too_short_is_not_acceptable() -> None:
    package = read_key_package(key_package().serialized())
    for key in (b"", b"\x00" * 31, b"\xff" * 32, Ed25519PrivateKey.generate().public_key().public_bytes_raw()):
        assert not is_acceptable(evolve(package, leaf_node=evolve(package.leaf_node, signature_key=key)), NOW_S)
