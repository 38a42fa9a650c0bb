"""Protobuf to the backend's values and back, for publishing and querying. No I/O; the clock is an argument."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from pushd.core.admission import (
    Identity,
    Offer,
    PublishRefusal,
    Reason,
    Unroutable,
    offer_commit_log_entry,
    offer_group_message,
    offer_key_package,
    offer_welcome,
)
from pushd.core.canonical import canonical_bytes
from pushd.errors import StatusError
from pushd.model import EnvelopeMeta, StoredEnvelope
from pushd.rpc.gen.google.rpc.status_pb2 import Status
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishError
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope, ServerEnvelope
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import EnvelopeMeta as WireMeta
from pushd.rpc.gen.xmtp.mls.message_contents.message_contents_pb2 import PlaintextCommitLogEntry

PUBLISH_ERROR_URL = "type.googleapis.com/xmtp.backend.v1.PublishError"


def offer_from(envelope: ClientEnvelope, now_s: int) -> Offer:
    """Parse one ClientEnvelope, which loses its unknown fields by this.

    Args:
        envelope: as decoded from the request.
        now_s: seconds of Unix time, for the lifetime of a key package.
    """
    payload = canonical_bytes(envelope)
    match envelope.WhichOneof("payload"):
        case "group_message":
            message = envelope.group_message
            return offer_group_message(message.data, message.sender_hmac, message.should_push, payload)
        case "welcome_message":
            welcome = envelope.welcome_message
            version = welcome.WhichOneof("version")
            if version is None:
                return Unroutable(len(payload))
            return offer_welcome(getattr(welcome, version).installation_key, payload)
        case "key_package":
            return offer_key_package(envelope.key_package.key_package_tls_serialized, payload, now_s)
        case "identity_update":
            return Identity(len(payload))
        case "commit_log_entry":
            try:
                entry = PlaintextCommitLogEntry.FromString(envelope.commit_log_entry.serialized_commit_log_entry)
            except DecodeError:
                return Unroutable(len(payload))
            return offer_commit_log_entry(entry.group_id, payload)
        case _:
            return Unroutable(len(payload))


def error_from(refusal: PublishRefusal) -> StatusError:
    """The status of a refused publish, with a PublishError among its details when it has a reason."""
    if refusal.reason is None:
        return StatusError(refusal.code, refusal.text)
    error = PublishError(index=refusal.index, reason=_reason(refusal.reason), message=refusal.text)
    status = Status(code=refusal.code, message=refusal.text)
    status.details.add(type_url=PUBLISH_ERROR_URL, value=error.SerializeToString())
    return StatusError(refusal.code, refusal.text, status.SerializeToString())


def _reason(reason: Reason) -> str:
    return f"REASON_{reason.name}"


def write_meta(target: WireMeta, meta: EnvelopeMeta) -> WireMeta:
    """Fill the element of a response in place; the same element."""
    target.cursor.sequence_id = meta.sequence_id
    target.server_ns = meta.server_ns
    target.message_hash.sha256 = meta.message_hash
    target.topic.topic = meta.topic
    target.expiry_ns = meta.expiry_ns or 0
    target.is_commit_or_proposal = meta.is_commit_or_proposal
    return target


def write_envelope(target: ServerEnvelope, stored: StoredEnvelope) -> None:
    """Fill the element of a response in place."""
    write_meta(target.meta, stored.meta)
    target.envelope.MergeFromString(stored.payload)
