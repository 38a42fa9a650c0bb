"""A steady load for a while, and whether the server stays level: `python -m tests.faults.soak [MINUTES]`.

Two instances on one database, three fakes. Messages are published all the time; every second a recipient comes and an
old one goes, and one comes whose token is dead; some receivers are rate-limited or fail for ever; streams are opened,
read and closed. The holder's memory, tasks, descriptors and connections are sampled, and looked at once more when the
load is over and all of it has been dispatched.

Prints one JSON line last; the exit code says whether everything stayed level.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import trio
from attrs import frozen

from fakes.launch import launch
from pushd.errors import StatusError
from pushd.model import Channel
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Cursor, Topic, TopicQuery
from tests.faults.cluster import running_db
from tests.faults.world import Device, Fakes, Instance, World, make_devices, open_world

RATE_PER_S = 40.0
SAMPLE_S = 2.0
LIVING = 5  # recipients that come and go, alive at any one time
# Of the time. Retries that wait a minute or two take up their share first, and memory arrives at its level in steps of
# some MiB until about the eighth minute; in a run of 15 minutes it did not grow at all after that.
WARM_UP = 0.5
# Of memory over the measured time, by the slope through all samples. A leak of 300 bytes a delivery would come to more
# in five minutes, and a longer run is a finer sieve.
GROWTH_MIB = 16.0
# How many more there may be at one time than at another. Under load it depends on what comes together; a leak shows at
# rest, where a session of the pool may be open at one moment and not at the other.
SPARE_LOADED = {"tasks": 300.0, "descriptors": 100.0, "connections": 2.0, "sessions": 4.0}
SPARE_RESTING = {"tasks": 6.0, "descriptors": 12.0, "connections": 1.0, "sessions": 12.0}


@frozen
class Sample:
    """One look at an instance."""

    at_s: float
    rss_mib: float
    tasks: float
    descriptors: float
    connections: float
    sessions: float
    retained: float

    @classmethod
    async def take(cls, world: World, instance: Instance) -> Sample:
        measured = await instance.metrics()
        ((sessions,),) = world.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pushd %'")
        return cls(
            trio.current_time(),
            measured["process_resident_memory_bytes"] / 2**20,
            measured["pushd_tasks"],
            measured["process_open_fds"],
            measured["grpc_server_connections"],
            sessions,
            measured["pushd_push_retained"],
        )


class Soak:
    """The load of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.samples: list[Sample] = []
        self.churned = 0
        self.streams = 0

    async def run(self, instance: Instance, seconds: float) -> None:
        """Load for so long."""
        async with trio.open_nursery() as nursery, self._world.load(RATE_PER_S):
            for task in (self._churn, self._limit, self._follow):
                nursery.start_soon(task)
            nursery.start_soon(self._watch, instance)
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()

    async def _watch(self, instance: Instance) -> None:
        while True:
            self.samples.append(await Sample.take(self._world, instance))
            await trio.sleep(SAMPLE_S)

    async def _churn(self) -> None:
        """One recipient comes, the oldest goes, and one comes that is dead already."""
        living: deque[Device] = deque()
        for channel in itertools.cycle(Channel):
            coming, dead = make_devices(2, [channel])
            if channel is not Channel.HTTP:
                gone = {"status": 410, "reason": "Unregistered"}
                if channel is Channel.FCM:
                    gone = {"status": 404, "code": "UNREGISTERED"}
                self._world.fakes[channel].script(dead.name, *[gone] * 50)
                await self._world.register([dead])
            await self._world.register([coming])
            living.append(coming)
            if len(living) > LIVING:
                await self._world.unregister(living.popleft())
            del self._world.devices[:]
            self.churned += 1
            await trio.sleep(1)

    async def _limit(self) -> None:
        """Two devices that are told to wait, again and again; and a webhook that always fails."""
        limited = [*make_devices(1, [Channel.APNS]), *make_devices(1, [Channel.FCM])]
        await self._world.register(limited)
        (failing,) = make_devices(1, [Channel.HTTP])
        await self._world.register([failing])
        hook = f"/hooks/{failing.name[:8]}"
        while True:
            for device in limited:
                self._world.fakes[device.channel].script(device.name, *[{"status": 429}] * 200)
            self._world.fakes[Channel.HTTP].tell("/script", {"token": hook, "answers": [{"status": 503}] * 400})
            await trio.sleep(1)

    async def _follow(self) -> None:
        """Open a stream a little behind the newest message, read on for a while, close it."""
        topic = Topic(topic=self._world.topics[0])
        path = "/xmtp.backend.v1.SubscriptionService/Subscribe"
        for turn in itertools.count():
            instance = self._world.instances[turn % len(self._world.instances)]
            since = Cursor(sequence_id=max(0, max(self._world.rows) - 100))
            add = wire.SubscribeRequest.Update(id=1, adds=[TopicQuery(topic=topic, cursor=since)])
            try:
                async with instance.channel.stream(path, wire.SubscribeResponse, deadline_s=math.inf) as call:
                    await call.send(wire.SubscribeRequest(update=add))
                    with trio.move_on_after(1):
                        async for _ in call:
                            pass
            except StatusError as error:
                raise AssertionError(f"a stream ended: {error}") from error
            self.streams += 1


