"""100,000 eligible rows nobody subscribed to, and what a poll costs when there is nothing to do.

Prints rows a second from the start of a term until the cursor has passed them all, and, for an idle dispatcher, the
statements and shared buffers of one poll interval, as PostgreSQL counts them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import psycopg
import trio
from psycopg.conninfo import make_conninfo

from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.stop import StopSignal
from pushd.store import embedded
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.telemetry import Metrics
from tests.bench.bench_fanout import migrate, rss_mib
from tests.dispatch.holder import NoBoundary
from tests.dispatch.seed import Seed, topic

ROWS = 100_000
BOUND = 50_000
IDLE_S = 5.0
POLL_S = 0.1


def fill(url: str) -> None:
    with Seed(url) as seed:
        seed.recipients(range(1_000))
        for number in range(100):
            seed.subscribe(range(1_000), topic(number))
        seed.envelopes((number, topic(1_000 + number % 5_000)) for number in range(1, ROWS + 1))
        seed.settle(ROWS)
        seed.conn.execute("VACUUM ANALYZE")


class Counters:
    """Statements and buffers of one database, as the server has counted them so far."""

    def __init__(self, seed: Seed) -> None:
        self._seed = seed

    def statements(self) -> int:
        return self._seed._one(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )

    def buffers(self) -> int:
        return self._seed._one("SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()")


async def dispatch(url: str, seed: Seed) -> dict[str, float]:
    stop, metrics, counters = StopSignal(), Metrics(), Counters(seed)
    async with open_database(DatabaseSettings(url), metrics) as database, trio.open_nursery() as nursery:
        began, cpu = time.perf_counter(), time.process_time()

        async def run() -> None:
            await run_dispatcher(
                DispatchStore(database),
                {},
                DispatchSettings(poll_interval_s=POLL_S),
                metrics=metrics,
                boundary=NoBoundary(),
                stop=stop,
            )

        nursery.start_soon(run)
        while seed.cursor() < ROWS:  # noqa: ASYNC110
            await trio.sleep(0.005)
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
        await trio.sleep(2.0)  # a session reports its counters at most once a second
        statements, buffers, idle_cpu = counters.statements(), counters.buffers(), time.process_time()
        await trio.sleep(IDLE_S)
        idle_cpu = time.process_time() - idle_cpu
        ticks = IDLE_S / POLL_S
        # The measuring statements themselves are in there: three statements, some catalogue buffers.
        result = {
            "rate": ROWS / elapsed,
            "cpu_us": cpu / ROWS * 1e6,
            "statements": (counters.statements() - statements - 3) / ticks,
            "buffers": (counters.buffers() - buffers) / ticks,
            "idle_cpu": idle_cpu / IDLE_S,
        }
        stop.request(trio.current_time() + 5)
    return result


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    server = embedded.start(folder, {"fsync": "off", "synchronous_commit": "off"})
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE DATABASE idle")
        url = make_conninfo(server.url, dbname="idle")
        trio.run(migrate, url)
        fill(url)
        with Seed(url) as seed:
            result = trio.run(dispatch, url, seed)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "name": "idle",
                "rate": round(result["rate"]),
                "bound": BOUND,
                "ratio_to_bound": round(result["rate"] / BOUND, 2),
                "cpu_us_per_item": round(result["cpu_us"], 2),
                "rss_mib": round(rss_mib()),
                "statements_per_tick": round(result["statements"], 2),
                "buffers_per_tick": round(result["buffers"], 1),
                "idle_cpu_share": round(result["idle_cpu"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
