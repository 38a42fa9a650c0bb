"""100,000 eligible rows nobody subscribed to, and what a poll interval of an idle server costs.

`rate` is rows a second from the start of a term until the cursor has passed them all, of a dispatcher in this process.
Then a whole `pushd serve` takes over, holds the lock and serves nobody: the rest of the line is about that process. Its
statements are counted in PostgreSQL's log, its buffers in `pg_stat_database`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import psycopg
import trio

from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.stop import StopSignal
from pushd.store import embedded
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.telemetry import Metrics
from tests.bench.bench_fanout import migrate
from tests.bench.measuring import LOG_STATEMENTS, StatementLog, cpu_s, line, peak_rss_mib
from tests.dispatch.holder import NoBoundary
from tests.dispatch.seed import Seed, topic
from tests.support.server import base_config, running_server

ROWS = 100_000
TARGET = {"rate": 50_000, "statements_per_tick": 4, "buffers_per_tick": 32, "rss_mib": 120}
SETTLE_S = 3.0  # a new server does this and that once; a session reports its counters at most once a second
IDLE_S = 10.0
POLL_S = 0.1


def fill(url: str) -> None:
    with Seed(url) as seed:
        seed.recipients(range(1_000))
        for number in range(100):
            seed.subscribe(range(1_000), topic(number))
        seed.envelopes((number, topic(1_000 + number % 5_000)) for number in range(1, ROWS + 1))
        seed.settle(ROWS)
        seed.conn.execute("SELECT setval('envelope_sequence', %s)", (ROWS,))  # or the boundary contradicts it
        seed.conn.execute("VACUUM ANALYZE")


async def pass_over(url: str, seed: Seed) -> tuple[float, float]:
    """Rows a second, and microseconds of processor time a row."""
    stop, metrics = StopSignal(), Metrics()
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
        stop.request(trio.current_time() + 5)
    return ROWS / elapsed, cpu / ROWS * 1e6


def buffers(seed: Seed) -> int:
    """Of this database so far."""
    return seed._one("SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()")


async def be_idle(url: str, seed: Seed, folder: Path) -> dict[str, float]:
    """What a server that holds the lock and serves nobody costs."""
    config = base_config(database={"url": url}, push={"http": {"allow_private_addresses": True}})
    async with running_server(folder / "server", config) as server:
        pid = server.process.pid
        await server.wait_event("term_started")
        await trio.sleep(SETTLE_S)
        log, before, cpu, began = StatementLog(folder), buffers(seed), cpu_s(pid), time.perf_counter()
        await trio.sleep(IDLE_S)
        statements, after, cpu = log.count(), buffers(seed), cpu_s(pid) - cpu
        elapsed, peak_mib = time.perf_counter() - began, peak_rss_mib(pid)
        server.process.terminate()
        await server.wait_exit()
        ticks = elapsed / POLL_S
        return {
            "rss_mib": peak_mib,
            "statements": (statements - 1) / ticks,  # the one that asked for the buffers is not the server's
            "buffers": (after - before) / ticks,
            "cpu": cpu / elapsed,
        }


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    # The autovacuum's buffers are not the server's.
    server = embedded.start(
        folder, {"fsync": "off", "synchronous_commit": "off", "autovacuum": "off", **LOG_STATEMENTS}
    )
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE DATABASE idle")
        url = server.url.replace("///postgres?", "///idle?")
        trio.run(migrate, url)
        fill(url)
        with Seed(url) as seed:
            rate, cpu_us = trio.run(pass_over, url, seed)
            idle = trio.run(be_idle, url, seed, folder)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(
        line(
            "idle",
            rate=rate,
            cpu_us_per_item=cpu_us,
            rss_mib=idle["rss_mib"],
            target=TARGET,
            statements_per_tick=round(idle["statements"], 2),
            buffers_per_tick=round(idle["buffers"], 1),
            idle_cpu_share=round(idle["cpu"], 4),
        )
    )


if __name__ == "__main__":
    main()
