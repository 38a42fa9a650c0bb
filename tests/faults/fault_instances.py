"""Instances that die, freeze and stop."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import trio

from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel
from tests.faults.cluster import DbProcess, until
from tests.faults.world import Fakes, Instance, Tell, World, open_world

PERMITS = IN_FLIGHT_PER_CHANNEL * len(Channel)
# Longer than an attempt may take: whatever is sent now is unanswered until somebody gives up.
NEVER_MS = 60_000
# Retries are sent after all first attempts. So one drain ends with retries, which must not be given up, and the next
# one with first attempts, whose mark must be written at the very end.
REFUSALS_BY_TURN = (200, 0)


async def saturate(world: World, rows: int = 300) -> int:
    """Publish one window of many more pushes than there are permits, and return once every permit is in use and all
    those requests lie at the fakes unanswered; the cursor below the window."""
    await world.dispatched()
    world.latency(NEVER_MS)
    floor = world.cursor()
    await world.publish(rows, batch=rows)

    async def is_full() -> bool:
        return await world.in_flight() == PERMITS

    await until(is_full)
    return floor


async def test_killed_holders_are_followed_by_ones_that_send_the_rest(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """Three instances, the holder killed twice: with every permit in use and more queued, all of it above the cursor;
    and at any moment of its work."""
    async with open_world(db, fakes, folder, instances=3) as world:
        await world.publish(100)
        holder = await world.holder()
        floor = await saturate(world)
        assert (await holder.metrics())["pushd_push_retained"] > 0
        assert world.cursor() == floor, "nothing of the window has been answered"
        assert await holder.end(signal.SIGKILL) == -signal.SIGKILL
        world.latency(100)
        await world.dispatched()
        assert world.cursors == (0, floor)

        world.latency(1_000)
        holder = await world.holder()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.publish, 300)
            await world.received_more(rng.randrange(100, 600))
            assert await holder.end(signal.SIGKILL) == -signal.SIGKILL
            world.latency(100)
        report = await world.settle()
        assert report.repeats >= PERMITS
        assert report.terms == 3
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1])}
        tell(report)


async def test_frozen_holder_loses_the_lock_and_sends_nothing_when_it_wakes_up(
    db: DbProcess, fakes: Fakes, folder: Path, tell: Tell
) -> None:
    """SIGSTOP with every permit in use and more queued; SIGCONT once a successor has begun.

    Nothing more of the sleeper is on its way then, so all that arrives afterwards has to be the successor's.
    """
    async with open_world(db, fakes, folder, instances=2) as world:
        await world.publish(50)
        holder = await world.holder()
        await saturate(world)
        holder.server.send_signal(signal.SIGSTOP)
        world.latency(50)
        before = await world.requests()
        (other,) = [each for each in world.up if each is not holder]
        await until(lambda: other.holds)
        holder.server.send_signal(signal.SIGCONT)
        await until(lambda: not holder.holds)
        assert holder.terms[-1]["reason"].startswith("database_")
        assert holder.terms[-1]["discarded"] == world.due_above(world.cursors[1]) - PERMITS
        report = await world.settle()
        assert report.terms == 2
        assert report.received == before + world.due_above(world.cursors[1])
        # What it had in flight was never answered.
        assert report.outcomes == {"delivered": report.received - PERMITS, "failed": PERMITS}
        tell(report)


async def press(world: World, holder: Instance, refusals: int) -> None:
    """Return when the holder has work in flight, work queued for a permit and, with `refusals` on each of two channels,
    work that was refused and waits to be tried again. It takes seconds to send all of it."""
    for channel in (Channel.APNS, Channel.HTTP):  # FCM's retries wait for ten seconds at least
        world.refuse(next(device for device in world.devices if device.channel is channel), refusals)
    before = await _refused(holder)
    await world.publish(400, batch=400)

    async def is_pressed() -> bool:
        measured = await holder.metrics()
        in_flight = [n for name, n in measured.items() if name.startswith("pushd_push_in_flight{")]
        is_refused = await _refused(holder) > before or not refusals
        return is_refused and min(in_flight) > 0 and measured["pushd_push_retained"] > 2 * refusals

    await until(is_pressed)


async def _refused(instance: Instance) -> float:
    measured = await instance.metrics()
    return sum(n for name, n in measured.items() if name.startswith("pushd_push_attempt_failures_total{"))


async def everything_was_answered(world: World) -> None:
    """Nobody went away before the answer, and each push was accepted once."""
    due = world.by_channel(world.due())
    for channel in Channel:
        judged = await world.statistics(channel)
        accepted = sum(count for status, count in judged["statuses"].items() if status.startswith("2"))
        assert sum(judged["statuses"].values()) == judged["requests"]
        assert accepted == due[channel]


PATIENT = {"max_drain_duration_ms": 60_000}


async def test_rolling_restart_under_load_sends_everything_exactly_once(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    """The holder is stopped and replaced with work in flight, queued and waiting for a retry; each drains, so nothing
    may come twice, and nothing refused may be given up."""
    async with open_world(db, fakes, folder, instances=2, server=PATIENT) as world:
        world.latency(1_000)
        async with world.load(30):
            for turn in range(2 if is_short else 5):
                holder = await world.holder()
                await press(world, holder, REFUSALS_BY_TURN[turn % 2])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(world.start)
                    assert await holder.end(signal.SIGTERM) == 0
                assert holder.held[-1].is_drained
        report = await world.settle()
        assert report.repeats == world.refused
        await everything_was_answered(world)
        tell(report)


async def test_holders_that_step_down_under_load_send_everything_exactly_once(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    """The same, and as nobody ends, every delivery of every term is in somebody's counters."""
    async with open_world(db, fakes, folder, instances=2, server=PATIENT) as world:
        world.latency(1_000)
        async with world.load(30):
            for turn in range(2 if is_short else 6):
                holder = await world.holder()
                await press(world, holder, REFUSALS_BY_TURN[turn % 2])
                async with world.next_term():
                    await holder.command("step-down")
                assert holder.held[-1].is_drained
        report = await world.settle()
        assert report.repeats == world.refused
        assert report.outcomes == {"delivered": report.pushes}
        await everything_was_answered(world)
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
        assert not holder.held[-1].is_drained
        report = await world.settle()
        assert report.repeats > 0
        assert report.terms == 2
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1])}
        tell(report)
