"""What both sides of a gRPC connection share: streams, flow control in both directions, and patience.

No socket, no clock, no event loop: bytes and the time go in, events and bytes come out, so that Trio and asyncio can
drive the same machine and tests can join two of them by memory.

How much a peer can make this side hold. Every stream has a small receive window from the start, enough for most
messages. A longer message is granted its whole missing length at once when its prefix has arrived, provided that all
windows and all held bytes of the connection stay below `connection_receive_bytes`; otherwise the stream waits in line.
Whoever was granted can therefore always finish, and the line moves. Bytes really held also count against the budget
over all connections. When that is full, the message that has been getting on worst makes room, on whatever connection
it is: a peer that sends a byte now and then could else keep everybody out. The connection-level window of HTTP/2 bounds
nothing here: it is refilled as bytes arrive.

How much waits to go out. Messages wait in their stream; they are handed to h2 only while less than a quarter of a
megabyte waits for the socket and the peer's windows are open, one frame a stream in turn. What waits in streams counts
against a second budget, of which one connection may use half: a peer that asks for much and reads nothing is told so.
When it is full, the answer that has been taken most slowly makes room.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import h2.events as h2e
from attrs import frozen
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from pushd.rpc.machine.budget import ByteBudget, Patience
from pushd.rpc.machine.events import (
    AnswerDropped,
    ConnectionFailed,
    MachineEvent,
    MessageReceived,
    MessagesSpoilt,
)
from pushd.rpc.machine.framing import PREFIX_BYTES, Fault, FramingError, MessageDecoder, encode_message
from pushd.rpc.machine.headers import RawHeaders
from pushd.rpc.machine.http2 import Http2

DEFAULT_WINDOW = 65_535  # RFC 9113 §6.9.2
MAX_FRAME = 16_384  # RFC 9113 §6.5.2, the least that can be advertised
FRAME_HEADER = 9
# Refilled whenever half of it is used; a megabyte keeps a 1 Gbit/s peer busy over 8 ms of round trip.
CONNECTION_WINDOW = 2**20
OUTPUT_BYTES = 256 * 1024
# A peer may ask for frames of up to 16 MiB; what is handed to h2 is in no budget. Four frames fill the output.
_MAX_FRAME_OUT = OUTPUT_BYTES // 4
_FEED_BYTES = 16_384  # patience is looked at between pieces of this size
# PINGs and WINDOW_UPDATEs follow from what we send: a peer may answer each of our frames with two of them for free.
# Free is too what a peer has under way on a stream that we end: as many whole frames as fit into the windows.
_EARNED_PER_FRAME = 2
_EARNED_MAX = 1_000
_EARNED_AT_START = 10  # many peers widen windows and measure the round trip first
# A DATA frame costs about 8 µs however little it brings. Honest peers send short ones that complete no message (a
# prefix ahead of its message, what is left of a window or of a proxy's buffer), but useful ones too: each pays for two.
_SHORT_DATA = 256


@frozen(kw_only=True)
class Limits:
    """What a machine allows its peer; see `pushd.rpc.settings.RpcSettings` for the meaning of each."""

    max_concurrent_streams: int
    max_receive_message_bytes: int
    max_header_list_bytes: int
    connection_receive_bytes: int
    abuse_burst: int
    abuse_per_s: float

    @property
    def stream_window(self) -> int:
        """Receive window every stream starts with, so that all of them together leave room for a longest message."""
        share = self.connection_receive_bytes // self.max_concurrent_streams
        spare = (self.connection_receive_bytes - self.max_receive_message_bytes) // self.max_concurrent_streams
        return max(1, min(DEFAULT_WINDOW, max(spare - PREFIX_BYTES, min(1_024, share // 2))))

    @property
    def longest_message(self) -> int:
        """The longest message that can ever be granted."""
        room = self.connection_receive_bytes - self.max_concurrent_streams * self.stream_window
        return max(0, min(self.max_receive_message_bytes, room - PREFIX_BYTES))


class Stream:
    """One call's stream as the machine sees it. Times are those given to `receive_data`."""

    __slots__ = (
        "decoder",
        "endpoint",
        "finished",
        "held",
        "id",
        "outgoing",
        "progress",
        "queued",
        "remote_ended",
        "spoilt",
        "trailers",
        "unsent",
        "window",
    )

    def __init__(self, endpoint: Endpoint, stream_id: int, window: int, limit: int) -> None:
        self.endpoint = endpoint
        self.id = stream_id
        self.decoder = MessageDecoder(limit)
        self.window = window  # what the peer may still send
        self.held = 0  # bytes received and not yet consumed
        self.queued = 0  # those of them in whole messages
        self.progress = 0  # bytes ever received; tells a slow peer from a stalled one
        self.remote_ended = False
        self.spoilt = False
        self.outgoing: deque[memoryview] = deque()
        self.unsent = 0  # bytes of `outgoing`
        self.trailers: RawHeaders | None = None  # to be sent after `outgoing`; empty: END_STREAM alone
        self.finished = False  # nothing more will be queued


