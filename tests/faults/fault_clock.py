"""Wall clocks that step forward and back, of the instances and of the database.

A small C library, preloaded, shifts the clock of one process; it is compiled here, and the runs are left out, saying
so, where there is no compiler. Monotonic clocks cannot be stepped and are not: by definition they do not.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import frozen

from fakes.launch import launch
from pushd.model import Channel
from tests.faults.cluster import DbProcess, running_db, until
from tests.faults.moments import logged, newest, not_shown
from tests.faults.world import Fakes, Tell, open_world

HOUR_S = 3_600


@frozen
class SteppedClock:
    """The wall clock of the processes that were given `environ`."""

    library: Path
    offset: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "LD_CLOCK_OFFSET_FILE": str(self.offset)}

    def step(self, seconds: float) -> None:
        """Show a time so far from the true one, from now on."""
        # In place: the processes have the file mapped.
        with self.offset.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))


def stepped_clock(library: Path, name: str) -> SteppedClock:
    offset = library.with_name(f"{name}.offset")
    offset.write_bytes(bytes(8))
    return SteppedClock(library, offset)


@pytest.fixture
def library(folder: Path) -> Path:
    """The library that shifts clocks. A fixture, because what a skipped test says from inside Trio is lost."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return not_shown("clocks that step", "there is no C compiler here")
    made = folder / "clock_shim.so"
    build = [compiler, "-shared", "-fPIC", "-O1", "-o", made]
    trivial = folder / "trivial.c"
    trivial.write_text('#include <dlfcn.h>\nvoid *nothing(void) { return dlsym(RTLD_DEFAULT, "nothing"); }\n')
    if subprocess.run([*build, "-D_GNU_SOURCE", trivial, "-ldl"], capture_output=True).returncode != 0:
        return not_shown("clocks that step", "the C compiler here cannot make a library")
    subprocess.run([*build, Path(__file__).with_name("clock_shim.c"), "-ldl"], check=True)
    return made


async def test_clocks_that_step_change_nothing_about_what_arrives(
    library: Path, fakes: Fakes, folder: Path, rng: random.Random, is_short: bool, tell: Tell
) -> None:
    """Two hours either way. Ages of credentials, deadlines and delays do not rest on the wall clock, and the order of
    rows does not rest on the database's."""
    server_clock, database_clock = stepped_clock(library, "server"), stepped_clock(library, "database")
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


@pytest.fixture
def old_fakes(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Fakes whose certificates are a day old, so that a clock that is late accepts them as it would real ones."""
    clock = stepped_clock(library, "fakes")
    clock.step(-24 * HOUR_S)
    names = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
    with ExitStack() as stack:
        with monkeypatch.context() as environ:
            for name, value in clock.environ.items():
                environ.setenv(name, value)
            fakes = {channel: stack.enter_context(launch(name, "--record", "10000")) for channel, name in names.items()}
        clock.step(0)
        yield fakes


async def test_credential_made_while_the_clock_is_off_is_replaced_once_it_is_right(
    library: Path, db: DbProcess, old_fakes: Fakes, folder: Path, tell: Tell
) -> None:
    """An instance makes its first token two hours ago by its clock. APNs calls that expired, which costs the pushes of
    that time (PUSH-061), but no recipient; once the clock is right so is the token, without a restart."""
    fakes, clock = old_fakes, stepped_clock(library, "server")
    async with open_world(db, fakes, folder, instances=1, environ=clock.environ) as world:
        await world.publish(20)
        await world.dispatched()
        first = await world.holder()
        second = await world.start()
        async with world.next_term():
            assert await first.end(signal.SIGTERM) == 0
        clock.step(-2 * HOUR_S)
        async with world.load(60):
            await until(lambda: _refused(fakes) >= 40)
            await until(lambda: logged(second, "provider_refuses"))  # an operator is told
            clock.step(0)
            accepted = _accepted(fakes)
            await until(lambda: _accepted(fakes) > accepted)
            right = newest(world)
            await until(lambda: world.cursor() > right + 30)
        world.refused = _refused(fakes)
        report = await world.settle()
        counters = await world.counters(second)
        rejected = counters[Channel.APNS, "rejected"]
        assert 0 < 2 * rejected <= world.refused, "each twice within its attempt"
        assert report.outcomes == {"delivered": world.due_above(world.cursors[-1]) - rejected, "rejected": rejected}
        assert world.ask("SELECT count(*) FROM push_recipient") == [(len(world.devices),)]
        offsets = _token_offsets(fakes)
        assert {hours for _, hours in offsets} == {-2, 0}
        assert {hours for row, hours in offsets if row > right} == {0}
        tell(report)


def _refused(fakes: Fakes) -> int:
    return int(fakes[Channel.APNS].stats()["statuses"].get("403", 0))


def _accepted(fakes: Fakes) -> int:
    return int(fakes[Channel.APNS].stats()["statuses"].get("200", 0))


def _token_offsets(fakes: Fakes) -> list[tuple[int, int]]:
    """The row of each push to APNs, and by how many hours the token with it was made earlier or later than it came."""
    found = []
    for request in fakes[Channel.APNS].requests():
        claims = request["headers"]["authorization"].split(".")[1]
        issued_s = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iat"]
        found.append((int(json.loads(request["body"])["sequence_id"]), round((issued_s - request["wall_s"]) / HOUR_S)))
    return found
