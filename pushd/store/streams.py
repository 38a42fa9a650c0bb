"""What streams read: heads of topics, and pages of what they have not handed over yet."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pushd.core.interest import TURN_ROWS
from pushd.core.outbound import ENVELOPE_OVERHEAD_BYTES, FRAME_BYTES
from pushd.model import StoredEnvelope
from pushd.store.database import Database
from pushd.store.envelopes import stored_envelope
from pushd.store.queries import query


@frozen
class StreamPage:
    """What one turn found: (place in the turn, envelope), ascending.

    `is_cut` when the page was full before the turn was done: the last place may lack some, those behind it have none.
    """

    envelopes: Sequence[tuple[int, StoredEnvelope]]
    is_cut: bool


class StreamStore:
    """Reads of streams, on the replica where there is one; raises StoreError.

    Args:
        database: where to read.
        frame_bytes: of a page, encoded.
    """

    def __init__(self, database: Database, frame_bytes: int = FRAME_BYTES) -> None:
        self._database = database
        self._frame_bytes = frame_bytes

    async def load_heads(self, topics: Sequence[bytes]) -> list[int]:
        """The newest id of each topic, 0 for an empty one."""
        async with self._database.read() as connection:
            rows = await connection.fetch(query("load_topic_heads"), {"topics": list(topics)}, binary=True)
        return [head for (head,) in rows]

    async def load_page(self, topics: Sequence[bytes], cursors: Sequence[int]) -> StreamPage:
        """The first TURN_ROWS envelopes of each topic above its cursor, frame_bytes in all, but at least one."""
        async with self._database.read() as connection:
            rows = await connection.fetch(
                query("load_stream_page"),
                {
                    "topics": list(topics),
                    "cursors": list(cursors),
                    "topic_rows": TURN_ROWS,
                    "overhead_bytes": ENVELOPE_OVERHEAD_BYTES,
                    "max_bytes": self._frame_bytes,
                },
                binary=True,
            )
        found = [(place - 1, stored_envelope(columns)) for place, *columns, _ in rows]
        return StreamPage(found, is_cut=bool(rows) and len(rows) < rows[0][-1])
