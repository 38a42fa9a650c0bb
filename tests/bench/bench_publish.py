"""Publishing to an embedded PostgreSQL with durable commits.

In one run: single-envelope publishes with 32 in flight and batches of 100 with 4 in flight, without the wire and then
over gRPC between processes; and how long the closed boundary lags behind an unhurried publisher. Targets: 1,000 single
publishes and 10,000 envelopes in batches a second, a lag of 2 poll intervals. `python -m tests.bench.bench_publish`
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

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
from tests.support.envelopes import group_envelope

POLL_S = 0.1
GROUPS = 5_000
BODY_BYTES = 512


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


async def measure(url: str, singles: int, batches: int) -> dict[str, Any]:
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

        async def publish(encoded: bytes) -> None:
            response = await service.Publish(PublishRequest.FromString(encoded))
            response.SerializeToString()

        await run_in_flight(publish, make_requests(200, 1), 32)  # warm up
        requests = make_requests(singles, 1)
        cpu = time.process_time()
        single_s = await run_in_flight(publish, requests, 32)
        cpu_s = time.process_time() - cpu
        requests = make_requests(batches, 100)
        batch_cpu = time.process_time()
        batch_s = await run_in_flight(publish, requests, 4)
        batch_cpu_s = time.process_time() - batch_cpu

        lags = []
        for encoded in make_requests(30, 1):
            response = await service.Publish(PublishRequest.FromString(encoded))
            started = trio.current_time()
            await boundary.wait_above(response.envelope_metas[0].cursor.sequence_id - 1)
            lags.append((trio.current_time() - started) / POLL_S)
            await trio.sleep(0.013)
        nursery.cancel_scope.cancel(reason="measured")

    return {
        "name": "publish",
        "rate": round(singles / single_s),
        "bound": None,
        "ratio_to_bound": None,
        "cpu_us_per_item": round(cpu_s / singles * 1e6),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "batch_envelopes_rate": round(batches * 100 / batch_s),
        "batch_cpu_us_per_envelope": round(batch_cpu_s / batches / 100 * 1e6, 1),
        "boundary_lag_p50_intervals": round(statistics.median(lags), 3),
        "boundary_lag_max_intervals": round(max(lags), 3),
    }


async def measure_grpc(folder: Path, singles: int, batches: int) -> dict[str, Any]:
    async def load(count: int, envelopes: int, in_flight: int) -> Load:
        requests = [PublishRequest.FromString(encoded) for encoded in make_requests(count, envelopes)]
        return await run_load(
            server, "Publish", requests, in_flight, folder, service="/xmtp.backend.v1.PublishService/"
        )

    async with bench_server(folder) as server:
        await load(200, 1, 32)  # warm up
        single = await load(singles, 1, 32)
        batch = await load(batches, 100, 4)
    return {
        "grpc_rate": round(singles / single.seconds),
        "grpc_cpu_us_per_item": round(single.server_cpu_s / singles * 1e6),
        "grpc_batch_envelopes_rate": round(batches * 100 / batch.seconds),
        "grpc_batch_cpu_us_per_envelope": round(batch.server_cpu_s / batches / 100 * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--singles", type=int, default=4_000)
    parser.add_argument("--batches", type=int, default=150)
    arguments = parser.parse_args()
    configure_logging("error")
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    server = embedded.start(folder)
    try:
        figures = trio.run(measure, server.url, arguments.singles, arguments.batches)
    finally:
        server.stop()
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="pushd-bench-") as other:
        figures |= trio.run(measure_grpc, Path(other), arguments.singles, arguments.batches)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
