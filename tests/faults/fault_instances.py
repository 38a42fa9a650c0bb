"""Instances that die, freeze and stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import trio

from tests.faults.cluster import DbProcess, until
from tests.faults.world import Fakes, Tell, open_world


async def test_killed_holders_are_followed_by_ones_that_send_the_rest(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """Three instances, the holder killed twice in the middle of its work, each time with attempts in flight."""
    async with open_world(db, fakes, folder, instances=3) as world:
        await world.publish(100)
        await world.dispatched()
        persisted = world.cursor()
        for _ in range(2):
            world.latency(1_000)
            holder = await world.holder()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.publish, 300)
                await world.received_more(rng.randrange(100, 600))
                assert await holder.end(signal.SIGKILL) == -signal.SIGKILL
                world.latency(100)
            await world.holder()
            await world.dispatched()
        report = await world.settle()
        assert report.repeats > 0, "the kills came between a push and the cursor"
        assert report.terms == 3
        assert world.cursors[1] >= persisted, "what the cursor had passed is not sent again"
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1])}
        tell(report)


async def test_frozen_holder_loses_the_lock_and_sends_nothing_when_it_wakes_up(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """SIGSTOP with attempts in flight; SIGCONT once a successor has begun. Both live, so every push is counted."""
    async with open_world(db, fakes, folder, instances=2) as world:
        world.latency(1_000)
        holder = await world.holder()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.publish, 300)
            await world.received_more(rng.randrange(100, 600))
            holder.server.send_signal(signal.SIGSTOP)
            world.latency(50)
            (other,) = [each for each in world.up if each is not holder]
            await until(lambda: other.holds)
            holder.server.send_signal(signal.SIGCONT)
            await until(lambda: not holder.holds)
        assert holder.terms[-1]["reason"].startswith("database_")
        assert holder.terms[-1]["discarded"] > 0
        report = await world.settle()
        assert report.terms == 2
        # An attempt that slept for longer than it may take has failed, whether its request had left before or not.
        assert report.outcomes.keys() <= {"delivered", "failed"}
        delivered, failed = report.outcomes["delivered"], report.outcomes.get("failed", 0)
        assert delivered <= report.received <= delivered + failed
        tell(report)


async def test_rolling_restart_under_load_sends_everything_exactly_once(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    """The holder is stopped and replaced while pushes are in flight; each drains, so nothing may come twice."""
    async with open_world(db, fakes, folder, instances=2) as world:
        world.latency(200)
        async with world.load(200):
            for _ in range(2 if is_short else 5):
                holder = await world.holder()
                await world.received_more(100)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(world.start)
                    assert await holder.end(signal.SIGTERM) == 0
                assert holder.terms[-1]["reason"] == "stopped"
                assert holder.terms[-1]["discarded"] == 0
        report = await world.settle()
        assert report.repeats == 0
        tell(report)


async def test_holders_that_step_down_under_load_send_everything_exactly_once(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    async with open_world(db, fakes, folder, instances=2) as world:
        world.latency(200)
        async with world.load(150):
            for _ in range(2 if is_short else 6):
                holder = await world.holder()
                await world.received_more(100)
                await holder.command("step-down")
                await until(lambda holder=holder: any(each.holds for each in world.up if each is not holder))
        report = await world.settle()
        assert report.repeats == 0
        assert report.outcomes == {"delivered": report.received}
        tell(report)


async def test_drain_that_runs_out_of_time_repeats_open_windows_only(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """The providers take longer to answer than the drain may last."""
    async with open_world(db, fakes, folder, instances=2, server={"max_drain_duration_ms": 1_000}) as world:
        await world.publish(50)
        await world.dispatched()
        world.latency(3_000)
        holder = await world.holder()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.publish, 200)
            await world.received_more(rng.randrange(50, 300))
            assert await holder.end(signal.SIGTERM) == 0
            world.latency(100)
        report = await world.settle()
        assert report.repeats > 0
        assert report.terms == 2
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1])}
        tell(report)
