"""Query: the envelopes of one or more topics in sequence order, read from the primary so that writers see their own."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pushd.core.topics import topic_kind
from pushd.errors import Code, StatusError
from pushd.model import TopicKind
from pushd.store.database import Database
from pushd.store.envelopes import Page, load_envelopes_of_topics

MAX_SEQUENCE_ID = 2**63 - 1
META_BYTES = 256  # more than the encoded EnvelopeMeta and framing of one envelope


@frozen
class QueryLimits:
    """Bounds of one query; `default_query_limit` is taken when the caller names no limit."""

    max_query_topics: int = 1_000
    default_query_limit: int = 100
    max_query_limit: int = 1_000
    max_response_bytes: int = 26_214_400


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
