"""Register over gRPC: first registrations, then renewals of the same recipients. Target: 900 calls a second.

`python -m tests.bench.bench_register`
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
    UpdateSubscriptionsRequest,
)
from tests.bench.calls import bench_server, run_load
from tests.bench.measuring import line, peak_rss_mib

TARGET = 900
IN_FLIGHT = 32


async def measure(folder: Path, count: int) -> str:
    identities = [(os.urandom(32), os.urandom(32)) for _ in range(count + 500)]
    registers = [
        RegisterRequest(
            recipient_id=recipient_id,
            recipient_secret=secret,
            http=HttpDelivery(url="https://127.0.0.1:8443/hook", signing_key=os.urandom(32)),
        )
        for recipient_id, secret in identities
    ]
    renewals = [UpdateSubscriptionsRequest(recipient_id=id_, recipient_secret=secret) for id_, secret in identities]
    async with bench_server(folder) as server:
        await run_load(server, "Register", registers[count:], IN_FLIGHT, folder)  # warm up
        first = await run_load(server, "Register", registers[:count], IN_FLIGHT, folder)
        again = await run_load(server, "Register", registers[:count], IN_FLIGHT, folder)
        renewed = await run_load(server, "UpdateSubscriptions", renewals[:count], IN_FLIGHT, folder)
        rss = peak_rss_mib(server.process.pid)
    return line(
        "register",
        rate=count / first.seconds,
        cpu_us_per_item=first.server_cpu_s / count * 1e6,
        rss_mib=rss,
        target={"rate": TARGET},
        again_rate=round(count / again.seconds),
        again_cpu_us=round(again.server_cpu_s / count * 1e6),
        empty_update_rate=round(count / renewed.seconds),
        empty_update_cpu_us=round(renewed.server_cpu_s / count * 1e6),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=4_000)
    with tempfile.TemporaryDirectory(prefix="pushd-bench-") as folder:
        print(trio.run(measure, Path(folder), parser.parse_args().count))


if __name__ == "__main__":
    main()
