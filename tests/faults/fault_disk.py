"""A full disk under the database: a tmpfs in a mount namespace of the server's own, filled to the last byte."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.faults.cluster import DbProcess, running_db, until
from tests.faults.world import Fakes, Tell, open_world

SIZE = "192m"  # a cluster of 40 MiB with a write-ahead log of 32 MiB, and room for what a run stores
# The log is kept small, so that it is the table files that meet the end of the disk and the server lives on.
_SETTINGS = "\nmin_wal_size = 32MB\nmax_wal_size = 32MB\nwal_keep_size = 0\n"
_MOUNT = (
    'set -e; cp -a "$1/postgres" "$1/copy"; mount -t tmpfs -o size=$2 tmpfs "$1/postgres"; chmod 700 "$1/postgres";'
    ' cp -a "$1/copy/." "$1/postgres/"; rm -rf "$1/copy"; shift 2; exec "$@"'
)


def _namespace() -> list[str]:
    """The command that gives a process mounts of its own, as root or as anybody."""
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        try:
            if subprocess.run([*command, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("a full disk was not tried: mount namespaces are refused here")


@contextmanager
def db_on_a_small_disk(folder: Path) -> Iterator[DbProcess]:
    """`pushd db` whose data lies on a file system of SIZE."""
    namespace = _namespace()
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
    with (disk / "balloon").open("wb", buffering=0) as balloon:
        block = bytes(2**20)
        while len(block) >= 4096:
            try:
                balloon.write(block)
            except OSError:
                block = block[: len(block) // 2]


async def test_full_disk_refuses_publishes_and_loses_nothing(
    fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    with db_on_a_small_disk(folder / "db") as db:
        disk = _disk(db)
        async with open_world(db, fakes, folder) as world:
            async with world.load(100):
                for _ in range(1 if is_short else 3):
                    await world.received_more(200)
                    failed = world.repeated
                    await trio.to_thread.run_sync(_fill, disk)
                    assert shutil.disk_usage(disk).free == 0
                    # Room inside pages that exist already is used up first.
                    await until(lambda failed=failed: world.repeated > failed + 20)
                    os.unlink(disk / "balloon")
                    await world.received_more(200)
            report = await world.settle()
            assert report.outcomes == {"delivered": report.received}
            tell(report)
