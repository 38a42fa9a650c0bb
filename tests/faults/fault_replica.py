"""Pages are read from a streaming replica that lags, stops, and comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pushd.model import Channel
from tests.faults.cluster import DbProcess, data_folder, until
from tests.faults.ledger import Subscriber, expected_pushes
from tests.faults.moments import logged, newest, settled
from tests.faults.replica import Replica, running_replica
from tests.faults.world import Device, Fakes, Tell, World, make_devices, open_world

LAG_MS = 1_500


@pytest.fixture(scope="module")
def standby(session_db: DbProcess) -> Iterator[Replica]:
    session_db.mend()
    with data_folder() as place, running_replica(session_db, place / "replica") as running:
        yield running


@pytest.fixture
async def replica(standby: Replica, db: DbProcess) -> Replica:
    """Of the shared database, up and up to date, whatever the run before did to it."""
    await standby.mend()
    return standby


async def test_replica_that_lags_and_dies_delays_pushes_and_loses_and_repeats_none(
    db: DbProcess, replica: Replica, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    async with open_world(db, fakes, folder, replica_url=replica.url) as world:
        async with world.load(100):
            await world.received_more(200)

            # Frozen in the past: nothing published, subscribed or deleted from here on is seen.
            await replica.pause()
            frozen = replica.shown(world.url)
            await until(lambda: world.cursor() >= frozen)
            arrived = await world.requests()
            leaving = world.devices[0]
            await world.unregister(leaving)
            await _subscribe_late(world)
            published = len(world.rows)
            await until(lambda: len(world.rows) > published + 50)
            assert await world.requests() == arrived
            await replica.resume()
            # Whoever reads a row above this boundary reads a snapshot without the recipient.
            world.until[leaving.name] = await replica.settled_without(world.url, leaving.recipient_id)
            await world.received_more(200)

            for _ in range(1 if is_short else 3):
                holder = await world.holder()
                before = len(holder.server.events)
                await replica.stop()
                await until(lambda holder=holder, before=before: logged(holder, "page_failed", after=before))
                await replica.start()
                await world.received_more(100)

            await _lag(world, replica)
        report = await world.settle()
        assert _due(world, leaving, frozen) <= (await world.arrived()).keys(), "it was due until it had left"
        assert _due(world, leaving, max(world.rows)) - _due(world, leaving, world.until[leaving.name]), "and not since"
        assert report.terms == 1
        assert report.repeats == 0
        assert report.outcomes == {"delivered": report.received}
        tell(report)


async def _subscribe_late(world: World) -> None:
    """A further device, which is due what is not settled yet."""
    (late,) = make_devices(1, [Channel.HTTP])
    before = settled(world)
    await world.register([late])
    world.since[late.name] = since = world.start_position(late)
    assert before <= since <= settled(world)


async def _lag(world: World, replica: Replica) -> None:
    """No push comes earlier than the replica shows its row."""
    await replica.lag(LAG_MS)
    before = newest(world)
    await until(lambda: world.cursor() > before + 50)
    arrivals = [arrival for arrival in await world.arrivals() if arrival.row > before]
    await replica.lag(0)
    stored = dict(world.ask("SELECT sequence_id, server_ns / 1e9 FROM envelopes WHERE sequence_id > %s", before))
    assert len(arrivals) > 50
    assert min(arrival.wall_s - float(stored[arrival.row]) for arrival in arrivals) >= LAG_MS / 1_000


def _due(world: World, device: Device, until_row: int) -> set[tuple[str, int]]:
    """What a device subscribed from the beginning is due, up to a row."""
    subscribers = [Subscriber(device.name, topic, device.commits) for topic in world.topics]
    return {push for push in expected_pushes(world.rows, subscribers) if push[1] <= until_row}


async def test_successor_whose_replica_shows_the_past_waits_for_it_and_loses_nothing(
    db: DbProcess, replica: Replica, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    """The holder reads the primary and is killed; its successor reads a replica that has not come as far as the cursor.

    What that one shows of the rows in between is nothing, which must not be taken for there being none.
    """
    async with open_world(db, fakes, folder, instances=1) as world:
        holder = await world.holder()
        await world.start(database={"replica_url": replica.url(world.url)})
        async with world.load(100):
            await world.received_more(100)
            await replica.pause()
            frozen = replica.settled(world.url)
            await until(lambda: world.cursor() > frozen + 20)
            async with world.next_term():
                assert await holder.end(signal.SIGKILL) == -signal.SIGKILL
            hidden = newest(world)
            await until(lambda: len([row for row in list(world.rows) if row > hidden]) > 50)
            assert replica.settled(world.url) == frozen
            assert world.cursor() == world.cursors[-1] > frozen
            resumed_s = time.time()
            await replica.resume()
            await world.received_more(200)
        report = await world.settle()
        early = [each for each in await world.arrivals() if each.row > hidden and each.wall_s < resumed_s]
        assert early == [], "what the replica did not show was sent"
        assert report.terms == 2
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1])}
        tell(report)
