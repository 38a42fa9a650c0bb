"""The writing half of a connection under Trio, the same for server and client.

Everything that has come together since the last write is written before there is more, in instalments.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from trio.lowlevel import ParkingLot

from pushd.rpc.machine import INSTALMENT
from pushd.rpc.machine.endpoint import Endpoint

# A peer that does not read what it makes us write is not read from either.
_UNREAD_OUTPUT_BYTES = 512 * 1024


class Wire:
    """Writes a machine's output.

    Args:
        stall_s: how long the peer may take over an instalment.
    """

    def __init__(self, stream: trio.abc.Stream, machine: Endpoint, stall_s: float) -> None:
        self.stall_s = stall_s
        self._stream = stream
        self._machine = machine
        self._wake = trio.Event()
        self.writing = False  # judged here, an instalment at a time, and nowhere else
        self._progress = ParkingLot()

    def poke(self) -> None:
        """There may be new output, or a reason to end."""
        self._wake.set()

    async def wait_progress(self) -> None:
        """Returns when output was written next, or a call was ended."""
        await self._progress.park()

    def call_ended(self) -> None:
        """What a call has waiting may be gone without having been written."""
        self._progress.unpark_all()

    async def wait_uncongested(self) -> None:
        """Returns when so little waits for the peer that more of what it sends may be read."""
        while self.writing and self._machine.output_bytes > _UNREAD_OUTPUT_BYTES:
            await self._progress.park()

    async def write_until(self, done: Callable[[], bool]) -> None:
        """Writes until there is no output and `done()`.

        Raises:
            trio.BrokenResourceError: the peer is gone or takes nothing.
        """
        while True:
            data = self._machine.data_to_send()
            if data:
                self.writing = True
                for start in range(0, len(data), INSTALMENT):
                    await self._write(data[start : start + INSTALMENT])
                self.writing = False
                self._progress.unpark_all()
            elif done():
                return
            else:
                await self._wake.wait()
                self._wake = trio.Event()

    async def _write(self, data: bytes) -> None:
        with trio.move_on_after(self.stall_s) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError
