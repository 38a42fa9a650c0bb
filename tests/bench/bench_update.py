"""UpdateSubscriptions over gRPC: 1,000 topics with three keys a call, added and then given new keys.

Target: 30,000 topics a second. `python -m tests.bench.bench_update`
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import trio

from pushd.rpc.gen.xmtp.backend.v1.notification_pb2 import (
    HttpDelivery,
    RegisterRequest,
    Subscription,
    UpdateSubscriptionsRequest,
)
from tests.bench.calls import bench_server, run_load
from tests.bench.measuring import line, peak_rss_mib

TARGET = 30_000
TOPICS = 1_000
IN_FLIGHT = 8


def update(identity: tuple[bytes, bytes], topics: list[bytes], base: int) -> UpdateSubscriptionsRequest:
    keys = [os.urandom(42) for _ in range(3)]
    return UpdateSubscriptionsRequest(
        recipient_id=identity[0],
        recipient_secret=identity[1],
        adds=[Subscription(topic=topic, hmac_epoch_base=base, hmac_keys=keys) for topic in topics],
    )


async def measure(folder: Path, count: int) -> str:
    identities = [(os.urandom(32), os.urandom(32)) for _ in range(count + 10)]
    registers = [
        RegisterRequest(
            recipient_id=recipient_id,
            recipient_secret=secret,
            http=HttpDelivery(url="https://127.0.0.1:8443/hook", signing_key=os.urandom(32)),
        )
        for recipient_id, secret in identities
    ]
    topics = [[b"\x00" + os.urandom(16) for _ in range(TOPICS)] for _ in identities]
    adds = [update(identity, mine, 600) for identity, mine in zip(identities, topics, strict=True)]
    new_keys = [update(identity, mine, 601) for identity, mine in zip(identities, topics, strict=True)]
    async with bench_server(folder) as server:
        await run_load(server, "Register", registers, IN_FLIGHT, folder)
        await run_load(server, "UpdateSubscriptions", adds[count:], IN_FLIGHT, folder)  # warm up
        added = await run_load(server, "UpdateSubscriptions", adds[:count], IN_FLIGHT, folder)
        replaced = await run_load(server, "UpdateSubscriptions", new_keys[:count], IN_FLIGHT, folder)
        rss = peak_rss_mib(server.process.pid)
    return line(
        "update",
        rate=count * TOPICS / added.seconds,
        cpu_us_per_item=added.server_cpu_s / count / TOPICS * 1e6,
        rss_mib=rss,
        target={"rate": TARGET},
        replaced_rate=round(count * TOPICS / replaced.seconds),
        replaced_cpu_us_per_topic=round(replaced.server_cpu_s / count / TOPICS * 1e6, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    with tempfile.TemporaryDirectory(prefix="pushd-bench-") as folder:
        print(trio.run(measure, Path(folder), parser.parse_args().count))


if __name__ == "__main__":
    main()
