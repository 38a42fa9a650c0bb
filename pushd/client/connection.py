"""One purpose's connection to the backend: the edge's client machine with a socket, a clock and callers."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import ByteStream
from attrs import define, field, frozen

import pushd
from pushd.errors import Code
from pushd.rpc.machine import ByteBudget, CallEnded, ClientMachine, Limits, MachineEvent, MessageReceived, RawHeaders

# hpack writes every header into its debug log, `authorization` included. An app that turns on all of its logs must not
# find a token in them.
logging.getLogger("hpack").setLevel(logging.INFO)

QUIET_S = 10.0  # an unused connection is closed, a used one is pinged, and given up after another such time
_LIMITS = Limits(
    max_concurrent_streams=100,
    max_receive_message_bytes=25 * 2**20,  # the transport's ceiling in both directions
    max_header_list_bytes=16 * 1024,
    connection_receive_bytes=64 * 2**20,
    abuse_burst=200,
    abuse_per_s=100.0,
)
LOSSES = (OSError, ssl.SSLError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


@frozen
class Outcome:
    """How a call ended; `unprocessed` if the server promises not to have seen it."""

    code: Code
    payload: bytes | None = field(default=None, repr=False)
    unprocessed: bool = False


UNREACHED = Outcome(Code.UNAVAILABLE)


class Line:
    """The present connection of one purpose, replaced when it takes no more calls."""

    def __init__(self, connect: Callable[[], Awaitable[Connection | None]]) -> None:
        self._connect = connect
        self._connecting = anyio.Lock()
        self._connection: Connection | None = None
        self._failures = 0  # of attempts to connect

    async def call(self, path: str, payload: bytes, metadata: RawHeaders) -> Outcome:
        """One unary call on the present connection or a new one, with the caller's deadline as its time-out."""
        outcome = UNREACHED
        failures = self._failures
        for _ in range(2):
            async with self._connecting:
                if self._connection is None or not self._connection.usable:
                    if self._failures > failures:
                        # Whoever has waited for an attempt shares its failure: one after another, a hundred messages
                        # would wait for a hundred attempts.
                        return UNREACHED
                    self._connection = await self._connect()
                    if self._connection is None:
                        self._failures += 1
                connection = self._connection
            if connection is None:
                return UNREACHED
            outcome = await connection.call(path, payload, metadata)
            # A server that is going away says which calls it has not seen; those may be made again elsewhere, once.
            if not outcome.unprocessed:
                break
        return outcome


@define(eq=False)
class _Call:
    ended: anyio.Event
    payload: bytes | None = field(default=None, repr=False)
    outcome: Outcome = UNREACHED


class Connection:
    """One socket, with a task that reads and one that writes, so that a caller who gives up never cuts a frame."""

    def __init__(self, stream: ByteStream, *, authority: str, scheme: str) -> None:
        self._stream = stream
        self._machine = ClientMachine(
            _LIMITS,
            ByteBudget(_LIMITS.connection_receive_bytes),
            authority=authority,
            scheme=scheme,
            user_agent=f"pushd-client/{pushd.__version__}",
        )
        self._calls: dict[int, _Call] = {}
        self._output = anyio.Event()
        self._room = anyio.Event()
        self._over = False  # set in the same step as the decision to end, so that no call slips in behind it

    @property
    def usable(self) -> bool:
        """Whether another call may be made."""
        return self._machine.usable and not self._over

    async def call(self, path: str, payload: bytes, metadata: RawHeaders) -> Outcome:
        """One unary call, with the caller's deadline as its time-out."""
        while not self._machine.has_room:
            if not self.usable:
                return UNREACHED
            await self._room.wait()
        if not self.usable:
            return UNREACHED
        deadline = anyio.current_effective_deadline()
        timeout_s = None if deadline == math.inf else max(deadline - anyio.current_time(), 0.0)
        stream_id = self._machine.open_call(path, timeout_s, metadata)
        call = self._calls[stream_id] = _Call(anyio.Event())
        self._machine.send(stream_id, payload)
        self._machine.half_close(stream_id)
        self._output.set()
        try:
            await call.ended.wait()
        finally:
            if self._calls.pop(stream_id, None) is not None:
                self._machine.cancel(stream_id)
                self._output.set()
                self._made_room()
        return call.outcome

    async def run(self) -> None:
        """Keep the connection until it is lost, refused, or of no use."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, tasks.cancel_scope)
                await self._read()
                tasks.cancel_scope.cancel()
        finally:
            self._act(self._machine.lost())
            self._made_room()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            await self._read_on()
        finally:
            self._over = True

    async def _read_on(self) -> None:
        pinged = False
        while not (self._machine.going_away and not self._calls):
            with anyio.move_on_after(QUIET_S) as quiet:
                try:
                    data = await self._stream.receive()
                except LOSSES:
                    return
            if quiet.cancelled_caught:
                if pinged or not self._calls:
                    return
                self._machine.ping()
                pinged = True
            else:
                pinged = False
                self._act(self._machine.receive_data(data, anyio.current_time()))
            self._output.set()
            if self._machine.closed:
                return

    async def _write(self, scope: anyio.CancelScope) -> None:
        while True:
            self._output = anyio.Event()
            while data := self._machine.data_to_send():
                try:
                    await self._stream.send(data)
                except LOSSES:
                    self._over = True
                    scope.cancel()
                    return
            await self._output.wait()

    def _act(self, events: list[MachineEvent] | list[CallEnded]) -> None:
        for event in events:
            match event:
                case MessageReceived(stream_id, payload):
                    self._machine.consumed(stream_id, payload)
                    if stream_id in self._calls:
                        self._calls[stream_id].payload = payload
                case CallEnded(stream_id, status, unprocessed):
                    call = self._calls.pop(stream_id, None)
                    if call is not None:
                        # What was concluded here, or from a proxy's HTTP status, is not the backend's judgement: a
                        # load balancer without a route answers 404, and that must not stop notifications for good.
                        code = status.code if status.from_peer else Code.UNAVAILABLE
                        call.outcome = Outcome(code, call.payload, unprocessed)
                        call.ended.set()
                    self._made_room()
                case _:
                    pass  # a failed connection shows in `closed`, one that goes away in `going_away`

    def _made_room(self) -> None:
        self._room.set()
        self._room = anyio.Event()
