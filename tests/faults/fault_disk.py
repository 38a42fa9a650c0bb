"""A full disk under the database: a tmpfs in a mount namespace of the server's own, filled to the last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
import trio

from tests.faults.cluster import DbProcess, running_db, until
from tests.faults.moments import not_shown
from tests.faults.world import Fakes, Tell, open_world

SIZE = "192m"  # a cluster of 40 MiB with a write-ahead log of 32 MiB, and room for what a run stores
# The log is kept small, so that it is the table files that meet the end of the disk and the server lives on.
_SETTINGS = "\nmin_wal_size = 32MB\nmax_wal_size = 32MB\nwal_keep_size = 0\n"
_MOUNT = (
    'set -e; cp -a "$1/postgres" "$1/copy"; mount -t tmpfs -o size=$2 tmpfs "$1/postgres"; chmod 700 "$1/postgres";'
    ' cp -a "$1/copy/." "$1/postgres/"; rm -rf "$1/copy"; shift 2; exec "$@"'
)


@pytest.fixture
def namespace(folder: Path) -> list[str]:
    """The command that gives a process mounts of its own, as root or as anybody.

    A fixture, because what a skipped test says from inside Trio is lost.
    """
    place = folder / "tried"
    place.mkdir()
    said = "there is no unshare"
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        with suppress(FileNotFoundError):
            tried = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True)
            if tried.returncode == 0:
                return command
            said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return not_shown("a full disk", f"no mounts of one's own here: {said}")


@contextmanager
def db_on_a_small_disk(folder: Path, namespace: Sequence[str]) -> Iterator[DbProcess]:
    """`pushd db` whose data lies on a file system of SIZE."""
    with running_db(folder):
        pass  # makes the cluster, which then moves
    with (folder / "postgres" / "postgresql.conf").open("a") as settings:
        settings.write(_SETTINGS)
    prefix = [*namespace, "sh", "-c", _MOUNT, "sh", str(folder), SIZE]
    with running_db(folder, prefix=prefix) as db:
        yield db


def _disk(db: DbProcess) -> Path:
    """The small disk, seen from outside the namespace."""
    return Path(f"/proc/{db.pid}/root{db.folder}/postgres")


def _fill(disk: Path) -> None:
    """Leave not one block."""
    with (disk / "balloon").open("ab", buffering=0) as balloon:
        block = bytes(2**20)
        while len(block) >= 4096:
            try:
                balloon.write(block)
            except OSError:
                block = block[: len(block) // 2]


async def test_full_disk_refuses_publishes_and_loses_nothing(
    namespace: list[str], fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    with db_on_a_small_disk(folder / "db", namespace) as db:
        disk = _disk(db)
        async with open_world(db, fakes, folder) as world:

            async def is_refusing() -> bool:
                # Whatever the server gives back meanwhile is taken too. Room inside its pages is used up first.
                await trio.to_thread.run_sync(_fill, disk)
                return world.repeated > failed + 20

            async with world.load(100):
                for _ in range(1 if is_short else 3):
                    await world.received_more(200)
                    # A segment of the log that is there already, and nothing to tidy up: without room for its log the
                    # server ends, which is another story.
                    world.ask("CHECKPOINT")
                    world.ask("SELECT pg_switch_wal()")
                    await world.received_more(10)
                    began = world.ask("SELECT pg_postmaster_start_time()")
                    failed = world.repeated
                    await until(is_refusing)
                    with pytest.raises(psycopg.errors.DiskFull):
                        world.ask("CREATE TABLE too_much AS SELECT generate_series(1, 10000)")
                    assert world.ask("SELECT pg_postmaster_start_time()") == began
                    os.unlink(disk / "balloon")
                    await world.received_more(200)
            report = await world.settle()
            assert report.terms == 1
            assert report.repeats == 0
            assert report.outcomes == {"delivered": report.received}
            tell(report)
