"""Valid envelopes of every kind, and short cuts that put rows into the database.

The TLS encoding here is written apart from the program's, so that the two cannot share a mistake.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import (
    ClientEnvelope,
    CommitLogEntry,
    GroupMessage,
    KeyPackage,
    WelcomeMessage,
)
from pushd.rpc.gen.xmtp.identity.associations.associations_pb2 import IdentityUpdate
from pushd.rpc.gen.xmtp.mls.message_contents.message_contents_pb2 import PlaintextCommitLogEntry

APPLICATION, PROPOSAL, COMMIT = 1, 2, 3
GROUP = bytes(range(16))
INSTALLATION = bytes(range(32))


def vector(content: bytes) -> bytes:
    """opaque<V> of RFC 9420 with its shortest prefix."""
    for width, ceiling in ((1, 1 << 6), (2, 1 << 14), (4, 1 << 30)):
        if len(content) < ceiling:
            prefix = len(content) | (width.bit_length() - 1) << (8 * width - 2)
            return prefix.to_bytes(width, "big") + content
    raise ValueError("too long")


def private_message(
    group_id: bytes = GROUP, content_type: int = APPLICATION, *, ciphertext: bytes = b"sealed"
) -> bytes:
    """An MLSMessage in private framing."""
    return b"".join(
        (
            b"\x00\x01\x00\x02",
            vector(group_id),
            (7).to_bytes(8, "big"),
            bytes((content_type,)),
            vector(b""),
            vector(b"sender data"),
            vector(ciphertext),
        )
    )


def public_message(group_id: bytes = GROUP, content_type: int = COMMIT, *, sender_type: int = 1) -> bytes:
    """An MLSMessage in public framing; what follows the content type is filler."""
    sender = bytes((sender_type,)) + (b"\x00\x00\x00\x05" if sender_type in (1, 2) else b"")
    return b"".join(
        (
            b"\x00\x01\x00\x01",
            vector(group_id),
            (7).to_bytes(8, "big"),
            sender,
            vector(b"aad"),
            bytes((content_type,)),
            b"filler",
        )
    )


def group_envelope(
    group_id: bytes = GROUP,
    content_type: int = APPLICATION,
    *,
    should_push: bool = True,
    sender_hmac: bytes = b"",
    body: bytes | None = None,
    data: bytes | None = None,
) -> ClientEnvelope:
    """A group message; unique unless `body` (its ciphertext) or `data` (the whole MLSMessage) is given."""
    if data is None:
        data = private_message(group_id, content_type, ciphertext=os.urandom(16) if body is None else body)
    return ClientEnvelope(group_message=GroupMessage(data=data, sender_hmac=sender_hmac, should_push=should_push))


def welcome_envelope(installation_key: bytes = INSTALLATION, *, data: bytes | None = None) -> ClientEnvelope:
    """A welcome; unique unless `data` is given."""
    sealed = os.urandom(16) if data is None else data
    return ClientEnvelope(
        welcome_message=WelcomeMessage(v1=WelcomeMessage.V1(installation_key=installation_key, data=sealed))
    )


def welcome_pointer_envelope(installation_key: bytes = INSTALLATION) -> ClientEnvelope:
    """A welcome pointer, unique."""
    pointer = WelcomeMessage.WelcomePointer(installation_key=installation_key, welcome_pointer=os.urandom(16))
    return ClientEnvelope(welcome_message=WelcomeMessage(welcome_pointer=pointer))


def commit_log_envelope(group_id: bytes = GROUP, *, number: int = 1) -> ClientEnvelope:
    """A commit-log entry."""
    entry = PlaintextCommitLogEntry(group_id=group_id, commit_sequence_id=number)
    return ClientEnvelope(commit_log_entry=CommitLogEntry(serialized_commit_log_entry=entry.SerializeToString()))


def identity_envelope() -> ClientEnvelope:
    """An identity update."""
    return ClientEnvelope(identity_update=IdentityUpdate(inbox_id="ab" * 32, client_timestamp_ns=1))


@frozen
class KeyPackageMaker:
    """Builds key packages, right ones by default; every part can be bent."""

    signing_key: Ed25519PrivateKey
    cipher_suite: int = 1
    init_key: bytes = b"\x01" * 32
    encryption_key: bytes = b"\x02" * 32
    credential_type: int = 1
    credential: bytes = b"\x0a\x03abc"  # MlsCredential{inbox_id: "abc"}
    source: int = 1
    not_before_s: int = 1_000
    not_after_s: int = 2**40
    extensions: bytes = b""
    leaf_label: bytes = b"MLS 1.0 LeafNodeTBS"
    package_label: bytes = b"MLS 1.0 KeyPackageTBS"

    @property
    def public_key(self) -> bytes:
        return self.signing_key.public_key().public_bytes_raw()

    def _sign(self, label: bytes, content: bytes) -> bytes:
        return vector(self.signing_key.sign(vector(label) + vector(content)))

    def leaf_node(self) -> bytes:
        """A signed LeafNode."""
        match self.source:
            case 1:
                source = self.not_before_s.to_bytes(8, "big") + self.not_after_s.to_bytes(8, "big")
            case 3:
                source = vector(b"parent hash")
            case _:
                source = b""
        unsigned = b"".join(
            (
                vector(self.encryption_key),
                vector(self.public_key),
                self.credential_type.to_bytes(2, "big"),
                vector(self.credential),
                vector(b"\x00\x01"),
                vector(b"\x00\x01"),
                vector(b""),
                vector(b"\x00\x08"),
                vector(b"\x00\x01"),
                bytes((self.source,)),
                source,
                vector(self.extensions),
            )
        )
        return unsigned + self._sign(self.leaf_label, unsigned)

    def serialized(self) -> bytes:
        """The KeyPackage of RFC 9420 §10."""
        unsigned = b"".join(
            (
                b"\x00\x01",
                self.cipher_suite.to_bytes(2, "big"),
                vector(self.init_key),
                self.leaf_node(),
                vector(b"\x00\x0a" + vector(b"")),  # last_resort
            )
        )
        return unsigned + self._sign(self.package_label, unsigned)

    def envelope(self) -> ClientEnvelope:
        return ClientEnvelope(key_package=KeyPackage(key_package_tls_serialized=self.serialized()))


def key_package(seed: int = 1, **parts: Any) -> KeyPackageMaker:
    """A key package of the installation with this seed, with these parts bent."""
    signing_key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed.to_bytes(8, "big")).digest())
    return evolve(KeyPackageMaker(signing_key), **parts)


_numbers = itertools.count(1)


@frozen
class Row:
    """A row of `envelopes` for a test that does not care how it got there."""

    topic: bytes = b"\x00" + GROUP
    push_eligible: bool = True
    is_commit_or_proposal: bool = False
    sender_hmac: bytes | None = None
    server_ns: int = 1_700_000_000_000_000_000
    payload: bytes = b""


def insert_envelopes(conn: Any, rows: Sequence[Row] | int, *, close: bool = True) -> list[int]:
    """Insert rows with ids from the sequence; with `close`, raise the closed boundary over them.

    Args:
        conn: a synchronous psycopg connection in autocommit mode.
        rows: the rows, or how many plain ones.

    Returns:
        Their sequence ids.
    """
    wanted = [Row()] * rows if isinstance(rows, int) else list(rows)
    with conn.transaction(), conn.cursor() as cursor:
        ids = [
            n
            for (n,) in cursor.execute("SELECT nextval('envelope_sequence') FROM generate_series(1, %s)", [len(wanted)])
        ]
        columns = (
            "sequence_id, topic, server_ns, message_hash, is_commit_or_proposal, push_eligible, sender_hmac, payload"
        )
        with cursor.copy(f"COPY envelopes ({columns}) FROM STDIN") as copy:
            for sequence_id, row in zip(ids, wanted, strict=True):
                copy.write_row(
                    (
                        sequence_id,
                        row.topic,
                        row.server_ns,
                        hashlib.sha256(f"row {next(_numbers)}".encode()).digest(),
                        row.is_commit_or_proposal,
                        row.push_eligible,
                        row.sender_hmac,
                        row.payload,
                    )
                )
        if close and ids:
            cursor.execute(
                "UPDATE allocation_boundary SET closed_sequence_id = greatest(closed_sequence_id, %s)", [ids[-1]]
            )
    return ids
