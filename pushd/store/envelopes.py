"""Reading stored envelopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from pushd.model import EnvelopeMeta, StoredEnvelope
from pushd.store.arrays import BigintArray, ByteaArray
from pushd.store.database import Connection
from pushd.store.queries import query


@frozen
class Page:
    """Envelopes in sequence order; `has_more` is of the same snapshot."""

    envelopes: tuple[StoredEnvelope, ...]
    has_more: bool


async def load_envelopes_of_topics(
    connection: Connection, cursors: Mapping[bytes, int], *, limit: int, max_bytes: int
) -> Page:
    """The first envelopes of these topics together, each topic above its own cursor (exclusive).

    At most `limit` of them, and no more payload than `max_bytes`, except that one envelope always fits.
    """
    rows = await connection.fetch(
        query("load_envelopes_of_topics"),
        {
            "topics": ByteaArray(list(cursors)),
            "cursors": BigintArray(list(cursors.values())),
            "max_rows": limit + 1,  # one more shows whether the page is the last
            "max_bytes": max_bytes,
        },
        binary=True,
    )
    page = rows[:limit]
    return Page(tuple(stored_envelope(row) for row in page), has_more=bool(rows) and rows[0][-1] > len(page))


async def load_newest_envelopes(
    connection: Connection, topics: Sequence[bytes], *, max_bytes: int | None
) -> list[tuple[EnvelopeMeta, bytes | None]] | None:
    """The newest envelope of each topic that has one, in the order of `topics`.

    Payloads are loaded only when `max_bytes` is given; None when they are longer than that together.
    """
    rows = await connection.fetch(
        query("load_newest_envelopes"),
        {"topics": list(topics), "max_bytes": -1 if max_bytes is None else max_bytes},
        binary=True,
    )
    if max_bytes is not None and rows and rows[0][-1] > max_bytes:
        return None
    return [(_meta(row), row[6]) for row in rows]


def stored_envelope(row: Sequence[Any]) -> StoredEnvelope:
    """An envelope from its columns: id, topic, times, hash, commit flag, payload."""
    return StoredEnvelope(_meta(row), bytes(row[6]))


def _meta(row: Sequence[Any]) -> EnvelopeMeta:
    sequence_id, topic, server_ns, expiry_ns, message_hash, is_commit_or_proposal = row[:6]
    return EnvelopeMeta(sequence_id, server_ns, expiry_ns, bytes(message_hash), bytes(topic), is_commit_or_proposal)
