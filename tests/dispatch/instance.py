"""A dispatcher in this process, on a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from pushd.dispatch.sender import ChannelSender
from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.model import Channel
from pushd.stop import StopSignal
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.telemetry import Metrics
from tests.dispatch.memory import ManualBoundary

POLL_S = 0.05


class Instance:
    """A dispatcher in this process."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.stop = StopSignal()
        self.finished = trio.Event()
        self.boundary = ManualBoundary()

    @property
    def holds(self) -> bool:
        return self.metrics.push_dispatcher._value.get() == 1

    def count(self, channel: Channel, outcome: str) -> int:
        return int(self.metrics.push_deliveries.labels(channel.label, outcome)._value.get())

    async def stopped(self, grace_s: float) -> None:
        self.stop.request(trio.current_time() + grace_s)
        with trio.fail_after(30):
            await self.finished.wait()


@asynccontextmanager
async def instance(
    url: str,
    senders: ChannelSender | Mapping[Channel, ChannelSender],
    *,
    replica_url: str | None = None,
    max_attempts: int = 3,
) -> AsyncIterator[Instance]:
    """A running dispatcher, with one sender a channel or one for all; cancelled at the end if it still runs."""
    by_channel = senders if isinstance(senders, Mapping) else dict.fromkeys(Channel, senders)
    started = Instance()
    settings = DatabaseSettings(url, replica_url)
    async with open_database(settings, started.metrics) as database, trio.open_nursery() as nursery:

        async def run() -> None:
            await run_dispatcher(
                DispatchStore(database),
                by_channel,
                DispatchSettings(poll_interval_s=POLL_S, max_attempts=max_attempts),
                metrics=started.metrics,
                boundary=started.boundary,
                stop=started.stop,
            )
            started.finished.set()

        nursery.start_soon(run)
        yield started
        nursery.cancel_scope.cancel()
