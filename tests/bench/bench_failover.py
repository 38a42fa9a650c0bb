"""The holder is killed: how long until its successor makes its first attempt.

Both are processes of their own. Time runs from the kill to the successor's line about its first attempt, pipe and
scheduling included; the bound is two poll intervals and 200 ms.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path

import psycopg
import trio
from psycopg.conninfo import make_conninfo

from pushd.store import embedded
from tests.bench.bench_fanout import migrate, rss_mib
from tests.dispatch.holder_process import holder
from tests.dispatch.seed import Seed, eventually, topic

ROUNDS = 8
POLL_S = 0.1
BOUND_S = 2 * POLL_S + 0.2


async def measure(url: str) -> list[float]:
    """Seconds from each kill to the successor's first attempt."""
    found: list[float] = []
    with Seed(url) as seed:
        seed.recipients(range(500))
        seed.subscribe(range(500), topic(1))
        for round_ in range(1, ROUNDS + 1):
            seed.envelopes([(round_, topic(1))])
            seed.settle(round_)
            async with holder(url, attempt_s=5.0, poll_s=POLL_S) as first:
                await eventually(lambda first=first: len(first.began()) == 256)
                async with holder(url, attempt_s=0.0, poll_s=POLL_S) as second:
                    await trio.sleep(2 * POLL_S)
                    assert second.began() == []
                    first.process.kill()
                    killed = trio.current_time()
                    with trio.fail_after(10):
                        await second.first_attempt.wait()
                    found.append(trio.current_time() - killed)
                    await eventually(lambda round_=round_: seed.cursor() == round_)
    return found


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    server = embedded.start(folder, {"fsync": "off", "synchronous_commit": "off"})
    try:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE DATABASE failover")
        url = make_conninfo(server.url, dbname="failover")
        trio.run(migrate, url)
        seconds = trio.run(measure, url)
    finally:
        server.stop()
        shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "name": "failover",
                "rate": round(statistics.median(seconds), 3),
                "bound": BOUND_S,
                "ratio_to_bound": round(max(seconds) / BOUND_S, 2),
                "cpu_us_per_item": None,
                "rss_mib": round(rss_mib()),
                "worst_s": round(max(seconds), 3),
                "rounds": ROUNDS,
            }
        )
    )


if __name__ == "__main__":
    main()
