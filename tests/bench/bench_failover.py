"""The holder is killed: how long until the first request of its successor is at the provider.

Both are whole `pushd serve` processes on one database; the holder has a hundred and more pushes in flight that are
never answered. Time runs from the kill to the moment the fake had read the request, both by this machine's wall clock.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import trio

from fakes.launch import launch
from pushd.model import Channel
from tests.bench.measuring import line, peak_rss_mib
from tests.faults.cluster import data_folder, running_db, until
from tests.faults.world import World, make_devices, open_world

ROUNDS = 8
POLL_S = 0.1
TARGET_S = 2 * POLL_S + 0.2
NEVER_MS = 60_000


async def fail_over(world: World) -> float:
    """Kill the holder; seconds until another one's first request."""
    holder = await world.holder()
    await world.dispatched()
    world.latency(NEVER_MS)
    await world.publish(100, batch=50)

    async def is_busy() -> bool:
        return await world.in_flight(Channel.APNS) >= 100

    await until(is_busy)
    world.latency(0)
    holder.is_up = False
    killed_s = time.time()
    holder.server.send_signal(signal.SIGKILL)

    async def first_s() -> float | None:
        found = [each.wall_s for each in await world.arrivals() if each.sender not in (None, holder.bundle_id)]
        return min((at_s for at_s in found if at_s > killed_s), default=None)

    async def has_come() -> bool:
        return await first_s() is not None

    await until(has_come)
    first = await first_s()
    assert first is not None
    return first - killed_s


async def measure(folder: Path) -> tuple[list[float], float]:
    """Seconds of each round, and the most memory of the last holder in MiB."""
    names = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
    found: list[float] = []
    with ExitStack() as stack:
        fakes = {channel: stack.enter_context(launch(name, "--record", "200000")) for channel, name in names.items()}
        db = stack.enter_context(running_db(stack.enter_context(data_folder())))
        async with open_world(db, fakes, folder, devices=make_devices(3, [Channel.APNS])) as world:
            for _ in range(ROUNDS):
                found.append(await fail_over(world))
                await world.start()
            return found, peak_rss_mib((await world.holder()).pid)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    try:
        seconds, peak = trio.run(measure, folder)
    finally:
        shutil.rmtree(folder)
    print(
        line(
            "failover",
            rate=None,
            bound_is="none: a time is measured",
            cpu_us_per_item=None,
            rss_mib=peak,
            target={"worst_s": TARGET_S},
            median_s=round(statistics.median(seconds), 3),
            worst_s=round(max(seconds), 3),
            rounds=ROUNDS,
        )
    )


if __name__ == "__main__":
    main()
