"""1,024 rows × 1,000 subscribers through the whole dispatcher, with a channel that answers at once.

Prints deliveries a second, CPU a delivery in this process (the database is another one), memory growth, and how the
time of a page depends on its place in the window.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import tempfile
import time
from pathlib import Path

import psycopg
import trio
from psycopg.conninfo import make_conninfo

from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.model import Channel, Delivered, Delivery, Outcome
from pushd.stop import StopSignal
from pushd.store import embedded
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.store.migrations import apply_migrations
from pushd.telemetry import Metrics
from tests.dispatch.holder import NoBoundary
from tests.dispatch.seed import Seed, topic

ROWS = 1_024
SUBSCRIBERS = 1_000
CURSOR_EVERY = 1_000


class Counting:
    """A provider that takes everything; remembers when every thousandth delivery came."""

    def __init__(self, expected: int) -> None:
        self.count = 0
        self.expected = expected
        self.marks: list[float] = []
        self.done = trio.Event()

    async def attempt(self, delivery: Delivery) -> Outcome:
        self.count += 1
        if not self.count % CURSOR_EVERY:
            self.marks.append(time.perf_counter())
        if self.count == self.expected:
            self.done.set()
        return Delivered()


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


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


async def dispatch(url: str) -> dict[str, float]:
    provider = Counting(ROWS * SUBSCRIBERS)
    stop = StopSignal()
    metrics = Metrics()
    async with open_database(DatabaseSettings(url), metrics) as database, trio.open_nursery() as nursery:
        before_mib, began, cpu = rss_mib(), time.perf_counter(), time.process_time()

        async def run(database: Database) -> None:
            await run_dispatcher(
                DispatchStore(database),
                {Channel.APNS: provider},
                DispatchSettings(),
                metrics=metrics,
                boundary=NoBoundary(),
                stop=stop,
            )

        nursery.start_soon(run, database)
        await provider.done.wait()
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
        grown_mib = rss_mib() - before_mib
        stop.request(math.inf)
    spans = [later - earlier for earlier, later in zip(provider.marks, provider.marks[1:], strict=False)]
    tenth = len(spans) // 10
    return {
        "count": provider.count,
        "rate": provider.count / elapsed,
        "cpu_us": cpu / provider.count * 1e6,
        "grown_mib": grown_mib,
        "last_over_first": sorted(spans[-tenth:])[tenth // 2] / sorted(spans[:tenth])[tenth // 2],
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
        result = trio.run(dispatch, url)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "name": "fanout",
                "rate": round(result["rate"]),
                "bound": 60_000,
                "ratio_to_bound": round(result["rate"] / 60_000, 2),
                "cpu_us_per_item": round(result["cpu_us"], 1),
                "rss_mib": round(rss_mib()),
                "rss_growth_mib": round(result["grown_mib"]),
                "page_time_last_over_first": round(result["last_over_first"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