def _nobody(event: MachineEvent) -> None:
    """Nobody is told."""


class Endpoint:
    """Base of the server's and the client's machine.

    Call `receive_data` with what the socket gave, act on the events, send `data_to_send`. Every method returns at once;
    after any of them there may be new output. Methods that name a stream which is gone do nothing, because a peer may
    end a stream at any moment.

    What happens to this connection because another one needs room is told to `on_evicted`, and leaves output too.
    """

    def __init__(
        self, limits: Limits, budget: ByteBudget, *, unsent: ByteBudget | None = None, client_side: bool
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._unsent = unsent or ByteBudget(2**63)
        self._unsent_here = 0
        self._window = limits.stream_window
        self._longest = limits.longest_message
        self._max_input = MAX_FRAME + FRAME_HEADER + limits.max_header_list_bytes
        self._patience = Patience(limits.abuse_burst, limits.abuse_per_s)
        self._h2 = Http2(
            client_side=client_side,
            settings={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                SettingCodes.INITIAL_WINDOW_SIZE: self._window,
                SettingCodes.ENABLE_PUSH: 0,
            },
            max_streams_before_error=10 * limits.max_concurrent_streams,
        )
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - DEFAULT_WINDOW)
        self._streams: dict[int, Stream] = {}
        self._committed = 0  # windows and held bytes of all streams
        self._waiting: dict[int, Stream] = {}  # for a grant, in order
        self._blocked: dict[int, Stream] = {}  # with outgoing data, in turn
        self._touched: dict[int, Stream] = {}  # received data; their windows are looked at after the whole piece
        self._earned = _EARNED_AT_START
        self._handlers: dict[type, Callable[[Any, list[MachineEvent]], None]] = {
            h2e.DataReceived: self._data_received,
            h2e.StreamEnded: self._stream_ended,
            h2e.StreamReset: self._stream_reset,
            h2e.WindowUpdated: self._earned_frame,
            h2e.PingReceived: self._earned_frame,
            h2e.RemoteSettingsChanged: self._settings_changed,
            h2e.SettingsAcknowledged: self._settings_acknowledged,
            h2e.PriorityUpdated: self._unpaid_frame,
            h2e.PingAckReceived: self._unpaid_frame,
            h2e.UnknownFrameReceived: self._unpaid_frame,
        }
        self.on_evicted: Callable[[MachineEvent], None] = _nobody
        self.received = 0  # bytes of messages, over all streams
        self.sent = 0
        self.handshaken = False  # the peer's first SETTINGS arrived
        self.settings_acknowledged = False
        self.closed = False  # failed: only the last output is worth sending

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} streams={len(self._streams)} committed={self._committed}"
            f" waiting={len(self._waiting)} blocked={len(self._blocked)} closed={self.closed}>"
        )

    # --- towards the socket

    def receive_data(self, data: bytes, now: float) -> list[MachineEvent]:
        """What the peer's bytes mean. `now` is in seconds of any steady clock."""
        events: list[MachineEvent] = []
        self._patience.at(now)
        for start in range(0, len(data), _FEED_BYTES):
            if self.closed:
                break
            piece = data if len(data) <= _FEED_BYTES else data[start : start + _FEED_BYTES]
            try:
                happened = self._h2.receive_data(piece)
            except ProtocolError as exc:
                self._fail(type(exc).__name__, events)
                break
            for event in happened:
                handler = self._handlers.get(type(event))
                if handler is not None and not self.closed:
                    handler(event, events)
            self._spend_on_silent_frames(events)
            if not self.closed and self._h2.input_bytes > self._max_input:
                self._fail("frame or header block too large", events, ErrorCodes.FRAME_SIZE_ERROR)
            self._settle()
        if not self.closed and self._h2.inbound_flow_control_window < CONNECTION_WINDOW // 2:
            self._h2.increment_flow_control_window(CONNECTION_WINDOW - self._h2.inbound_flow_control_window)
        return events

    def data_to_send(self) -> bytes:
        """Bytes for the socket, empty when there are none. Hands more of the waiting messages to h2."""
        if self._blocked and not self.closed:
            self._flush_blocked()
        return self._h2.data_to_send()

    @property
    def output_bytes(self) -> int:
        """Bytes that `data_to_send` would return now, apart from waiting messages."""
        return self._h2.output_bytes

    # --- towards the calls

    def consumed(self, stream_id: int, payload: bytes) -> None:
        """A message was taken by its reader; its bytes are no longer held."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        size = len(payload) + PREFIX_BYTES
        stream.queued -= size
        self._release(stream, size)
        self._touched[stream_id] = stream
        self._settle()

    def waiting_bytes(self, stream_id: int) -> int:
        """Bytes of this stream's messages that neither the socket nor the peer's window has taken yet."""
        stream = self._streams.get(stream_id)
        return stream.unsent if stream is not None else 0

    def held_bytes(self, stream_id: int) -> int:
        """Bytes received on this stream and not yet consumed."""
        stream = self._streams.get(stream_id)
        return stream.held if stream is not None else 0

    def progress(self, stream_id: int) -> int | None:
        """Bytes ever received on the stream; None when it waits for its turn, which is not the peer's fault."""
        stream = self._streams.get(stream_id)
        return None if stream is None or stream_id in self._waiting else stream.progress

    def partial(self, stream_id: int) -> bool:
        """Whether a message has begun and not ended on this stream."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.decoder.partial

    def reset(self, stream_id: int, error_code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """Ends the stream at once in both directions."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._reset(stream_id, error_code)
            self._drop(stream)
            self._settle()

    def _reset(self, stream_id: int, error_code: ErrorCodes) -> None:
        if not self.closed:
            stream = self._streams.get(stream_id)
            under_way = self._window if stream is None else stream.window
            self._earn(min(under_way, CONNECTION_WINDOW) // MAX_FRAME + 1)
            with contextlib.suppress(ProtocolError):  # the peer may have ended it within the same piece of input
                self._h2.reset_stream(stream_id, error_code)

    def ping(self) -> None:
        """Asks the peer for a sign of life; any bytes it sends are one."""
        self._h2.ping(b"pushd   ")

    # --- streams

    def _open(self, stream_id: int) -> Stream:
        stream = Stream(self, stream_id, self._window, self._longest)
        self._streams[stream_id] = stream
        self._committed += self._window
        return stream

    def _drop(self, stream: Stream) -> None:
        """Forgets a stream and everything held or waiting for it."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._waiting.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        self._touched.pop(stream.id, None)
        self._committed -= stream.window + stream.held
        self._budget.give(stream.held)
        self._budget.done(stream)
        self._unsent.done(stream)
        stream.held = 0
        self._count_unsent(stream, -stream.unsent)

    def drop_all(self) -> None:
        """The socket is gone: forgets every stream, so that the budget gets back what was held."""
        self.closed = True
        self.on_evicted = _nobody
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _release(self, stream: Stream, size: int) -> None:
        stream.held -= size
        self._committed -= size
        self._budget.give(size)

    def _fail(self, reason: str, events: list[MachineEvent], code: ErrorCodes | None = None) -> None:
        """The connection is lost. h2 has put a GOAWAY out when it was the one to find fault; else we do."""
        if code is not None:
            self._h2.announce_goaway(self._h2.highest_inbound_stream_id, code)
        self.closed = True
        events.append(ConnectionFailed(reason))

    def _spend_patience(self, events: list[MachineEvent]) -> None:
        if not self.closed and not self._patience.spend():
            self._fail("too many frames without work", events, ErrorCodes.ENHANCE_YOUR_CALM)

    # --- h2's events
    #
    # h2 has taken a whole piece of input before we see its events, so a stream may be gone for h2 that is still ours
    # for a few events. Nothing is sent on a stream before `_settle`.

    def _settings_changed(self, event: h2e.RemoteSettingsChanged, events: list[MachineEvent]) -> None:
        if self.handshaken:
            self._spend_patience(events)
        self.handshaken = True

    def _settings_acknowledged(self, event: h2e.SettingsAcknowledged, events: list[MachineEvent]) -> None:
        if self.settings_acknowledged:  # ours are sent once
            self._spend_patience(events)
        self.settings_acknowledged = True

    def _spend_on_silent_frames(self, events: list[MachineEvent]) -> None:
        """Frames for streams that are gone, in the main."""
        count, self._h2.silent_frames = self._h2.silent_frames, 0
        free = min(count, self._earned)
        self._earned -= free
        for _ in range(count - free):
            self._spend_patience(events)

    def _unpaid_frame(self, event: h2e.Event, events: list[MachineEvent]) -> None:
        self._spend_patience(events)

    def _earned_frame(self, event: h2e.Event, events: list[MachineEvent]) -> None:
        if self._earned:
            self._earned -= 1
        else:
            self._spend_patience(events)

    def _data_received(self, event: h2e.DataReceived, events: list[MachineEvent]) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        data, charged = event.data, event.flow_controlled_length
        stream.window -= charged
        self._committed -= charged
        self.received += len(data)
        before = len(events)
        if not stream.spoilt:
            self._read(stream, data, events)
        if len(data) >= _SHORT_DATA or len(events) > before:
            self._earn()
        elif event.stream_ended is None:
            self._earned_frame(event, events)
        if event.stream_ended is None and not stream.spoilt:
            self._touched[stream.id] = stream

    def _read(self, stream: Stream, data: bytes, events: list[MachineEvent]) -> None:
        """Adds to a stream's messages, or gives them up."""
        if not self._take(stream, len(data), events):
            self._spoil(stream, Fault.OVERLOADED, events)
            return
        stream.held += len(data)
        self._committed += len(data)
        stream.progress += len(data)
        try:
            payloads = stream.decoder.feed(data)
        except FramingError as exc:
            self._spoil(stream, exc.fault, events)
            return
        for payload in payloads:
            stream.queued += len(payload) + PREFIX_BYTES
            events.append(MessageReceived(stream.id, payload))
        if payloads:
            self._budget.done(stream)
        if stream.decoder.partial:
            self._budget.moved(stream, len(data))

    def _take(self, stream: Stream, size: int, events: list[MachineEvent]) -> bool:
        """Counts received bytes; False when the budget is full and nobody else is slower."""
        while not self._budget.take(size):
            slowest = self._budget.slowest
            if slowest is None or slowest is stream:
                return False
            slowest.endpoint._evict(slowest, events if slowest.endpoint is self else None)
        return True

    def _evict(self, stream: Stream, events: list[MachineEvent] | None) -> None:
        """The stream's unfinished message makes room. `events` when they are being gathered for this connection."""
        happened: list[MachineEvent] = [] if events is None else events
        self._spoil(stream, Fault.OVERLOADED, happened)
        if events is None:
            for event in happened:
                self.on_evicted(event)

    def _spoil(self, stream: Stream, fault: Fault, events: list[MachineEvent]) -> None:
        """Stops reading a stream. What it may still send is bounded by its window and thrown away."""
        stream.spoilt = True
        stream.decoder = MessageDecoder(self._longest)
        self._release(stream, stream.held - stream.queued)  # whole messages are held by whoever has to consume them
        self._budget.done(stream)
        self._waiting.pop(stream.id, None)
        events.append(MessagesSpoilt(stream.id, fault))

    def _stream_ended(self, event: h2e.StreamEnded, events: list[MachineEvent]) -> None:
        raise NotImplementedError

    def _stream_reset(self, event: h2e.StreamReset, events: list[MachineEvent]) -> None:
        raise NotImplementedError

    # --- receive windows

    def _settle(self) -> None:
        """Widens windows after input was handled or room was made: first those in line, then those just touched."""
        if self.closed or not (self._touched or self._waiting):
            return
        for stream in (*self._waiting.values(), *self._touched.values()):
            if not self._grant(stream):
                self._waiting[stream.id] = stream
                break
            self._waiting.pop(stream.id, None)
            self._touched.pop(stream.id, None)
        # Behind the first one that does not fit everybody waits, or a long message might never have its turn.
        self._waiting |= self._touched
        self._touched = {}

    def _grant(self, stream: Stream) -> bool:
        """Widens the stream's receive window if its peer needs it; False when the connection has no room."""
        missing = stream.decoder.missing
        if stream.remote_ended or stream.spoilt or (missing <= stream.window and stream.window > self._window // 2):
            return True
        if stream.queued >= self._window:
            return True  # the reader is slower than the peer; `consumed` comes back here
        wanted = max(missing, self._window - stream.held) - stream.window
        if wanted <= 0:
            return True
        if self._committed + wanted > self._limits.connection_receive_bytes:
            return False
        self._h2.increment_flow_control_window(wanted, stream.id)
        stream.window += wanted
        self._committed += wanted
        return True

    # --- output

    def _send(self, stream: Stream, payload: bytes) -> bool:
        """Queues a message; False when too much waits already, and nothing of it was queued."""
        data = encode_message(payload)
        if not stream.outgoing and len(data) <= self._room(stream):
            self._h2.send_frame(stream.id, data)
            self.sent += len(data)
            self._earn()
            return True
        size = len(data)
        if self._unsent_here + size > self._unsent.limit // 2 or not self._make_way(stream, size):
            return False
        self._count_unsent(stream, size)
        self._unsent.moved(stream, 0)
        stream.outgoing.append(memoryview(data))
        self._blocked[stream.id] = stream
        return True

    def _make_way(self, stream: Stream, size: int) -> bool:
        """Whether `size` more bytes may wait, if need be in the place of those taken most slowly."""
        unsent = self._unsent
        while unsent.held + size > unsent.limit:
            slowest = unsent.slowest
            if slowest is None or slowest is stream:
                return False
            slowest.endpoint.reset(slowest.id, ErrorCodes.CANCEL)
            slowest.endpoint.on_evicted(AnswerDropped(slowest.id))
        return True

    def _count_unsent(self, stream: Stream, size: int) -> None:
        stream.unsent += size
        self._unsent_here += size
        self._unsent.held += size

    def _room(self, stream: Stream) -> int:
        """How much of the stream's data h2 may be given now."""
        if self._h2.output_bytes >= OUTPUT_BYTES:
            return 0
        return min(self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size, _MAX_FRAME_OUT)

    def _earn(self, frames: int = _EARNED_PER_FRAME) -> None:
        if self._earned < _EARNED_MAX:
            self._earned += frames

    def _finish(self, stream: Stream, trailers: RawHeaders) -> None:
        """Ends our side after everything queued."""
        stream.finished = True
        stream.trailers = trailers
        if not stream.outgoing:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        """Everything queued has gone to h2, and nothing more will come."""
        raise NotImplementedError

    def _flush_blocked(self) -> None:
        """One frame a stream in turn, as long as there is room."""
        stuck = 0
        while self._blocked and stuck < len(self._blocked) and self._h2.output_bytes < OUTPUT_BYTES:
            stream = next(iter(self._blocked.values()))
            del self._blocked[stream.id]
            moved = self._flush_frame(stream)
            stuck = 0 if moved else stuck + 1
            if stream.outgoing:
                self._blocked[stream.id] = stream
            elif stream.finished:
                self._end(stream)

    def _flush_frame(self, stream: Stream) -> bool:
        """Hands one frame to h2; False when the stream's or the connection's window is closed."""
        data = stream.outgoing[0]
        size = min(self._room(stream), len(data))
        if size <= 0:
            return False
        self._h2.send_frame(stream.id, bytes(data[:size]))
        self.sent += size
        self._earn()
        self._count_unsent(stream, -size)
        if size == len(data):
            stream.outgoing.popleft()
        else:
            stream.outgoing[0] = data[size:]
        if stream.outgoing:
            self._unsent.moved(stream, size)
        else:
            self._unsent.done(stream)
        return True
