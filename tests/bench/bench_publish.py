"""Publishing to an embedded PostgreSQL with durable commits.

In one run: single-envelope publishes with 32 in flight and batches of 100 with 4 in flight, without the wire and then
over gRPC between processes, which is the line's `rate`. The closed boundary's lag is the time from the answer to a
publish until the boundary has passed it, once with 32 in flight (`boundary_lag_…`) and once behind a publisher that
waits for it each time (`unhurried_lag_…`). `python -m tests.bench.bench_publish`
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from pushd.backend.boundary import BoundaryTask
from pushd.backend.publish import Publisher, PublishSettings
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishRequest
from pushd.rpc.services.publish import PublishService
from pushd.store import embedded
from pushd.store.boundary import advance_boundary
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.migrations import apply_migrations
from pushd.telemetry import Metrics, configure_logging
from tests.bench.calls import Load, bench_server, run_load
from tests.bench.measuring import line, peak_rss_mib
from tests.support.envelopes import group_envelope

POLL_S = 0.1
GROUPS = 5_000
BODY_BYTES = 512
LAG_EVERY = 50  # of the envelopes


def make_requests(count: int, envelopes: int) -> list[bytes]:
    """Encoded requests of fresh application messages, spread over GROUPS groups."""
    return [
        PublishRequest(
            envelopes=[
                group_envelope(
                    ((n * envelopes + m) % GROUPS).to_bytes(16, "big"),
                    sender_hmac=b"h" * 32,
                    body=os.urandom(BODY_BYTES),
                )
                for m in range(envelopes)
            ]
        ).SerializeToString()
        for n in range(count)
    ]


async def run_in_flight(call: Callable[[bytes], Awaitable[None]], requests: list[bytes], in_flight: int) -> float:
    """Seconds to make all calls, `in_flight` at a time."""
    waiting = iter(requests)

    async def worker() -> None:
        for request in waiting:
            await call(request)

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(worker)
    return time.perf_counter() - started


async def measure(url: str, singles: int, batches: int) -> dict[str, float]:
    metrics = Metrics()
    async with open_database(DatabaseSettings(url), metrics) as database, trio.open_nursery() as nursery:
        async with database.dedicated("migrate") as connection:
            await apply_migrations(connection)

        async def advance() -> int | None:
            async with database.primary() as connection:
                return await advance_boundary(connection, 1_000)

        boundary = BoundaryTask(advance, poll_interval_s=POLL_S, metrics=metrics)
        await nursery.start(boundary.run)
        service = PublishService(Publisher(database, PublishSettings(), boundary.request, metrics))

        lags: list[float] = []

        async def follow(sequence_id: int, began: float) -> None:
            await boundary.wait_above(sequence_id - 1)
            lags.append((trio.current_time() - began) / POLL_S)

        async def publish(encoded: bytes) -> None:
            response = await service.Publish(PublishRequest.FromString(encoded))
            response.SerializeToString()
            sequence_id = response.envelope_metas[0].cursor.sequence_id
            if len(response.envelope_metas) == 1 and sequence_id % LAG_EVERY == 0:
                nursery.start_soon(follow, sequence_id, trio.current_time())

        await run_in_flight(publish, make_requests(200, 1), 32)  # warm up
        await trio.sleep(10 * POLL_S)
        lags.clear()
        requests = make_requests(singles, 1)
        cpu = time.process_time()
        single_s = await run_in_flight(publish, requests, 32)
        own_cpu_s = time.process_time() - cpu
        await trio.sleep(10 * POLL_S)
        loaded = sorted(lags)
        requests = make_requests(batches, 100)
        batch_cpu = time.process_time()
        batch_s = await run_in_flight(publish, requests, 4)
        batch_cpu_s = time.process_time() - batch_cpu

        unhurried = []
        for encoded in make_requests(30, 1):
            response = await service.Publish(PublishRequest.FromString(encoded))
            started = trio.current_time()
            await boundary.wait_above(response.envelope_metas[0].cursor.sequence_id - 1)
            unhurried.append((trio.current_time() - started) / POLL_S)
            await trio.sleep(0.013)
        nursery.cancel_scope.cancel(reason="measured")

    return {
        "direct_rate": round(singles / single_s),
        "direct_cpu_us_per_item": round(own_cpu_s / singles * 1e6),
        "direct_batch_envelopes_rate": round(batches * 100 / batch_s),
        "direct_batch_cpu_us_per_envelope": round(batch_cpu_s / batches / 100 * 1e6, 1),
        "boundary_lag_p50_intervals": round(statistics.median(loaded), 3),
        "boundary_lag_max_intervals": round(loaded[-1], 3),
        "unhurried_lag_p50_intervals": round(statistics.median(unhurried), 3),
        "unhurried_lag_max_intervals": round(max(unhurried), 3),
    }


async def measure_grpc(folder: Path, singles: int, batches: int, direct: dict[str, float]) -> str:
    async def load(count: int, envelopes: int, in_flight: int) -> Load:
        requests = [PublishRequest.FromString(encoded) for encoded in make_requests(count, envelopes)]
        return await run_load(
            server, "Publish", requests, in_flight, folder, service="/xmtp.backend.v1.PublishService/"
        )

    async with bench_server(folder) as server:
        await load(200, 1, 32)  # warm up
        single = await load(singles, 1, 32)
        batch = await load(batches, 100, 4)
        peak = peak_rss_mib(server.process.pid)
    return line(
        "publish",
        rate=singles / single.seconds,
        cpu_us_per_item=single.server_cpu_s / singles * 1e6,
        rss_mib=peak,
        target={"rate": 1_000, "batch_envelopes_rate": 10_000, "boundary_lag_max_intervals": 2},
        batch_envelopes_rate=round(batches * 100 / batch.seconds),
        batch_cpu_us_per_envelope=round(batch.server_cpu_s / batches / 100 * 1e6, 1),
        **direct,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--singles", type=int, default=4_000)
    parser.add_argument("--batches", type=int, default=150)
    arguments = parser.parse_args()
    configure_logging("error")
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    server = embedded.start(folder)
    try:
        direct = trio.run(measure, server.url, arguments.singles, arguments.batches)
    finally:
        server.stop()
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="pushd-bench-") as other:
        print(trio.run(measure_grpc, Path(other), arguments.singles, arguments.batches, direct))


if __name__ == "__main__":
    main()
