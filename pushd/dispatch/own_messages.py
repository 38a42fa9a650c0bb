"""Finds the deliveries of a page that would tell a sender of its own message (PUSH-044).

Payloads come in one statement a page, in chunks of at most 8 MiB held. A row whose recipients reach over two pages is
hashed from the bytes the first page loaded, even when the row is gone by then: of all payloads only the last one is
kept. Verdicts are remembered by key, as all installations of one inbox share theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from pushd.core.suppression import HmacCheck, message_data, own_keys

CHUNK_BYTES = 8 * 1024 * 1024
THREAD_BYTES = 64 * 1024  # hashing more than this takes longer than handing it to a thread (about 0.1 ms)
REMEMBERED_KEYS = 10_000


class PayloadReader(Protocol):
    """What this module needs of the page reader."""

    async def payloads(self, sequence_ids: Sequence[int], budget_bytes: int) -> list[tuple[int, bytes]]: ...


class OwnMessages:
    """Judges the checks of one page after the other."""

    def __init__(self) -> None:
        self._row = -1
        self._data: bytes | None = None
        self._verdicts: dict[bytes, bool] = {}

    def __repr__(self) -> str:
        return f"<OwnMessages held={0 if self._data is None else len(self._data)}>"

    async def find(self, checks: Sequence[HmacCheck], reader: PayloadReader) -> set[int]:
        """Places, in their page, of the deliveries that are not to be sent. Raises StoreError."""
        rows: dict[int, list[HmacCheck]] = {}
        for check in checks:
            rows.setdefault(check.sequence_id, []).append(check)
        own: set[int] = set()
        if self._row in rows:
            own |= await self._judge(rows.pop(self._row))
        missing = list(rows)
        while missing:
            found = await reader.payloads(missing, CHUNK_BYTES)
            for row, payload in found:
                self._row, self._data, self._verdicts = row, message_data(payload), {}
                own |= await self._judge(rows[row])
            # None found: all of them are gone, and what cannot be checked is sent.
            missing = [row for row in missing if row > self._row] if found else []
        return own

    async def _judge(self, checks: Sequence[HmacCheck]) -> set[int]:
        if self._data is None:
            return set()
        unknown = {check.key for check in checks} - self._verdicts.keys()
        if unknown:
            if len(self._verdicts) > REMEMBERED_KEYS:
                self._verdicts.clear()
                unknown = {check.key for check in checks}
            if len(self._data) * len(unknown) > THREAD_BYTES:
                equal = await trio.to_thread.run_sync(
                    own_keys, self._data, unknown, checks[0].sender_hmac, abandon_on_cancel=True
                )
            else:
                equal = own_keys(self._data, unknown, checks[0].sender_hmac)
            self._verdicts.update((key, key in equal) for key in unknown)
        return {check.place for check in checks if self._verdicts[check.key]}
