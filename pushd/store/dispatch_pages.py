"""Windows of the envelope log, joined with who wants to be told, in pages (PUSH-041).

This is the hot loop of loading: a page is a thousand rows, and a row has to become a delivery in about two
microseconds. So a recipient's configuration is built once and shared by all deliveries that use it, and a row's topic
once for all its recipients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.types.numeric import Int8

from pushd.core.suppression import HmacCheck, key_in_window
from pushd.core.window import Page, PageRequest
from pushd.errors import StoreInvariant
from pushd.model import PAGE_DELIVERIES, Channel, Delivery, DeliveryConfig
from pushd.store.database import Connection
from pushd.store.queries import query

SHARED_CONFIGS = 10_000  # configurations remembered for sharing, as many as deliveries are retained

# The plan must walk, never sort or hash the join, whatever the statistics say: with none at all (a fresh database) the
# planner prefers a bitmap of the whole backlog. Compilation and planning cost more than a page takes to run.
_SESSION = """
SET plan_cache_mode = force_generic_plan;
SET enable_bitmapscan = off;
SET enable_seqscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET max_parallel_workers_per_gather = 0;
SET jit = off
"""

_Row = tuple[Any, ...]


async def open_page_reader(connection: Connection) -> PageReader:
    """Prepare a session of its own for reading pages. Raises StoreError."""
    for statement in _SESSION.split(";"):
        await connection.execute(statement)
    connection.raw.prepare_threshold = 0  # prepare at first use
    return PageReader(connection)


class PageReader:
    """Reads pages and payloads on one session, so that both come from the same replica. Not for two tasks at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._configs: dict[_Row, tuple[bytes, DeliveryConfig, bytes]] = {}

    async def read(self, request: PageRequest, rows: int) -> Page:
        """One page of deliveries.

        Args:
            request: which page.
            rows: most rows of a window; the same for all pages of one window.

        Raises:
            StoreTimeout: the page took too long; a window of fewer rows may not.
            StoreError: the database failed.
        """
        if request.resume is None:
            found = await self._connection.fetch(
                query("load_window_page"),
                {"floor": Int8(request.floor), "rows": Int8(rows), "page": Int8(PAGE_DELIVERIES)},
                binary=True,
            )
            header, skip = found[0][:3] if found else (), 3
        else:
            resume_row, resume_recipient = request.resume
            found = await self._connection.fetch(
                query("load_window_next_page"),
                {
                    "resume_row": Int8(resume_row),
                    "resume_recipient": resume_recipient,
                    "last": Int8(request.last or 0),
                    "rows": Int8(rows),
                    "page": Int8(PAGE_DELIVERIES),
                },
                binary=True,
            )
            header, skip = (*found[0][:1], None, None) if found else (), 1
        if not header:
            raise StoreInvariant  # the boundary's only row is missing
        boundary, first, last = header
        if found[0][skip] is None:
            return Page(boundary, first, last, [], [], is_full=False)
        deliveries, checks = self._build(found, skip)
        return Page(boundary, first, last, deliveries, checks, is_full=len(deliveries) == PAGE_DELIVERIES)

    async def payloads(self, sequence_ids: Sequence[int], budget_bytes: int) -> list[tuple[int, bytes]]:
        """Stored bytes of the first of these rows that still exist, up to the budget but at least one.

        Raises:
            StoreError: the database failed.
        """
        rows = await self._connection.fetch(
            query("load_payloads"),
            {"sequence_ids": [Int8(number) for number in sequence_ids], "budget_bytes": Int8(budget_bytes)},
            binary=True,
        )
        return [(row[0], row[1]) for row in rows]

    def _build(self, rows: list[_Row], skip: int) -> tuple[list[Delivery], list[HmacCheck]]:
        configs = self._configs
        if len(configs) > SHARED_CONFIGS:
            configs.clear()
        deliveries: list[Delivery] = []
        checks: list[HmacCheck] = []
        append = deliveries.append
        # Columns: row, recipient, channel, delivery, signing key, secret hash, topic, server_ns, sender_hmac, epoch
        # base, three keys. Recipient to secret hash is what the shared part is known by.
        identity = slice(skip + 1, skip + 6)
        topic_at, hmac_at, base_at = skip + 6, skip + 8, skip + 9
        sequence_id, topic = -1, b""
        for row in rows:
            shared = configs.get(row[identity])
            if shared is None:
                shared = configs[row[identity]] = _share(*row[identity])
            if row[skip] != sequence_id:
                sequence_id, topic = row[skip], row[topic_at]
            recipient_id, config, secret_hash = shared
            append(Delivery(sequence_id, topic, recipient_id, config, secret_hash, row[topic_at + 1]))
            if row[hmac_at] is not None:
                key = key_in_window(row[topic_at + 1], row[base_at], row[base_at + 1 :])
                if key is not None:
                    checks.append(HmacCheck(len(deliveries) - 1, sequence_id, key, row[hmac_at]))
        return deliveries, checks


def _share(
    recipient_id: bytes, channel: int, target: str, signing_key: bytes | None, secret_hash: bytes
) -> tuple[bytes, DeliveryConfig, bytes]:
    return recipient_id, DeliveryConfig(Channel(channel), target, signing_key), secret_hash
