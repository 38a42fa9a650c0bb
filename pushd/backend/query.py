"""Reads of stored envelopes that answer at once.

`Query` reads the primary, so that writers see their own. `QueryNewest` reads the replica where there is one: it is
asked for things that were published some time ago, key packages above all, and asked often.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pushd.core.topics import topic_kind
from pushd.errors import Code, StatusError
from pushd.model import MAX_SEQUENCE_ID, EnvelopeMeta, TopicKind
from pushd.store.database import Database
from pushd.store.envelopes import Page, load_envelopes_of_topics, load_newest_envelopes

META_BYTES = 256  # more than the encoded EnvelopeMeta and framing of one envelope


@frozen
class QueryLimits:
    """Bounds of the queries; `default_query_limit` is taken when the caller names no limit."""

    max_query_topics: int = 1_000
    default_query_limit: int = 100
    max_query_limit: int = 1_000
    max_response_bytes: int = 26_214_400
    max_newest_metadata_topics: int = 1_000
    max_newest_full_topics: int = 100

    def max_newest_topics(self, *, full: bool) -> int:
        """How many topics a query for the newest may name, with whole envelopes or without."""
        return self.max_newest_full_topics if full else self.max_newest_metadata_topics


async def query_envelopes(
    database: Database, limits: QueryLimits, wanted: Sequence[tuple[bytes, int]], limit: int
) -> Page:
    """One page of the wanted (topic, cursor) pairs; a topic named twice is read from the lower cursor.

    The page is cut where the response would grow too long, which `has_more` then shows.

    Raises:
        StatusError: INVALID_ARGUMENT for too many topics, a topic or a cursor that cannot exist, or one of a kind that
            has only a newest value (key packages).
        StoreError: the database did not answer.
    """
    if len(wanted) > limits.max_query_topics:
        raise StatusError(Code.INVALID_ARGUMENT, "query exceeds topic limit")
    cursors: dict[bytes, int] = {}
    for topic, cursor in wanted:
        if topic_kind(topic) in (None, TopicKind.KEY_PACKAGE):
            raise StatusError(Code.INVALID_ARGUMENT, "topic is not valid")
        if cursor > MAX_SEQUENCE_ID:
            raise StatusError(Code.INVALID_ARGUMENT, "cursor is not valid")
        cursors[topic] = min(cursor, cursors.get(topic, cursor))
    if not cursors:
        return Page((), has_more=False)
    rows = min(limit or limits.default_query_limit, limits.max_query_limit)
    async with database.primary() as connection:
        return await load_envelopes_of_topics(
            connection, cursors, limit=rows, max_bytes=limits.max_response_bytes - (rows + 1) * META_BYTES
        )


async def query_newest(
    database: Database, limits: QueryLimits, topics: Sequence[bytes], *, with_payload: bool
) -> list[tuple[EnvelopeMeta, bytes | None]]:
    """The newest envelope of each topic that has one, in the order topics were first named.

    Raises:
        StatusError: INVALID_ARGUMENT for too many topics or one that cannot exist; OUT_OF_RANGE when the envelopes are
            too long together for one response.
        StoreError: the database did not answer.
    """
    if len(topics) > limits.max_newest_topics(full=with_payload):
        raise StatusError(Code.INVALID_ARGUMENT, "query exceeds topic limit")
    if any(topic_kind(topic) is None for topic in topics):
        raise StatusError(Code.INVALID_ARGUMENT, "topic is not valid")
    distinct = list(dict.fromkeys(topics))
    if not distinct:
        return []
    # The metadata and the topic beside it, of every result.
    max_bytes = limits.max_response_bytes - len(distinct) * 2 * META_BYTES if with_payload else None
    async with database.read() as connection:
        newest = await load_newest_envelopes(connection, distinct, max_bytes=max_bytes)
    if newest is None:
        raise StatusError(Code.OUT_OF_RANGE, "response is too large")
    return newest
