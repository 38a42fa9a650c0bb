"""How fast the webhook sender alone is: 256 attempts in flight to receivers that answer after 50 ms.

    python -m tests.bench.bench_webhook_sender [--sends 10000] [--hosts 64] [--latency-ms 50]

The receiver is one process; its names resolve to loopback through the real lookup threads, with the system's question
replaced by a constant answer. The bound is what 256 permits allow at that latency. `receiver_cpu_us` tells whether the
fake was the one that ran out of core.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import count

import trio

from fakes.launch import RunningFake, launch
from pushd.channels.https1 import client_context
from pushd.channels.resolver import ThreadResolver
from pushd.channels.webhook import WebhookChannel, open_webhook_sender
from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel, Delivered, Delivery, DeliveryConfig
from tests.bench.measuring import PERMITS_BOUND, cpu_s, line, peak_rss_mib, permits_bound

LOOPBACK = (ip_address("127.0.0.1"),)


def deliveries(port: int, hosts: int) -> Iterator[Delivery]:
    configs = [
        DeliveryConfig(Channel.HTTP, f"https://{n}.hooks.invalid:{port}/hook/{n}", b"\x07" * 32) for n in range(hosts)
    ]
    for sequence_id in count(1):
        yield Delivery(sequence_id, b"\x00" + bytes(16), bytes(32), configs[sequence_id % hosts], bytes(32))


async def send_all(channel: WebhookChannel, work: Iterator[Delivery], sends: int) -> None:
    left = sends

    async def sender() -> None:
        nonlocal left
        while left:
            left -= 1
            outcome = await channel.attempt(next(work))
            assert outcome == Delivered(), outcome

    async with trio.open_nursery() as sending:
        for _ in range(IN_FLIGHT_PER_CHANNEL):
            sending.start_soon(sender)


async def measure(fake: RunningFake, options: argparse.Namespace) -> str:
    async with open_webhook_sender(
        resolver=ThreadResolver(lambda host: LOOPBACK),
        tls=client_context(str(fake.ca)),
        allow_private_addresses=True,
    ) as sender:
        channel = WebhookChannel(sender)
        work = deliveries(fake.port, options.hosts)
        await send_all(channel, work, 2 * IN_FLIGHT_PER_CHANNEL)  # connections and caches
        gc.freeze()
        fake_before_s, cpu_before_s, before_s = cpu_s(fake.facts["pid"]), time.process_time(), time.perf_counter()
        await send_all(channel, work, options.sends)
        took_s = time.perf_counter() - before_s
        own_cpu_s, fake_cpu_s = time.process_time() - cpu_before_s, cpu_s(fake.facts["pid"]) - fake_before_s
    stats = fake.stats()
    assert stats["verified"] == options.sends + 2 * IN_FLIGHT_PER_CHANNEL, stats
    return line(
        "webhook-sender",
        rate=options.sends / took_s,
        bound=permits_bound(options.latency_ms),
        bound_is=PERMITS_BOUND,
        cpu_us_per_item=own_cpu_s / options.sends * 1e6,
        rss_mib=peak_rss_mib(),
        hosts=options.hosts,
        connections=stats["connections"],
        receiver_cpu_us=round(fake_cpu_s / options.sends * 1e6, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sends", type=int, default=10_000)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    options = parser.parse_args()
    key = "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc="
    with launch("webhooks", "--latency-ms", str(options.latency_ms), "--key", key, "--record", "0") as fake:
        print(trio.run(measure, fake, options))


if __name__ == "__main__":
    main()
