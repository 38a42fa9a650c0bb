"""1,024 rows × 1,000 subscribers out of PostgreSQL, with the sending faked away.

`rate` is the whole dispatcher with a channel that answers at once: nothing but the provider is missing. `loading_rate`
leaves the sender's tasks out too: every delivery is admitted, handed out, settled and counted at once, by the loader
itself. CPU is that of this process, the database is another one.

Page times are those of the loading run: from the question to a thousand deliveries in memory, without admitting them.
The memory a run needs beyond what was there before is looked at after every thousand deliveries.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import psycopg
import trio
from psycopg.conninfo import make_conninfo

from pushd.core.window import Page, PageRequest
from pushd.dispatch.sender import Sending
from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.model import PAGE_DELIVERIES, Channel, Delivered, Delivery, Outcome
from pushd.stop import StopSignal
from pushd.store import embedded
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.store.dispatch_pages import PageReader
from pushd.store.migrations import apply_migrations
from pushd.telemetry import Metrics
from tests.bench.measuring import line, peak_rss_mib, rss_mib
from tests.dispatch.holder import NoBoundary
from tests.dispatch.seed import Seed, topic

ROWS = 1_024
SUBSCRIBERS = 1_000
TARGET = {"rate": 60_000, "page_time_last_over_first": 1.5, "rss_growth_mib": 150}
DELIVERED = Delivered()


class Counting:
    """A provider that takes everything, and notes how much memory there is."""

    def __init__(self, expected: int) -> None:
        self.count = 0
        self.expected = expected
        self.peak_mib = 0.0
        self.done = trio.Event()

    def note(self) -> None:
        self.count += 1
        if not self.count % PAGE_DELIVERIES:
            self.peak_mib = max(self.peak_mib, rss_mib())
        if self.count == self.expected:
            self.done.set()

    async def attempt(self, delivery: Delivery) -> Outcome:
        self.note()
        return DELIVERED


class PageTimes:
    """In place of `PageReader.read`: how long each page took, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Measure every page read inside the block."""
        read = PageReader.read

        async def timed(reader: PageReader, request: PageRequest, rows: int) -> Page:
            began = time.perf_counter()
            page = await read(reader, request, rows)
            if page.is_full:
                self.seconds.append(time.perf_counter() - began)
            return page

        with mock.patch.object(PageReader, "read", timed):
            yield

    @property
    def tenths(self) -> tuple[float, float]:
        """The median of the first tenth of the pages, and that of the last."""
        tenth = len(self.seconds) // 10
        return statistics.median(self.seconds[:tenth]), statistics.median(self.seconds[-tenth:])


async def migrate(url: str) -> None:
    async with open_database(DatabaseSettings(url), Metrics()) as database:
        async with database.dedicated("migrate") as connection:
            await apply_migrations(connection)


def fill(url: str, *, others: bool = True) -> None:
    """One window of a million deliveries, among 800,000 other subscriptions unless told otherwise."""
    with Seed(url) as seed:
        seed.recipients(range(20_000))
        for number in range(2, 1_000 if others else 2):
            seed.subscribe(range(number % 25, 20_000, 25), topic(number))
        seed.subscribe(range(0, 20 * SUBSCRIBERS, 20), topic(1))
        seed.envelopes((number, topic(1)) for number in range(1, ROWS + 1))
        seed.settle(ROWS)
        seed.conn.execute("VACUUM ANALYZE")


def send_at_once(sending: Sending, provider: Counting) -> None:
    """In place of `Sending.kick`: what waits is delivered before the loader goes on."""
    for channel in Channel:
        while (work := sending._retained.take(channel)) is not None:
            result = sending._retained.settle(work, DELIVERED, 0.0, 0.0)
            assert result is not None
            sending._tally.count(channel, result)
            provider.note()


async def dispatch(url: str, *, with_tasks: bool = True) -> dict[str, float]:
    """Send everything above the cursor of a filled database, and start again from 0 next time."""
    provider, pages = Counting(ROWS * SUBSCRIBERS), PageTimes()
    stop = StopSignal()
    metrics = Metrics()
    kick = Sending.kick if with_tasks else lambda sending: send_at_once(sending, provider)
    with mock.patch.object(Sending, "kick", kick), pages.taken():
        async with open_database(DatabaseSettings(url), metrics) as database, trio.open_nursery() as nursery:
            before_mib, began, cpu = rss_mib(), time.perf_counter(), time.process_time()

            async def run() -> None:
                await run_dispatcher(
                    DispatchStore(database),
                    {Channel.APNS: provider},
                    DispatchSettings(),
                    metrics=metrics,
                    boundary=NoBoundary(),
                    stop=stop,
                )

            nursery.start_soon(run)
            await provider.done.wait()
            elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
            stop.request(math.inf)
    first, last = pages.tenths
    return {
        "count": provider.count,
        "rate": provider.count / elapsed,
        "cpu_us": cpu / provider.count * 1e6,
        "grown_mib": provider.peak_mib - before_mib,
        "page_s": statistics.median(pages.seconds),
        "page_s_max": max(pages.seconds),
        "last_over_first": last / first,
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    server = embedded.start(folder, {"fsync": "off", "synchronous_commit": "off"})
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE DATABASE fanout")
        url = make_conninfo(server.url, dbname="fanout")
        trio.run(migrate, url)
        fill(url)
        loading = trio.run(partial(dispatch, url, with_tasks=False))
        with Seed(url) as seed:
            seed.conn.execute("UPDATE push_cursor SET sequence_id = 0")
        whole = trio.run(dispatch, url)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(
        line(
            "fanout",
            rate=whole["rate"],
            cpu_us_per_item=whole["cpu_us"],
            rss_mib=peak_rss_mib(),
            target=TARGET,
            rss_growth_mib=round(max(loading["grown_mib"], whole["grown_mib"]), 1),
            loading_rate=round(loading["rate"]),
            loading_cpu_us_per_item=round(loading["cpu_us"], 1),
            page_ms_median=round(loading["page_s"] * 1e3, 2),
            page_ms_max=round(loading["page_s_max"] * 1e3, 2),
            page_time_last_over_first=round(loading["last_over_first"], 2),
        )
    )


if __name__ == "__main__":
    main()
