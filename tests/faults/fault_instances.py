"""Instances that die, freeze and stop."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from pathlib import Path

import trio
from attrs import evolve

from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel
from tests.faults.cluster import DbProcess, until
from tests.faults.world import Device, Fakes, Instance, Tell, World, make_devices, open_world

# Longer than an attempt may take: whatever is sent now is unanswered until somebody gives up.
NEVER_MS = 60_000
# Retries are sent after all first attempts. So one drain ends with retries, which must not be given up, and the next
# one with first attempts, whose mark must be written at the very end.
REFUSALS_BY_TURN: tuple[Mapping[Channel, int], ...] = (
    {Channel.APNS: 200, Channel.HTTP: 40},
    {},
)  # FCM's retries wait for ten seconds at least


def recipients() -> list[Device]:
    """Few of the pushes of a burst are webhooks: each opens a TLS connection, and on a slow machine hundreds of those
    at once take longer than an attempt may."""
    (hook,) = make_devices(1, [Channel.HTTP])
    return [*make_devices(3, [Channel.APNS, Channel.FCM]), evolve(hook, topics=1)]


async def saturate(world: World, rows: int = 300) -> int:
    """Publish one window of many more pushes than there are permits, and return once all that may be in flight lies
    unanswered at the fakes; how much that is. The cursor is below the window then."""
    await world.dispatched()
    world.latency(NEVER_MS)
    floor = world.cursor()
    await world.publish(rows, batch=rows)
    due = world.by_channel(push for push in world.due() if push[1] > floor)
    full = {channel: min(due[channel], IN_FLIGHT_PER_CHANNEL) for channel in Channel}

    async def is_full() -> bool:
        return {channel: await world.in_flight(channel) for channel in Channel} == full

    await until(is_full)
    assert world.cursor() == floor, "nothing of the window has been answered"
    return sum(full.values())


async def test_killed_holders_are_followed_by_ones_that_send_the_rest(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """Three instances, the holder killed twice: with every permit in use and more queued, all of it above the cursor;
    and at any moment of its work."""
    async with open_world(db, fakes, folder, instances=3, devices=recipients()) as world:
        await world.publish(100)
        holder = await world.holder()
        in_flight = await saturate(world)
        floor = world.cursor()
        assert (await holder.metrics())["pushd_push_retained"] > 0
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
        assert report.repeats >= in_flight
        assert report.terms == 3
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1])}
        tell(report)


async def test_frozen_holder_loses_the_lock_and_sends_nothing_when_it_wakes_up(
    db: DbProcess, fakes: Fakes, folder: Path, tell: Tell
) -> None:
    """SIGSTOP with every permit in use and more queued; SIGCONT once a successor has begun.

    Nothing more of the sleeper is on its way then, so all that arrives afterwards has to be the successor's.
    """
    async with open_world(db, fakes, folder, instances=2, devices=recipients()) as world:
        await world.publish(50)
        holder = await world.holder()
        in_flight = await saturate(world)
        holder.server.send_signal(signal.SIGSTOP)
        world.latency(50)
        before = await world.requests()
        (other,) = [each for each in world.up if each is not holder]
        await until(lambda: other.holds)
        holder.server.send_signal(signal.SIGCONT)
        await until(lambda: not holder.holds)
        assert holder.terms[-1]["reason"].startswith("database_")
        assert holder.terms[-1]["discarded"] == world.due_above(world.cursors[1]) - in_flight
        report = await world.settle()
        assert report.terms == 2
        assert report.received == before + world.due_above(world.cursors[1])
        # What it had in flight was never answered.
        assert report.outcomes == {"delivered": report.received - in_flight, "failed": in_flight}
        tell(report)


async def press(world: World, holder: Instance, refusals: Mapping[Channel, int]) -> None:
    """Return when the holder has work in flight, work queued for a permit and, with `refusals`, work that was refused
    and waits to be tried again. It takes seconds to send all of it."""
    for channel, times in refusals.items():
        world.refuse(next(device for device in world.devices if device.channel is channel), times)
    before = await holder.metrics()
    await world.publish(400, batch=400)

    async def is_pressed() -> bool:
        now = await holder.metrics()
        return (
            all(_refused(now, channel) > _refused(before, channel) for channel in refusals)
            and all(now[f'pushd_push_in_flight{{channel="{name}"}}'] > 0 for name in ("apns", "fcm"))
            and now["pushd_push_retained"] > sum(refusals.values())
        )

    await until(is_pressed)


def _refused(measured: Mapping[str, float], channel: Channel) -> float:
    prefix = f'pushd_push_attempt_failures_total{{channel="{channel.label}"'
    return sum(value for name, value in measured.items() if name.startswith(prefix))


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
    async with open_world(db, fakes, folder, instances=2, devices=recipients(), server=PATIENT) as world:
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
    async with open_world(db, fakes, folder, instances=2, devices=recipients(), server=PATIENT) as world:
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
