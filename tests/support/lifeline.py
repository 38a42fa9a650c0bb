"""Ends what a test run started, when the run itself is killed.

A process that dies by SIGKILL ends nobody, and the kernel's own signal for orphans follows the thread that started a
process, which for Trio is one that soon ends. So one small process waits at the end of a pipe that only the run holds:
when it closes, whatever is still noted gets its signal, and folders are removed once it is gone.
"""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

_GUARD = """
import os, shutil, sys, time
ends, folders = {}, set()
for line in sys.stdin:
    word, what, signum = line.rstrip("\\n").split("\\t")
    if word == "watch": ends[int(what)] = int(signum)
    elif word == "forget": ends.pop(int(what), None)
    elif word == "folder": folders.add(what)
    else: folders.discard(what)
for pid, signum in ends.items():
    try: os.kill(pid, signum)
    except OSError: pass
until = time.monotonic() + 30
while any(os.path.exists(f"/proc/{pid}") for pid in ends) and time.monotonic() < until:
    time.sleep(0.1)
for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
"""


class Lifeline:
    """The run's end of the pipe."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is the run's to handle
        )
        atexit.register(self._guard.communicate)

    def watch(self, pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send this signal to the process when the run is gone."""
        self._note("watch", pid, signum)

    def forget(self, pid: int) -> None:
        """The process is over; its number may soon be somebody else's."""
        self._note("forget", pid)

    @contextmanager
    def folder(self, folder: Path) -> Iterator[None]:
        """Remove the folder if the run is gone before the block ends."""
        self._note("folder", folder)
        yield
        self._note("keep", folder)

    def _note(self, word: str, what: object, signum: int = 0) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{word}\t{what}\t{int(signum)}\n".encode())
        self._guard.stdin.flush()


@lru_cache(maxsize=1)
def lifeline() -> Lifeline:
    """The one of this run."""
    return Lifeline()
