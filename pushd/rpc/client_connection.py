"""One connection of a channel: its reader, its writer, and the calls on it."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import trio

from pushd.errors import Code
from pushd.rpc.machine import CallEnded, ClientMachine, MessageReceived, RawHeaders, Status
from pushd.rpc.wire import Wire

_READ_BYTES = 64 * 1024
_CLOSED = Status(Code.CANCELLED, "the call was closed here")


class Inbox:
    """What has arrived for one call."""

    __slots__ = ("_wake", "ended", "payloads")

    def __init__(self) -> None:
        self.payloads: deque[bytes] = deque()
        self.ended: CallEnded | None = None
        self._wake: trio.Event | None = None

    def put(self, event: MessageReceived | CallEnded) -> None:
        """Takes one event and wakes the reader."""
        if isinstance(event, MessageReceived):
            self.payloads.append(event.payload)
        else:
            self.ended = event
        if self._wake is not None:
            self._wake.set()

    async def wait(self) -> None:
        """Returns after the next `put`."""
        self._wake = trio.Event()
        await self._wake.wait()
        self._wake = None


class ClientConnection:
    """Drives a `ClientMachine` over a stream until either side ends it.

    Args:
        idle_s: silence with calls running, after which the server is pinged.
        ping_s: how long it may then stay silent.
    """

    def __init__(
        self, stream: trio.abc.Stream, machine: ClientMachine, *, idle_s: float, ping_s: float, stall_s: float
    ) -> None:
        self.machine = machine
        self.wire = Wire(stream, machine, stall_s)
        self._stream = stream
        self._idle_s = idle_s
        self._ping_s = ping_s
        self._calls: dict[int, Inbox] = {}
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<ClientConnection calls={len(self._calls)} {self.machine!r}>"

    async def run(self) -> None:
        """Serves the calls; returns when the connection is over, with every call ended."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_and_leave, nursery.cancel_scope)
                nursery.start_soon(self._write_and_leave, nursery.cancel_scope)
        finally:
            for ended in self.machine.lost():
                self._deliver(ended)
            self._notify()
            await trio.aclose_forcefully(self._stream)

    async def wait_ready(self) -> bool:
        """Returns when the server's settings are known; False when the connection was lost before."""
        while not self.machine.handshaken and self.machine.usable:
            await self.wait_change()
        return self.machine.usable

    async def wait_change(self) -> None:
        """Returns after the next thing that happens to the connection or a call on it."""
        await self._changed.wait()

    async def wait_room(self) -> bool:
        """Returns when the server allows one more call; False when the connection takes no more calls at all."""
        while self.machine.usable and not self.machine.has_room:
            await self.wait_change()
        return self.machine.usable

    def open_call(self, path: str, timeout_s: float | None, metadata: RawHeaders) -> tuple[int, Inbox]:
        """Opens a call at once; `wait_room` has just returned True."""
        stream_id = self.machine.open_call(path, timeout_s, metadata)
        inbox = self._calls[stream_id] = Inbox()
        self.wire.poke()
        return stream_id, inbox

    def close_call(self, stream_id: int) -> None:
        """Forgets a call, cancelling it on the server if it has not ended; whoever waits for it is told."""
        inbox = self._calls.pop(stream_id, None)
        if inbox is not None:
            self.machine.cancel(stream_id)
            if inbox.ended is None:
                inbox.put(CallEnded(stream_id, _CLOSED))
        self.wire.poke()
        self._notify()

    def retire(self) -> None:
        """No further calls; the connection ends after the present ones."""
        self.machine.going_away = True
        self.wire.poke()

    def _deliver(self, event: MessageReceived | CallEnded) -> None:
        inbox = self._calls.get(event.stream_id)
        if inbox is not None:
            inbox.put(event)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _is_over(self) -> bool:
        return self.machine.closed or (self.machine.going_away and not self.machine.open_calls)

    async def _write_and_leave(self, scope: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.wire.write_until(self._is_over)
        scope.cancel(reason="nothing more to write")

    async def _read_and_leave(self, scope: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self._receive():
                for event in self.machine.receive_data(data, trio.current_time()):
                    if isinstance(event, MessageReceived | CallEnded):
                        self._deliver(event)
                self._notify()
                self.wire.poke()
                await self.wire.wait_uncongested()
        scope.cancel(reason="the server left")

    async def _receive(self) -> bytes:
        """Bytes from the server; empty when it left, or is silent although calls wait for it."""
        while True:
            with trio.move_on_after(self._idle_s):
                return bytes(await self._stream.receive_some(_READ_BYTES))
            if self._calls:
                self.machine.ping()
                self.wire.poke()
                with trio.move_on_after(self._ping_s):
                    return bytes(await self._stream.receive_some(_READ_BYTES))
                return b""
