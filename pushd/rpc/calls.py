"""One call as the task that serves it sees it, under Trio."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from uuid import uuid4

import trio

from pushd.errors import Code, StatusError
from pushd.rpc.machine import INSTALMENT, Fault, Request, ServerMachine, Status
from pushd.rpc.wire import Wire

# Of one stream's messages, this much may wait for the peer before its handler waits too.
_WAITING_BYTES = 64 * 1024
# A call that holds more than this, about the window that every stream begins with, has to get on at a least rate. With
# less, any progress counts, so that the smallest message arrives over the slowest line.
_MUCH_BYTES = 64 * 1024


class Reason(enum.Enum):
    """Why a call was cancelled from outside; its deadline needs no reason."""

    PEER = "the caller gave up"
    CONNECTION = "the connection is gone"
    DRAIN = "server is shutting down"


class Call:
    """A call being served.

    Handlers may read `path`, `peer` (an address, private) and `deadline` (Trio's clock, infinite when the caller set
    none) of `current_call()`.
    """

    __slots__ = (
        "_ended",
        "_fault",
        "_finished",
        "_inbox",
        "_machine",
        "_wake",
        "_wire",
        "late",
        "peer",
        "reason",
        "request",
        "request_bytes",
        "request_id",
        "response_bytes",
        "scope",
        "stream_id",
        "verdict",
    )

    def __init__(self, machine: ServerMachine, wire: Wire, stream_id: int, request: Request, peer: str) -> None:
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._fault: Fault | None = None
        self._finished = False
        self._machine = machine
        self._wake: trio.Event | None = None
        self._wire = wire
        self.late = machine.draining  # the peer was told that this call is not served
        self.peer = peer
        self.reason: Reason | None = None
        self.request = request
        self.request_bytes = 0
        self.request_id = str(uuid4())
        self.response_bytes = 0
        timeout_s = request.timeout_s
        self.scope = trio.CancelScope(deadline=math.inf if timeout_s is None else trio.current_time() + timeout_s)
        self.stream_id = stream_id
        self.verdict: StatusError | None = None

    def __repr__(self) -> str:
        return f"<Call {self.request_id} reason={self.reason} finished={self._finished}>"

    @property
    def path(self) -> str:
        """`/package.Service/Method` as the caller wrote it."""
        return self.request.path

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's metadata, for the credential's sake; repeated names are joined by a comma.

        Empty from the moment that the request itself is looked at. A few bytes on the wire can be 45 KB of headers, and
        calls that anybody may make can be open in any number for any time.
        """
        return self.request.headers

    def forget_headers(self) -> None:
        """Nobody needs them any more."""
        self.request.headers.clear()

    @property
    def deadline(self) -> float:
        """When the call ends DEADLINE_EXCEEDED, on Trio's clock."""
        return self.scope.deadline

    # --- from the connection

    def put_message(self, payload: bytes) -> None:
        """A request message arrived."""
        self._inbox.append(payload)
        self._awake()

    def put_end(self) -> None:
        """The last request message has arrived."""
        self._ended = True
        self._awake()

    def put_fault(self, fault: Fault) -> None:
        """No further request message can be read."""
        self._fault = fault
        self._awake()

    def cancel(self, reason: Reason) -> None:
        """Ends the call's handler at its next checkpoint. The first reason counts."""
        if self.reason is None:
            self.reason = reason
        self.scope.cancel(reason=reason.value)
        self._wire.call_ended()

    def _awake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def end(self, verdict: StatusError) -> None:
        """Ends the call with this status at its handler's next checkpoint, unless something else has ended it before.

        For a handler that cannot raise it, because it is kept by a peer that does not take what was sent.
        """
        if self.reason is None and self.verdict is None:
            self.verdict = verdict
            self.scope.cancel(reason=verdict.message)
            self._wire.call_ended()

    # --- to the handler

    async def receive(self) -> bytes | None:
        """The next request message, or None after the last one.

        Raises:
            RequestFault: the request's bytes are not usable.
            StatusError: the peer stalled inside a message.
        """
        while True:
            if self._inbox:
                payload = self._inbox.popleft()
                self.request_bytes += len(payload)
                self._machine.consumed(self.stream_id, payload)
                self._wire.poke()
                return payload
            if self._fault is not None:
                raise RequestFault(self._fault)
            if self._ended:
                return None
            await self._wait_more(inside=self._machine.partial(self.stream_id))

    async def receive_only(self) -> bytes:
        """The one message of a request that has to have exactly one.

        Raises:
            RequestFault: as for `receive`, or the number of messages is not one.
            StatusError: the peer stalled before the request was complete.
        """
        self.forget_headers()
        while not self._ended and self._fault is None and len(self._inbox) < 2:
            await self._wait_more(inside=True)
        if self._fault is not None:
            raise RequestFault(self._fault)
        if len(self._inbox) != 1:
            raise RequestFault(None)
        payload = self._inbox.popleft()
        self.request_bytes = len(payload)
        # Given back when the call ends: its bytes live on in the decoded message.
        return payload

    async def _wait_more(self, *, inside: bool) -> None:
        """Waits for anything new; inside a message, not longer than the peer may stall.

        A peer stalls when nothing comes on this stream. When the stream holds much, it also stalls when less than an
        instalment comes on the connection: of the connection, because its streams share one line.
        """
        machine = self._machine
        self._wake = trio.Event()
        before, received = machine.progress(self.stream_id), machine.received
        with trio.move_on_after(self._wire.stall_s) as scope:
            await self._wake.wait()
        self._wake = None
        after = machine.progress(self.stream_id)
        if not (scope.cancelled_caught and inside) or before is None or after is None:
            return
        drips = machine.held_bytes(self.stream_id) > _MUCH_BYTES and machine.received - received < INSTALMENT
        if after == before or drips:
            raise StatusError(Code.UNAVAILABLE, "request stalled")

    def begin(self) -> None:
        """Sends the response headers."""
        self._machine.start(self.stream_id, self.request_id.encode("ascii"))

    def send_nowait(self, payload: bytes) -> None:
        """Queues a response message.

        Raises:
            StatusError: too many response bytes wait for peers that do not take them.
        """
        if not self._machine.send(self.stream_id, payload):
            raise StatusError(Code.UNAVAILABLE, "server is overloaded")
        self.response_bytes += len(payload)
        self._wire.poke()

    async def wait_room(self, limit: int = _WAITING_BYTES) -> None:
        """Waits until at most `limit` bytes of this call's messages wait for the peer.

        Raises:
            StatusError: the peer takes nothing for too long, or too little where much waits; see `_wait_more`.
        """
        if self.reason is not None or self.verdict is not None:
            # A stream that is gone has room for ever, and its handler need not wait for anything else.
            await trio.lowlevel.checkpoint_if_cancelled()
        while (before := self._machine.waiting_bytes(self.stream_id)) > limit:
            sent = self._machine.sent
            with trio.move_on_after(self._wire.stall_s):
                while not self._gets_on(before, sent):
                    await self._wire.wait_progress()
                continue
            if not self._wire.writing:  # else the peer takes what was written before, or the connection ends
                raise StatusError(Code.UNAVAILABLE, "response stalled")

    def _gets_on(self, before: int, sent: int) -> bool:
        """Whether the peer has taken something since `before` bytes of this call waited."""
        waiting = self._machine.waiting_bytes(self.stream_id)
        return waiting != before and (waiting <= _MUCH_BYTES or self._machine.sent - sent >= INSTALMENT)

    async def part(self) -> None:
        """Waits until the peer has taken the finished call's last message and status, and resets it if it does not."""
        try:
            await self.wait_room(0)
        except StatusError:
            self._machine.reset(self.stream_id)
            self._wire.poke()

    def finish(self, status: Status, http_status: int = 200) -> None:
        """Ends the call. A second status cannot be sent: the stream is then reset if it still has something to say."""
        if not self._finished:
            self._finished = True
            self._machine.finish(self.stream_id, status, self.request_id.encode("ascii"), http_status=http_status)
        elif status.code is not Code.OK:
            self._machine.reset(self.stream_id)
        self._wire.poke()


class RequestFault(Exception):
    """The request's bytes are not usable; None as fault means the number of messages is wrong."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(fault)
        self.fault = fault


_current: ContextVar[Call] = ContextVar("pushd_rpc_call")


def current_call() -> Call:
    """The call that the running handler serves.

    Raises:
        LookupError: no call is being served here.
    """
    return _current.get()


def enter_call(call: Call) -> None:
    """Makes `call` the current one of this task and the tasks it starts: its handler runs from here on."""
    call.forget_headers()
    _current.set(call)
