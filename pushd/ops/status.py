"""Is it alive, is it ready, how is it doing? The pages of the operators' listener."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping
from functools import partial

import trio
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pushd import __version__
from pushd.errors import StoreError
from pushd.model import Channel
from pushd.ops.history import STEP_S, History, read, totals, value
from pushd.ops.http import Handler, Page
from pushd.ops.page import View, render
from pushd.ops.progress import DATABASE_S, Progress
from pushd.store.database import Database
from pushd.telemetry import Metrics


class Status:
    """What probes, scrapers and people ask. An instance that stands by is as ready as the one that dispatches.

    Args:
        database: whose answer decides readiness, and which knows the holder and the cursor.
        metrics: this instance's.
        channels: the configured ones.
    """

    def __init__(self, database: Database, metrics: Metrics, channels: Collection[Channel]) -> None:
        self._database = database
        self._metrics = metrics
        self._channels = frozenset(channel.label for channel in channels)
        self._progress = Progress(database, metrics)
        self._started_at = trio.current_time()
        self._history = History(read(metrics, self._started_at))
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether calls are taken: false before the start is complete and during a drain."""
        return self._is_ready

    @is_ready.setter
    def is_ready(self, value: bool) -> None:
        self._is_ready = value
        self._metrics.ready.set(value)

    async def run(self) -> None:
        """Remember the counters every ten seconds. Never returns."""
        while True:
            await trio.sleep(STEP_S)
            self._history.add(read(self._metrics, trio.current_time()))

    def pages(self) -> Mapping[str, Handler]:
        """The paths of the listener."""
        return {
            "/": partial(self._overview, refreshes=True),
            "/still": partial(self._overview, refreshes=False),
            "/metrics": self._measures,
            "/healthz": self._alive,
            "/readyz": self._ready,
        }

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

    async def _measures(self) -> Page:
        await self._progress.refresh()
        return Page(generate_latest(self._metrics.registry), CONTENT_TYPE_LATEST)

    async def _overview(self, *, refreshes: bool) -> Page:
        await self._progress.refresh()
        now, metrics = trio.current_time(), self._metrics
        in_flight = {label: int(count) for (label,), count in totals(metrics.push_in_flight).items()}
        view = View(
            name=f"{socket.gethostname()}:{os.getpid()}",
            version=__version__,
            uptime_s=now - self._started_at,
            is_ready=self._is_ready,
            holds=bool(value(metrics.push_dispatcher)),
            progress=self._progress.status,
            recent=self._history.until(read(metrics, now)),
            channels=self._channels,
            in_flight=in_flight,
            retained=int(value(metrics.push_retained)),
            connections=int(value(metrics.grpc_connections)),
            streams=int(value(metrics.stream_sessions)),
            wall_s=time.time(),
        )
        return Page(render(view, refreshes=refreshes).encode(), "text/html; charset=utf-8")
