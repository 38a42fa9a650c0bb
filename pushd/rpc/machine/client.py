"""The client's side of a gRPC connection."""

from __future__ import annotations

import h2.events as h2e
from h2.errors import ErrorCodes
from hpack import NeverIndexedHeaderTuple

from pushd.errors import Code
from pushd.rpc.machine.budget import ByteBudget
from pushd.rpc.machine.endpoint import Endpoint, Limits, Stream
from pushd.rpc.machine.events import CallEnded, GoAwayReceived, MachineEvent
from pushd.rpc.machine.framing import Fault
from pushd.rpc.machine.headers import RawHeaders, Status, format_timeout, parse_status, status_of_http

_LOST = Status(Code.UNAVAILABLE, "the connection was lost")
_GOAWAY = Status(Code.UNAVAILABLE, "the server is going away")
_REFUSED = Status(Code.UNAVAILABLE, "the server refused the stream")
_NO_STATUS = Status(Code.INTERNAL, "the server ended the call without a status")
_CANCELLED = Status(Code.CANCELLED, "the server reset the stream")
_RESET = Status(Code.INTERNAL, "the server reset the stream")
_CALM = Status(Code.UNAVAILABLE, "the server asks for calm")
_FAULTS = {
    Fault.TOO_LARGE: Status(Code.OUT_OF_RANGE, "response is too large"),
    Fault.COMPRESSED: Status(Code.UNIMPLEMENTED, "response is compressed"),
    Fault.OVERLOADED: Status(Code.UNAVAILABLE, "too many response bytes are held"),
}
_SPOILT = Status(Code.INTERNAL, "response is malformed")
_OF_RESET: dict[int, Status] = {
    ErrorCodes.REFUSED_STREAM: _REFUSED,
    ErrorCodes.CANCEL: _CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: _CALM,
}
_MAX_STREAM_ID = 2**31 - 1


class ClientMachine(Endpoint):
    """Opens calls and reads their answers. A call ends with exactly one `CallEnded`, unless it was cancelled here.

    Args:
        authority: `host:port`, sent with every call.
        scheme: http or https.
        user_agent: sent with every call.
    """

    def __init__(self, limits: Limits, budget: ByteBudget, *, authority: str, scheme: str, user_agent: str) -> None:
        super().__init__(limits, budget, client_side=True)
        self._handlers |= {
            h2e.ResponseReceived: self._response_received,
            h2e.TrailersReceived: self._trailers_received,
            h2e.ConnectionTerminated: self._goaway_received,
        }
        self._opening: RawHeaders = [
            (b":method", b"POST"),
            (b":scheme", scheme.encode("ascii")),
            (b":authority", authority.encode("ascii")),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", user_agent.encode("ascii")),
        ]
        self._next_id = 1
        self.going_away = False

    @property
    def usable(self) -> bool:
        """Whether the connection takes further calls, now or when one of the present ones has ended."""
        return not (self.closed or self.going_away or self._next_id > _MAX_STREAM_ID)

    @property
    def has_room(self) -> bool:
        """Whether the server allows one more call at this moment."""
        return len(self._streams) < self._h2.remote_settings.max_concurrent_streams

    @property
    def open_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._streams)

    def open_call(self, path: str, timeout_s: float | None, metadata: RawHeaders = []) -> int:  # noqa: B006 - read only
        """Sends a call's headers; the caller looked at `usable` and `has_room`. Returns the stream's id.

        `authorization` is marked so that no intermediary keeps it in a compression table (RFC 7541 §7.1.3).
        """
        stream_id, self._next_id = self._next_id, self._next_id + 2
        headers = [(b":path", path.encode("ascii")), *self._opening]
        if timeout_s is not None:
            headers.append((b"grpc-timeout", format_timeout(timeout_s)))
        headers += [
            NeverIndexedHeaderTuple(name, value) if name == b"authorization" else (name, value)
            for name, value in metadata
        ]
        self._h2.send_headers(stream_id, headers)
        self._open(stream_id)
        return stream_id

    def send(self, stream_id: int, payload: bytes) -> None:
        """Queues one request message."""
        stream = self._streams.get(stream_id)
        if stream is not None and not self.closed:
            self._send(stream, payload)

    def half_close(self, stream_id: int) -> None:
        """No further request message follows."""
        stream = self._streams.get(stream_id)
        if stream is not None and not self.closed:
            self._finish(stream, [])

    def cancel(self, stream_id: int) -> None:
        """Gives the call up; no event follows."""
        self.reset(stream_id, ErrorCodes.CANCEL)

    def lost(self) -> list[CallEnded]:
        """The socket is gone: ends every call."""
        ended = [CallEnded(stream_id, _LOST) for stream_id in self._streams]
        self.drop_all()
        return ended

    # --- h2's events

    def _response_received(self, event: h2e.ResponseReceived, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        headers = dict(event.headers)
        http_status = headers.get(b":status", b"")
        is_grpc = headers.get(b"content-type", b"").startswith(b"application/grpc")
        if event.stream_ended is not None or http_status != b"200" or not is_grpc:
            number = int(http_status) if http_status.isdigit() and len(http_status) == 3 else 0
            self._conclude(stream, parse_status(event.headers) or status_of_http(number), events)

    def _trailers_received(self, event: h2e.TrailersReceived, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            status = parse_status(event.headers) or _NO_STATUS
            if stream.decoder.partial and status.code is Code.OK:
                status = _SPOILT
            self._conclude(stream, status, events, remote_ended=True)

    def _stream_ended(self, event: h2e.StreamEnded, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:  # after headers or trailers that ended the stream it is gone already
            self._conclude(stream, _NO_STATUS, events, remote_ended=True)

    def _stream_reset(self, event: h2e.StreamReset, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            status = _OF_RESET.get(event.error_code or 0, _RESET)
            self._drop(stream)
            events.append(CallEnded(stream.id, status, unprocessed=status is _REFUSED))

    def _goaway_received(self, event: h2e.ConnectionTerminated, events: list[MachineEvent]) -> None:
        self.going_away = True
        events.append(GoAwayReceived())
        for stream in [s for s in self._streams.values() if s.id > (event.last_stream_id or 0)]:
            self._drop(stream)
            events.append(CallEnded(stream.id, _GOAWAY, unprocessed=True))

    def _spoil(self, stream: Stream, fault: Fault, events: list[MachineEvent]) -> None:
        super()._spoil(stream, fault, events)
        del events[-1:]  # the caller learns of it as the end of its call
        self._conclude(stream, _FAULTS.get(fault, _SPOILT), events)

    def _conclude(
        self, stream: Stream, status: Status, events: list[MachineEvent], *, remote_ended: bool = False
    ) -> None:
        """The call is over; what is still open of its stream is closed."""
        if not (stream.finished and not stream.outgoing and remote_ended):
            self._reset(stream.id, ErrorCodes.CANCEL)
        self._drop(stream)
        events.append(CallEnded(stream.id, status))

    # --- output

    def _end(self, stream: Stream) -> None:
        self._h2.end_stream(stream.id)
