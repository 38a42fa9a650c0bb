"""The server's side of a gRPC connection."""

from __future__ import annotations

import h2.events as h2e
from h2.errors import ErrorCodes

from pushd.errors import Code
from pushd.rpc.machine.budget import ByteBudget
from pushd.rpc.machine.encoder import PlainEncoder
from pushd.rpc.machine.endpoint import Endpoint, Limits, Stream
from pushd.rpc.machine.events import CallCancelled, CallOpened, HalfClosed, MachineEvent, MessagesSpoilt
from pushd.rpc.machine.framing import Fault
from pushd.rpc.machine.headers import MalformedRequest, RawHeaders, Status, parse_request, status_headers

_OPENING: RawHeaders = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_OK = Status(Code.OK)
_OK_TRAILERS: RawHeaders = [(b"grpc-status", b"0")]


class ServerMachine(Endpoint):
    """Receives calls and answers them.

    A call begins with `CallOpened`. Whoever serves it calls `start`, `send` and `finish`, and in any case `release`
    when it has stopped working on it: until then the call counts, even if its stream is long gone, so that a peer which
    opens and resets cannot pile up work. Handlers need a moment to notice a reset, so twice as many calls may run as
    streams may be open.
    """

    def __init__(self, limits: Limits, budget: ByteBudget, unsent: ByteBudget | None = None) -> None:
        super().__init__(limits, budget, unsent=unsent, client_side=False)
        self._encoder = PlainEncoder()
        self._handlers |= {h2e.RequestReceived: self._request_received, h2e.ConnectionTerminated: self._unpaid_frame}
        self._running: set[int] = set()
        self._started: set[int] = set()
        self._free_refusals = 2 * limits.max_concurrent_streams
        self.draining = False

    @property
    def running(self) -> int:
        """Calls opened and not released."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether no call runs and every answer is out."""
        return not self._running and not self._streams

    def start(self, stream_id: int, request_id: bytes) -> None:
        """Sends the response headers of a call."""
        if stream_id in self._streams and not self.closed:
            self._started.add(stream_id)
            self._h2.send_block(stream_id, self._encoder.encode([*_OPENING, (b"x-request-id", request_id)]))

    def send(self, stream_id: int, payload: bytes) -> bool:
        """Queues one response message; `start` came before. False when too much waits for peers already."""
        stream = self._streams.get(stream_id)
        return stream is None or self.closed or self._send(stream, payload)

    def finish(self, stream_id: int, status: Status, request_id: bytes, *, http_status: int = 200) -> None:
        """Ends a call after everything queued.

        A call that was not started gets its status and `http_status` in one header block, as gRPC calls Trailers-Only.
        """
        stream = self._streams.get(stream_id)
        if stream is None or self.closed:
            return
        if stream_id in self._started:
            self._finish(stream, _OK_TRAILERS if status is _OK else status_headers(status))
            return
        opening = _OPENING if http_status == 200 else [(b":status", b"%d" % http_status), _OPENING[1]]
        self._finish(stream, [*opening, (b"x-request-id", request_id), *status_headers(status)])

    def release(self, stream_id: int) -> None:
        """Nobody works on the call any more."""
        self._running.discard(stream_id)

    def goaway(self) -> None:
        """Tells the peer that no stream after the last one so far will be served."""
        if not self.draining and not self.closed:
            self.draining = True
            self._h2.announce_goaway(self._h2.highest_inbound_stream_id)

    # --- h2's events

    def _request_received(self, event: h2e.RequestReceived, events: list[MachineEvent]) -> None:
        stream_id: int = event.stream_id
        limit = self._limits.max_concurrent_streams
        if len(self._streams) >= limit or len(self._running) >= 2 * limit:
            self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
            if self._free_refusals and not self.settings_acknowledged:  # the peer cannot know yet
                self._free_refusals -= 1
            else:
                self._spend_patience(events)
            return
        try:
            request = parse_request(event.headers)
        except MalformedRequest:
            self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)
            self._spend_patience(events)
            return
        self._open(stream_id)
        self._running.add(stream_id)
        events.append(CallOpened(stream_id, request))

    def _stream_ended(self, event: h2e.StreamEnded, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        stream.remote_ended = True
        if stream.decoder.partial and not stream.spoilt:
            events.append(MessagesSpoilt(stream.id, Fault.TRUNCATED))
        events.append(HalfClosed(stream.id))

    def _stream_reset(self, event: h2e.StreamReset, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        self._drop(stream)
        events.append(CallCancelled(stream.id))
        self._spend_patience(events)

    # --- output

    def _end(self, stream: Stream) -> None:
        self._h2.send_block(stream.id, self._encoder.encode(stream.trailers or []), end_stream=True)
        self._earn()
        if not stream.remote_ended:
            # The answer is complete; RFC 9113 §8.1 lets us tell the peer to stop sending its request.
            self._reset(stream.id, ErrorCodes.NO_ERROR)
        self._drop(stream)
        self._settle()

    def _drop(self, stream: Stream) -> None:
        self._started.discard(stream.id)
        super()._drop(stream)
