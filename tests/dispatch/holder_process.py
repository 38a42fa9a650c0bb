"""Starts `tests.dispatch.holder` and reads what it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.dispatch.seed import eventually


class Process:
    """A dispatcher in a process of its own, and what it has said so far."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.first_attempt = trio.Event()

    def began(self) -> list[str]:
        return [line[6:] for line in self.lines if line.startswith("begin ")]

    def ended(self) -> list[str]:
        return [line[4:] for line in self.lines if line.startswith("end ")]

    async def read(self) -> None:
        """Collect what it says, until it ends."""
        assert self.process.stdout is not None
        buffer = b""
        async for chunk in self.process.stdout:
            *lines, buffer = (buffer + chunk).split(b"\n")
            self.lines += [line.decode() for line in lines]
            if b"begin" in chunk:
                self.first_attempt.set()

    async def wait(self) -> None:
        with trio.fail_after(60):
            await self.process.wait()


@asynccontextmanager
async def holder(
    url: str, *, attempt_s: float = 0.0, grace_s: float = 30.0, poll_s: float = 0.05
) -> AsyncIterator[Process]:
    """A started holder; killed at the end if it still runs."""
    argv = [sys.executable, "-m", "tests.dispatch.holder", url, str(attempt_s), str(grace_s), str(poll_s)]
    async with trio.open_nursery() as nursery:
        started = Process(await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE))
        nursery.start_soon(started.read)
        try:
            await eventually(lambda: "ready" in started.lines)
            yield started
        finally:
            if started.process.returncode is None:
                started.process.kill()
            with trio.CancelScope(shield=True):
                await started.process.wait()
