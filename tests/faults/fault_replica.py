"""Pages are read from a streaming replica that lags, stops, and comes back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import trio

from pushd.model import Channel
from tests.faults.cluster import DbProcess, until
from tests.faults.replica import running_replica
from tests.faults.world import Fakes, Tell, make_devices, open_world


async def test_replica_that_lags_and_dies_delays_pushes_and_loses_and_repeats_none(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    place = Path(tempfile.mkdtemp(prefix="pushd-"))
    try:
        with running_replica(db, place / "replica") as replica:
            async with open_world(db, fakes, folder, replica_url=replica.url) as world:
                async with world.load(100):
                    await world.received_more(200)

                    # Frozen in the past: nothing published, subscribed or deleted from here on is seen.
                    replica.pause()
                    await world.quiet()
                    began, arrived = len(world.rows), await world.requests()
                    leaving = world.devices[0]
                    await world.unregister(leaving)
                    (late,) = make_devices(1, [Channel.HTTP])
                    await world.register([late])
                    world.since[late.name] = world.start_position(late)
                    await until(lambda: len(world.rows) > began + 50)
                    assert await world.requests() == arrived
                    replica.resume()
                    await world.received_more(200)

                    for _ in range(1 if is_short else 3):
                        replica.stop()
                        await trio.sleep(1)
                        replica.start()
                        await world.received_more(100)

                    replica.lag(1_500)
                    await world.received_more(100)
                    replica.lag(0)
                report = await world.settle()
                assert report.terms == 1
                assert report.repeats == 0
                assert report.outcomes == {"delivered": report.received}
                tell(report)
    finally:
        shutil.rmtree(place, ignore_errors=True)
