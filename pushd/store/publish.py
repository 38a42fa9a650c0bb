"""Storing the envelopes of one publish: one statement, which is one transaction (PUSH-030, 031, 032, 100)."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pushd.core.admission import Retention
from pushd.core.topics import topic_lock_key
from pushd.model import EnvelopeMeta, NewEnvelope
from pushd.store.arrays import BigintArray, BooleanArray, ByteaArray
from pushd.store.database import Database
from pushd.store.queries import query


@frozen
class Placed:
    """An envelope that is stored, and whether this call stored it."""

    meta: EnvelopeMeta
    is_new: bool


async def publish_envelopes(
    database: Database, envelopes: Sequence[NewEnvelope], retention: Retention
) -> list[Placed | None]:
    """Store the envelopes not stored yet, all or none, and answer for each in order.

    An envelope that is not admissible and not stored already makes the call store nothing; every envelope not stored
    before is None then. `envelopes` holds each topic and hash at most once.

    Raises:
        StoreTimeout: the statement, its waits for other publishers included, ran out of time; nothing is stored.
        StoreInvariant: a topic's watermark is above the sequence.
        StoreUnavailable: the outcome is unknown; a retry settles it.
    """
    rows = await database.fetch_on_primary(
        query("publish_envelopes"),
        {
            "lock_keys": BigintArray(sorted({topic_lock_key(envelope.topic) for envelope in envelopes})),
            "topics": ByteaArray([envelope.topic for envelope in envelopes]),
            "hashes": ByteaArray([envelope.message_hash for envelope in envelopes]),
            "payloads": ByteaArray([envelope.payload for envelope in envelopes]),
            "hmacs": ByteaArray([envelope.sender_hmac for envelope in envelopes]),
            "retentions_ns": BigintArray([retention.of(envelope) for envelope in envelopes]),
            "commits": BooleanArray([envelope.is_commit_or_proposal for envelope in envelopes]),
            "eligible": BooleanArray([envelope.push_eligible for envelope in envelopes]),
            "admissible": BooleanArray([envelope.is_admissible for envelope in envelopes]),
        },
    )
    return [
        None if sequence_id is None else Placed(_meta(envelope, sequence_id, server_ns, expiry_ns), is_new)
        for envelope, (sequence_id, server_ns, expiry_ns, is_new) in zip(envelopes, rows, strict=True)
    ]


def _meta(envelope: NewEnvelope, sequence_id: int, server_ns: int, expiry_ns: int | None) -> EnvelopeMeta:
    return EnvelopeMeta(
        sequence_id, server_ns, expiry_ns, envelope.message_hash, envelope.topic, envelope.is_commit_or_proposal
    )
