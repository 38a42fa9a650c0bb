"""Which changes of a stream's topics are allowed."""

from __future__ import annotations

from collections.abc import Container, Sequence

from attrs import field, frozen

from pushd.core.topics import topic_kind
from pushd.model import MAX_SEQUENCE_ID

UPDATE_INVALID = "update is not valid"
TOPIC_LIMIT = "stream exceeds topic limit"
NO_TOPICS = "stream names no topic"
TOPIC_INVALID = "topic is not valid"
TOPIC_REPEATED = "topic is repeated"
CURSOR_INVALID = "cursor is not valid"


@frozen
class UpdateLimits:
    """Bounds of one update, and of the topics of one stream of either kind."""

    max_update_adds: int = 100_000
    max_update_removes: int = 100_000
    max_stream_topics: int = 100_000
    max_static_topics: int = 10_000


@frozen
class Wanted:
    """A topic to follow from above a cursor."""

    topic: bytes = field(repr=False)
    cursor: int


@frozen
class Update:
    """One change: `update_id` is the caller's, greater than the one before."""

    update_id: int
    adds: Sequence[Wanted] = field(repr=False)
    removes: Sequence[bytes] = field(repr=False)


def refuse_update(
    update: Update, last_update_id: int, followed: Container[bytes], followed_count: int, limits: UpdateLimits
) -> str | None:
    """Why an update is invalid, or None.

    Args:
        last_update_id: of the update before, 0 for none.
        followed: the stream's topics, `followed_count` of them.
    """
    if update.update_id <= last_update_id:
        return UPDATE_INVALID
    if len(update.adds) > limits.max_update_adds or len(update.removes) > limits.max_update_removes:
        return TOPIC_LIMIT
    topics = [wanted.topic for wanted in update.adds]
    refusal = _refuse_topics([*topics, *update.removes]) or _refuse_cursors(update.adds)
    if refusal is not None:
        return refusal
    added = sum(topic not in followed for topic in topics)
    removed = sum(topic in followed for topic in update.removes)
    # Only what grows the stream can be too much: it could not have come above the limit otherwise.
    return TOPIC_LIMIT if followed_count + added - removed > limits.max_stream_topics else None


def refuse_static(topics: Sequence[Wanted], limits: UpdateLimits) -> str | None:
    """Why the topics of a static stream are invalid, or None."""
    if not topics:
        return NO_TOPICS
    if len(topics) > limits.max_static_topics:
        return TOPIC_LIMIT
    return _refuse_topics([wanted.topic for wanted in topics]) or _refuse_cursors(topics)


def _refuse_topics(topics: Sequence[bytes]) -> str | None:
    if any(topic_kind(topic) is None for topic in topics):
        return TOPIC_INVALID
    return TOPIC_REPEATED if len(set(topics)) < len(topics) else None


def _refuse_cursors(wanted: Sequence[Wanted]) -> str | None:
    return CURSOR_INVALID if any(one.cursor > MAX_SEQUENCE_ID for one in wanted) else None
