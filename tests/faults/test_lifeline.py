"""A killed run leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import trio

from tests.faults.cluster import until

_RUN = """
import subprocess, sys, time
from pathlib import Path
from tests.support.lifeline import lifeline
one, other = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
lifeline().watch(one.pid)
lifeline().watch(other.pid)
lifeline().forget(other.pid)
with lifeline().folder(Path(sys.argv[1])):
    with lifeline().folder(Path(sys.argv[2])):
        pass
    print(one.pid, other.pid, flush=True)
    time.sleep(1000)
"""


async def test_killed_run_takes_along_what_it_still_watched(tmp_path: Path) -> None:
    folders = [tmp_path / "watched", tmp_path / "kept"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", _RUN, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as run:
        assert run.stdout is not None
        line = await trio.to_thread.run_sync(run.stdout.readline)
        watched, forgotten = map(int, line.split())
        run.kill()
    try:
        await until(lambda: not _lives(watched) and not folders[0].exists())
        assert _lives(forgotten)
        assert folders[1].exists()
    finally:
        os.kill(forgotten, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # whoever inherited it may take a while to collect it
