"""Reads the cursor from outside, all the time."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import trio

from tests.faults.ledger import Sample

_PAUSE_S = 0.05


class CursorWatch:
    """Takes samples over a session of its own, past every proxy, whenever the database answers."""

    def __init__(self, url: str) -> None:
        self.samples: list[Sample] = []
        self._url = url
        self._session: psycopg.Connection[Any] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                # Not abandoned: a session that a thread still uses cannot be closed.
                await trio.to_thread.run_sync(self._sample)
                await trio.sleep(_PAUSE_S)
        finally:
            self._close()

    def _sample(self) -> None:
        try:
            if self._session is None:
                self._session = psycopg.connect(
                    self._url, autocommit=True, connect_timeout=5, options="-c statement_timeout=5s"
                )
            asked_s = time.time()
            row = self._session.execute("SELECT sequence_id FROM push_cursor").fetchone()
            if row is not None:
                self.samples.append(Sample(int(row[0]), asked_s, time.time()))
        except psycopg.Error:
            self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
