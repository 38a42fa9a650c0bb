"""One accepted connection under Trio: a reader, a writer, and a task for every call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio

from pushd.errors import Code, StatusError
from pushd.rpc.boundary import Boundary
from pushd.rpc.calls import Call, Reason
from pushd.rpc.machine import (
    AnswerDropped,
    CallCancelled,
    CallOpened,
    ConnectionFailed,
    HalfClosed,
    MachineEvent,
    MessageReceived,
    MessagesSpoilt,
    ServerMachine,
)
from pushd.rpc.methods import is_public
from pushd.rpc.rounds import PIECE_BYTES, Rounds
from pushd.rpc.settings import RpcSettings
from pushd.rpc.wire import Wire
from pushd.telemetry import Event, get_logger

_READ_BYTES = 64 * 1024
# After our last word the peer may still be sending. Closing at once would answer that with a TCP reset, which can
# destroy the last word in flight; so its bytes are read and dropped for this long, or until it closes.
_LINGER_S = 0.5

log = get_logger()


class ServerConnection:
    """Moves bytes between a stream and a machine, and turns the machine's events into calls.

    Args:
        stream: the accepted stream, TLS included.
        handshake_deadline: when the peer's preface and SETTINGS have to be here, on Trio's clock.
        rounds: shares the event loop among the connections.
        call_ended: told after every call, for the server's count of running ones.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        machine: ServerMachine,
        boundary: Boundary,
        settings: RpcSettings,
        peer: str,
        handshake_deadline: float,
        rounds: Rounds,
        call_ended: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.wire = Wire(stream, machine, settings.stall_s)
        self.last_active = trio.current_time()
        self._stream = stream
        self._boundary = boundary
        self._settings = settings
        self._peer = peer
        self._handshake_deadline = handshake_deadline
        self._rounds = rounds
        self._call_ended = call_ended
        self._calls: dict[int, Call] = {}
        self._leaving = False  # the last word is written
        machine.on_evicted = self._evicted

    def __repr__(self) -> str:
        return f"<ServerConnection calls={len(self._calls)} {self.machine!r}>"

    @property
    def calls(self) -> int:
        """Calls being served."""
        return len(self._calls)

    @property
    def is_spare(self) -> bool:
        """Whether no call runs here but such as need no credential."""
        return all(is_public(call.path) for call in self._calls.values())

    async def run(self) -> None:
        """Serves until the peer leaves, breaks the protocol, falls silent, or a drain is over."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_and_leave, nursery)
                nursery.start_soon(self._write_and_leave, nursery)
        finally:
            self.machine.drop_all()

    def drain(self) -> None:
        """Takes no new streams, ends streaming calls, and leaves once nothing runs."""
        self.machine.goaway()
        for call in self._calls.values():
            if self._boundary.is_streaming(call.path):
                call.cancel(Reason.DRAIN)
        self.wire.poke()

    def make_room(self) -> None:
        """Ends every call and leaves, for another connection's sake."""
        for call in self._calls.values():
            call.end(_overloaded())
        self.drain()

    def cancel_calls(self, reason: Reason) -> None:
        """Ends every call."""
        for call in self._calls.values():
            call.cancel(reason)

    # --- writing

    async def _write_and_leave(self, nursery: trio.Nursery) -> None:
        try:
            await self.wire.write_until(self._is_over)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.cancel_calls(Reason.CONNECTION)
            nursery.cancel_scope.cancel(reason="cannot write to the peer")
        else:
            self._leaving = True
            self.cancel_calls(Reason.CONNECTION)
            nursery.cancel_scope.deadline = trio.current_time() + _LINGER_S

    def _is_over(self) -> bool:
        return self.machine.closed or (self.machine.draining and self.machine.idle)

    # --- reading

    async def _read_and_leave(self, nursery: trio.Nursery) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._read(nursery)
        self.cancel_calls(Reason.CONNECTION)
        nursery.cancel_scope.cancel(reason="the peer left")

    async def _read(self, nursery: trio.Nursery) -> None:
        while data := await self._receive():
            self.last_active = trio.current_time()
            if self._leaving:
                continue
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                await self._rounds.take(len(piece))
                self._work_off(piece, nursery)
                await self.wire.wait_uncongested()

    def _work_off(self, data: bytes, nursery: trio.Nursery) -> None:
        opened: list[Call] = []
        for event in self.machine.receive_data(data, self.last_active):
            self._handle(event, opened)
        for call in opened:
            if call.reason is None:  # else it was opened and given up in one piece of input
                nursery.start_soon(self._serve, call)
            else:
                self._forget(call)
        self.wire.poke()

    async def _receive(self) -> bytes:
        """Bytes from the peer; empty when it has closed or has not given a sign of life in time."""
        settings = self._settings
        if not self.machine.handshaken:
            with trio.move_on_at(self._handshake_deadline):
                return bytes(await self._stream.receive_some(_READ_BYTES))
            return b""
        with trio.move_on_after(settings.idle_s):
            return bytes(await self._stream.receive_some(_READ_BYTES))
        if not self.machine.closed:
            self.machine.ping()
            self.wire.poke()
        with trio.move_on_after(settings.ping_s):
            return bytes(await self._stream.receive_some(_READ_BYTES))
        return b""

    def _handle(self, event: MachineEvent, opened: list[Call]) -> None:
        if isinstance(event, CallOpened):
            call = Call(self.machine, self.wire, event.stream_id, event.request, self._peer)
            self._calls[event.stream_id] = call
            opened.append(call)
        elif isinstance(event, ConnectionFailed):
            log.debug(Event.RPC_PEER_DROPPED, reason=event.reason)
            self.cancel_calls(Reason.CONNECTION)
        elif isinstance(event, MessageReceived | HalfClosed | MessagesSpoilt | CallCancelled | AnswerDropped):
            running = self._calls.get(event.stream_id)
            if running is not None:
                _tell(running, event)

    def _evicted(self, event: MachineEvent) -> None:
        self._handle(event, [])
        self.wire.poke()

    # --- calls

    async def _serve(self, call: Call) -> None:
        try:
            await self._boundary.serve(call)
        finally:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        del self._calls[call.stream_id]
        self.machine.release(call.stream_id)
        self._call_ended()
        if self.machine.draining:
            self.wire.poke()  # the writer may have been waiting for the last call


def _tell(call: Call, event: MessageReceived | HalfClosed | MessagesSpoilt | CallCancelled | AnswerDropped) -> None:
    match event:
        case MessageReceived():
            call.put_message(event.payload)
        case HalfClosed():
            call.put_end()
        case MessagesSpoilt():
            call.put_fault(event.fault)
        case CallCancelled():
            call.cancel(Reason.PEER)
        case AnswerDropped():
            call.end(_overloaded())


def _overloaded() -> StatusError:
    return StatusError(Code.UNAVAILABLE, "server is overloaded")