def slope_per_s(samples: Sequence[Sample]) -> float:
    """MiB a second, by least squares."""
    return statistics.linear_regression([each.at_s for each in samples], [each.rss_mib for each in samples]).slope


def judge(samples: Sequence[Sample], before: Sample, after: Sample) -> list[str]:
    """What did not stay level.

    Args:
        samples: under load, from warm-up to end.
        before, after: without load, warm.
    """
    found = []
    grown = slope_per_s(samples) * (samples[-1].at_s - samples[0].at_s)
    if grown > GROWTH_MIB:
        found.append(f"memory grew by {grown:.1f} MiB")
    third = len(samples) // 3
    for name, spare in SPARE_LOADED.items():
        early = max(getattr(each, name) for each in samples[: third + 1])
        late = max(getattr(each, name) for each in samples[-third - 1 :])
        if late > early + spare:
            found.append(f"{name} under load rose from {early:g} to {late:g}")
    for name, spare in SPARE_RESTING.items():
        if getattr(after, name) > getattr(before, name) + spare:
            found.append(f"{name} at rest rose from {getattr(before, name):g} to {getattr(after, name):g}")
    return found


async def soak(fakes: Fakes, folder: Path, minutes: float) -> dict[str, object]:
    """Run it; the JSON line."""
    seconds = minutes * 60
    with running_db(folder / "db") as db:
        async with open_world(db, fakes, folder, instances=2) as world:
            run = Soak(world)
            holder = await world.holder()
            world.latency(50)
            async with world.load(RATE_PER_S):
                await trio.sleep(min(20.0, seconds / 4))
            await world.dispatched()
            await trio.sleep(5)
            before = await Sample.take(world, holder)
            await run.run(holder, seconds)
            await world.dispatched()
            await trio.sleep(10)  # kept connections close after some seconds
            after = await Sample.take(world, holder)
            measured = [each for each in run.samples if each.at_s - run.samples[0].at_s >= WARM_UP * seconds]
            found = judge(measured, before, after)
            world.check_logs()
            outcomes = dict(sorted((await world.outcomes()).items()))
            if len(world.cursors) != 1:
                found.append(f"the lock changed hands: {len(world.cursors)} terms")
    return {
        "name": "soak",
        "ok": not found,
        "found": found,
        "minutes": minutes,
        "rows": len(world.rows),
        "deliveries": outcomes,
        "recipients_churned": run.churned,
        "streams": run.streams,
        "rss_mib": [round(measured[0].rss_mib, 1), round(measured[-1].rss_mib, 1)],
        "rss_slope_mib_per_hour": round(slope_per_s(measured) * 3_600, 1),
        "tasks": [before.tasks, max(each.tasks for each in measured), after.tasks],
        "descriptors": [before.descriptors, max(each.descriptors for each in measured), after.descriptors],
        "connections": [before.connections, max(each.connections for each in measured), after.connections],
        "sessions": [before.sessions, max(each.sessions for each in measured), after.sessions],
        "retained_peak": max(each.retained for each in measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    folder = Path(tempfile.mkdtemp(prefix="pushd-"))
    try:
        with ExitStack() as stack:
            names = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
            fakes = {channel: stack.enter_context(launch(name, "--record", "0")) for channel, name in names.items()}
            result = trio.run(soak, fakes, folder, minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
