"""How fast one sender is: APNs and FCM against fakes in other processes, without database and dispatcher.

256 sends in flight, as a channel's permits allow; the provider answers after 50 ms, so 5,120/s is the bound. The fake
runs on the other core; CPU per send is this process's alone. The line's common keys are those of APNs. Run with
`python -m tests.bench.bench_providers`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import trio
from attrs import frozen

from fakes.launch import RunningFake, launch
from pushd.channels.apns import make_apns_channel
from pushd.channels.fcm import make_fcm_channel
from pushd.channels.http2 import open_http2_client
from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel, Delivered, Delivery, DeliveryConfig, Outcome
from tests.bench.measuring import PERMITS_BOUND, cpu_s, line, peak_rss_mib, permits_bound

TOPICS = [bytes((0,)) + number.to_bytes(16, "big") for number in range(1_024)]


class Sends(Protocol):
    async def attempt(self, delivery: Delivery) -> Outcome: ...


def deliveries(kind: Channel) -> Iterator[Delivery]:
    """One recipient after another, as a window's fan-out gives them."""
    sequence_id = 0
    while True:
        sequence_id += 1
        target = f"{sequence_id:064x}" if kind is Channel.APNS else f"token-{sequence_id:0130}"
        yield Delivery(sequence_id, TOPICS[sequence_id % 1_024], b"r" * 32, DeliveryConfig(kind, target), b"s" * 32)


@asynccontextmanager
async def open_channel(fake: RunningFake, kind: Channel) -> AsyncIterator[Sends]:
    async with open_http2_client() as client, trio.open_nursery() as exchanging:
        if kind is Channel.APNS:
            yield make_apns_channel(
                client,
                key_pem=_text(fake.facts["key"]),
                key_id=fake.facts["key_id"],
                team_id=fake.facts["team_id"],
                bundle_id="org.example.app",
                environment="production",
                endpoint=fake.endpoint,
                ca_file=fake.ca,
            )
        else:
            account = _text(fake.facts["service_account"])
            yield make_fcm_channel(client, exchanging, service_account=account, endpoint=fake.endpoint, ca_file=fake.ca)


def _text(path: str) -> str:
    return Path(path).read_text()


async def send_all(channel: Sends, work: Iterator[Delivery], count: int) -> None:
    """Send `count` deliveries with 256 tasks, each carrying one after the other as a permit of the dispatcher does."""
    left = iter(range(count))

    async def carry() -> None:
        for _ in left:
            outcome = await channel.attempt(next(work))
            assert isinstance(outcome, Delivered), outcome

    async with trio.open_nursery() as sending:
        for _ in range(IN_FLIGHT_PER_CHANNEL):
            sending.start_soon(carry)


async def measure(fake: RunningFake, kind: Channel, count: int) -> tuple[float, float]:
    """Seconds and CPU seconds of this process for `count` sends."""
    async with open_channel(fake, kind) as channel:
        work = deliveries(kind)
        await send_all(channel, work, 2 * IN_FLIGHT_PER_CHANNEL)  # connection, credentials, caches
        gc.collect()
        gc.freeze()
        cpu_before_s, before_s = time.process_time(), time.perf_counter()
        await send_all(channel, work, count)
        return time.perf_counter() - before_s, time.process_time() - cpu_before_s


@frozen
class Measured:
    """One sender's run: sends a second, and microseconds of processor time a send, of this process and of the fake."""

    rate: float
    cpu_us: float
    fake_cpu_us: float


def bench(kind: Channel, count: int, latency_ms: float) -> Measured:
    """One sender against a fake of its own."""
    with launch(kind.label, "--latency-ms", str(latency_ms), "--record", "0") as fake:
        took_s, own_cpu_s = trio.run(measure, fake, kind, count)
        return Measured(count / took_s, own_cpu_s / count * 1e6, cpu_s(fake.facts["pid"]) / count * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sends", type=int, default=20_000)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    options = parser.parse_args()
    apns, fcm = (bench(kind, options.sends, options.latency_ms) for kind in (Channel.APNS, Channel.FCM))
    print(
        line(
            "providers",
            rate=apns.rate,
            bound=permits_bound(options.latency_ms),
            bound_is=PERMITS_BOUND,
            cpu_us_per_item=apns.cpu_us,
            rss_mib=peak_rss_mib(),
            fake_cpu_us=round(apns.fake_cpu_us, 1),
            fcm_rate=round(fcm.rate),
            fcm_cpu_us_per_item=round(fcm.cpu_us, 1),
            fcm_fake_cpu_us=round(fcm.fake_cpu_us, 1),
        )
    )


if __name__ == "__main__":
    main()
