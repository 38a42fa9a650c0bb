"""1,024 rows × 1,000 subscribers out of PostgreSQL, with the sending faked away.

`rate` is loading alone: every delivery is admitted, handed out, settled and counted, by no task and at once.
`attempts_rate` is the same window through the sender's tasks as well, with a channel that answers at once. CPU is that
of this process, the database is another one. The page time is that of loading, at the end of the window against its
start.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import psycopg
import trio
from psycopg.conninfo import make_conninfo

from pushd.dispatch.sender import Sending
from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.model import PAGE_DELIVERIES, Channel, Delivered, Delivery, Outcome
from pushd.stop import StopSignal
from pushd.store import embedded
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.store.migrations import apply_migrations
from pushd.telemetry import Metrics
from tests.dispatch.holder import NoBoundary
from tests.dispatch.seed import Seed, topic

ROWS = 1_024
SUBSCRIBERS = 1_000
BOUND = 60_000
DELIVERED = Delivered()


class Counting:
    """A provider that takes everything; remembers when every thousandth delivery came."""

    def __init__(self, expected: int) -> None:
        self.count = 0
        self.expected = expected
        self.marks: list[float] = []
        self.done = trio.Event()

    def note(self) -> None:
        self.count += 1
        if not self.count % PAGE_DELIVERIES:
            self.marks.append(time.perf_counter())
        if self.count == self.expected:
            self.done.set()

    async def attempt(self, delivery: Delivery) -> Outcome:
        self.note()
        return DELIVERED


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
    provider = Counting(ROWS * SUBSCRIBERS)
    stop = StopSignal()
    metrics = Metrics()
    kick = Sending.kick if with_tasks else lambda sending: send_at_once(sending, provider)
    with mock.patch.object(Sending, "kick", kick):
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
        loading = trio.run(partial(dispatch, url, with_tasks=False))
        with Seed(url) as seed:
            seed.conn.execute("UPDATE push_cursor SET sequence_id = 0")
        attempts = trio.run(dispatch, url)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "name": "fanout",
                "rate": round(loading["rate"]),
                "bound": BOUND,
                "ratio_to_bound": round(loading["rate"] / BOUND, 2),
                "cpu_us_per_item": round(loading["cpu_us"], 1),
                "rss_mib": round(rss_mib()),
                "rss_growth_mib": round(max(loading["grown_mib"], attempts["grown_mib"])),
                "page_time_last_over_first": round(loading["last_over_first"], 2),
                "attempts_rate": round(attempts["rate"]),
                "attempts_cpu_us_per_item": round(attempts["cpu_us"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
