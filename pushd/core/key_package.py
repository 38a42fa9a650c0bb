"""Key packages: the structure of RFC 9420 §10, and what can be verified about one without knowing its owner.

Verified: both signatures, the lifetime, that the leaf was made for a key package, the kind of credential, and that the
two HPKE keys differ. Left to the clients that use a key package: whether the inbox exists and owns the key, which
cipher suites, capabilities and extensions they accept, and how long a lifetime may be.
"""

from __future__ import annotations

from attrs import field, frozen
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue

from pushd.core.mls import MLS_10, Malformed, Reader

# An installation key is an Ed25519 key, so only the suites that sign with Ed25519 can be meant: X25519 with AES-GCM,
# with ChaCha20-Poly1305 (RFC 9420 §17.1), and the X-Wing suite of draft-ietf-mls-pq-ciphersuites.
ED25519_SUITES = frozenset({0x0001, 0x0003, 0x004D})
BASIC_CREDENTIAL = 1  # RFC 9420 §17.5
SOURCE_KEY_PACKAGE, SOURCE_UPDATE, SOURCE_COMMIT = 1, 2, 3  # LeafNodeSource, RFC 9420 §7.2


@frozen
class LeafNode:
    """RFC 9420 §7.2, as far as it is judged here."""

    encryption_key: bytes = field(repr=False)
    signature_key: bytes = field(repr=False)
    credential_type: int
    credential: bytes = field(repr=False)
    source: int
    not_before_s: int
    not_after_s: int
    signed_part: bytes = field(repr=False)
    signature: bytes = field(repr=False)


@frozen
class KeyPackage:
    """RFC 9420 §10."""

    cipher_suite: int
    init_key: bytes = field(repr=False)
    leaf_node: LeafNode
    signed_part: bytes = field(repr=False)
    signature: bytes = field(repr=False)


def read_key_package(data: bytes) -> KeyPackage:
    """Take a serialized KeyPackage apart; it must fill `data` exactly.

    Raises:
        Malformed: the structure is broken, or bytes are left over.
    """
    reader = Reader(data)
    if reader.uint(2) != MLS_10:
        raise Malformed
    cipher_suite = reader.uint(2)
    init_key = reader.vector()
    leaf_node = _read_leaf_node(reader, data)
    _skip_extensions(reader)
    signed_part = data[: reader.position]
    signature = reader.vector()
    if not reader.at_end:
        raise Malformed
    return KeyPackage(cipher_suite, init_key, leaf_node, signed_part, signature)


def _read_leaf_node(reader: Reader, data: bytes) -> LeafNode:
    start = reader.position
    encryption_key = reader.vector()
    signature_key = reader.vector()
    credential_type = reader.uint(2)
    credential = reader.vector()  # an identity or a certificate list: one vector either way
    for _ in ("versions", "cipher_suites", "extensions", "proposals", "credentials"):
        if len(reader.vector()) % 2:
            raise Malformed
    source = reader.uint(1)
    not_before_s = not_after_s = 0
    if source == SOURCE_KEY_PACKAGE:
        not_before_s, not_after_s = reader.uint(8), reader.uint(8)
    elif source == SOURCE_COMMIT:
        reader.vector()  # parent_hash
    elif source != SOURCE_UPDATE:
        raise Malformed
    _skip_extensions(reader)
    signed_part = data[start : reader.position]
    return LeafNode(
        encryption_key,
        signature_key,
        credential_type,
        credential,
        source,
        not_before_s,
        not_after_s,
        signed_part,
        signature=reader.vector(),
    )


def _skip_extensions(reader: Reader) -> None:
    extensions = Reader(reader.vector())
    while not extensions.at_end:
        extensions.take(2)  # extension_type
        extensions.vector()


def is_acceptable(package: KeyPackage, now_s: int) -> bool:
    """Whether a key package may be stored at `now_s` (seconds of Unix time): RFC 9420 §10.1 and §7.3."""
    leaf = package.leaf_node
    return (
        package.cipher_suite in ED25519_SUITES
        and leaf.source == SOURCE_KEY_PACKAGE
        and leaf.not_before_s <= now_s < leaf.not_after_s
        and package.init_key != leaf.encryption_key
        and _names_an_inbox(leaf)
        and is_signed(leaf.signature_key, b"LeafNodeTBS", leaf.signed_part, leaf.signature)
        and is_signed(leaf.signature_key, b"KeyPackageTBS", package.signed_part, package.signature)
    )


def _names_an_inbox(leaf: LeafNode) -> bool:
    """Whether the credential is a basic one whose identity decodes as the message with the inbox id in field 1."""
    if leaf.credential_type != BASIC_CREDENTIAL:
        return False
    try:
        # That message is one string in field 1, which is what StringValue is on the wire.
        StringValue.FromString(leaf.credential)
    except DecodeError:
        return False
    return True


def is_signed(key: bytes, label: bytes, content: bytes, signature: bytes) -> bool:
    """VerifyWithLabel of RFC 9420 §5.1.2 for Ed25519."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(
            signature, encode_vector(b"MLS 1.0 " + label) + encode_vector(content)
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def encode_vector(content: bytes) -> bytes:
    """`content` as an `opaque<V>` of RFC 9420 §2.1.2; `content` is shorter than 2^30 bytes."""
    size = len(content)
    if size < 0x40:
        return bytes((size,)) + content
    if size < 0x4000:
        return (size | 0x4000).to_bytes(2, "big") + content
    return (size | 0x8000_0000).to_bytes(4, "big") + content
