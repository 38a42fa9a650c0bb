"""Is it alive, is it ready? The pages of the operators' listener."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from pushd.errors import StoreError
from pushd.ops.http import Handler, Page, metrics_page
from pushd.store.database import Database
from pushd.telemetry import Metrics

DATABASE_S = 2.0  # a probe's own limit is rarely more than a few seconds


class Status:
    """What probes ask. An instance that does not hold the dispatcher lock is as ready as the one that does."""

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether calls are taken: false before the start is complete and during a drain."""
        return self._is_ready

    @is_ready.setter
    def is_ready(self, value: bool) -> None:
        self._is_ready = value
        self._metrics.ready.set(value)

    def pages(self) -> Mapping[str, Handler]:
        """The paths of the listener."""
        return {"/metrics": metrics_page(self._metrics), "/healthz": self._alive, "/readyz": self._ready}

    async def _alive(self) -> Page:
        return Page(b"alive\n")

    async def _ready(self) -> Page:
        if not self._is_ready:
            return Page(b"not ready: starting or stopping\n", status=503)
        with trio.move_on_after(DATABASE_S):
            try:
                async with self._database.primary() as connection:
                    await connection.fetch_one("SELECT 1")
                return Page(b"ready\n")
            except StoreError:
                pass
        return Page(b"not ready: the database does not answer\n", status=503)
