"""h2's connection, changed where it does not fit a long-lived gRPC endpoint.

What is changed uses names present in h2 3.2 and 4.4 alike (a test holds both to it):

- GOAWAY, sent or received, ends a connection for h2: it refuses every further frame. RFC 9113 §6.8 lets running
  streams finish, so a received GOAWAY becomes an event only, and a sent one is a frame without a change of state;
- what h2 remembers of closed streams and of settings is bounded, see `pushd.bounded_h2`;
- the size of what waits to be sent can be asked for, and that of the input h2 keeps: it holds a whole frame before it
  looks at the frame's length, which may be 16 MiB, and up to 64 frames of one header block;
- frames that mean nothing, which h2 passes over without an event, are counted: they cost work like others;
- DATA and prepared header blocks are written past h2's own methods, which build and check frame objects: its stream
  states and windows are kept as it would keep them. That saves a fifth of a unary call's CPU.
"""

from __future__ import annotations

import struct
from typing import Any

from h2.config import H2Configuration
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from h2.stream import StreamInputs
from hyperframe.frame import GoAwayFrame

from pushd.bounded_h2 import BoundedH2Connection

_FRAME = struct.Struct(">LBL")
_DATA, _HEADERS, _CONTINUATION = 0x0, 0x1, 0x9
_END_STREAM, _END_HEADERS = 0x1, 0x4


class Http2(BoundedH2Connection):
    """One HTTP/2 connection that survives GOAWAY."""

    def __init__(self, *, client_side: bool, settings: dict[SettingCodes, int], max_streams_before_error: int) -> None:
        # Headers are judged by us, a call at a time: a bad one must not end the connection. What we send is our own.
        super().__init__(
            H2Configuration(
                client_side=client_side,
                header_encoding=False,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.local_settings = Settings(client=client_side, initial_values=settings)
        self.decoder.max_header_list_size = settings[SettingCodes.MAX_HEADER_LIST_SIZE]
        self.initiate_connection()
        # h2 answers one stream too many by ending the connection, although a peer may open it before it has read our
        # settings. The advertised number is kept by refusing streams; h2's own check is only the backstop.
        self.local_settings = Settings(
            client=client_side,
            initial_values=settings | {SettingCodes.MAX_CONCURRENT_STREAMS: max_streams_before_error},
        )

        self.silent_frames = 0  # received without an event; whoever reads it sets it back

    @property
    def output_bytes(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._data_to_send)

    @property
    def input_bytes(self) -> int:
        """How much input waits for the rest of its frame or header block."""
        buffer: Any = self.incoming_buffer
        waiting = len(buffer._data if hasattr(buffer, "_data") else buffer.data)  # h2 4 and h2 3
        return waiting + sum(len(frame.data) for frame in buffer._headers_buffer)

    def send_block(self, stream_id: int, block: bytes, *, end_stream: bool = False) -> None:
        """Sends an encoded header block, in several frames if it must be."""
        state = self.streams[stream_id].state_machine
        state.process_input(StreamInputs.SEND_HEADERS)
        kind, flags = _HEADERS, 0
        if end_stream:
            state.process_input(StreamInputs.SEND_END_STREAM)
            flags = _END_STREAM
        limit = self.max_outbound_frame_size
        while len(block) > limit:
            self._put_frame(kind, flags, stream_id, block[:limit])
            kind, flags, block = _CONTINUATION, 0, block[limit:]
        self._put_frame(kind, flags | _END_HEADERS, stream_id, block)

    def send_frame(self, stream_id: int, data: bytes) -> None:
        """Sends one DATA frame; the caller has looked at the windows and the frame size."""
        stream = self.streams[stream_id]
        stream.state_machine.process_input(StreamInputs.SEND_DATA)
        stream.outbound_flow_control_window -= len(data)
        self.outbound_flow_control_window -= len(data)
        self._put_frame(_DATA, 0, stream_id, data)

    def _put_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        # 24 bits of length, 8 of type, 8 of flags, 31 of stream (RFC 9113 §4.1)
        self._data_to_send += _FRAME.pack(len(payload) << 8 | kind, flags, stream_id) + payload

    def announce_goaway(self, last_stream_id: int, error_code: int = 0) -> None:
        """Sends GOAWAY and keeps serving streams up to `last_stream_id`."""
        self._prepare_for_sending([GoAwayFrame(0, last_stream_id=last_stream_id, error_code=error_code)])

    def _receive_frame(self, frame: Any) -> list[Event]:
        events = super()._receive_frame(frame)
        if not events:
            self.silent_frames += 1
        return events

    def _receive_goaway_frame(self, frame: Any) -> tuple[list[Any], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        event.additional_data = None  # a peer's free text has no use here and does not belong into logs
        return [], [event]
