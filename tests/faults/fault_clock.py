"""Wall clocks that step forward and back, of the instances and of the database.

A small C library, preloaded, shifts the clock of one process; it is compiled here, and the run is left out, saying so,
where there is no compiler. Monotonic clocks cannot be stepped and are not: by definition they do not.
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from attrs import frozen

from pushd.model import Channel
from tests.faults.cluster import running_db
from tests.faults.world import Fakes, Tell, open_world

HOUR_S = 3_600


@frozen
class SteppedClock:
    """The wall clock of the processes that were given `environ`."""

    library: Path
    offset: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CLOCK_OFFSET_FILE": str(self.offset)}

    def step(self, seconds: float) -> None:
        """Show a time so far from the true one, from now on."""
        # In place: the processes have the file mapped.
        with self.offset.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))


def stepped_clock(folder: Path, name: str) -> SteppedClock:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("clock steps were not tried: there is no C compiler here")
    library = folder / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    offset = folder / f"{name}.offset"
    offset.write_bytes(bytes(8))
    return SteppedClock(library, offset)


async def test_clocks_that_step_change_nothing_about_what_arrives(
    fakes: Fakes, folder: Path, rng: random.Random, is_short: bool, tell: Tell
) -> None:
    """Two hours either way. Ages of credentials, deadlines and delays do not rest on the wall clock, and the order of
    rows does not rest on the database's."""
    server_clock, database_clock = stepped_clock(folder, "server"), stepped_clock(folder, "database")
    tokens_before = (fakes[Channel.APNS].stats()["provider_tokens"], fakes[Channel.FCM].stats()["exchanges"])
    with running_db(folder / "db", environ=database_clock.environ) as db:
        async with open_world(db, fakes, folder, environ=server_clock.environ) as world:
            async with world.load(100):
                await world.received_more(200)
                steps = [2 * HOUR_S, -2 * HOUR_S, 0] * (1 if is_short else 3)
                for clock in (server_clock, database_clock):
                    rng.shuffle(steps)
                    for seconds in steps:
                        clock.step(seconds)
                        if clock is database_clock:
                            ((now,),) = world.ask("SELECT extract(epoch FROM clock_timestamp())")
                            assert abs(float(now) - time.time() - seconds) < 60, "the step took place"
                        await world.received_more(200)
            report = await world.settle()
            assert report.terms == 1
            assert report.repeats == 0
            assert report.outcomes == {"delivered": report.received}
            # One token each, made once: no age looked as if an hour had passed, or would never pass.
            made = (fakes[Channel.APNS].stats()["provider_tokens"], fakes[Channel.FCM].stats()["exchanges"])
            assert [after - before for before, after in zip(tokens_before, made, strict=True)] == [1, 1]
            assert await world.signing_clocks() == {-2, 0, 2}, "the instances' clocks did step"
            tell(report)
