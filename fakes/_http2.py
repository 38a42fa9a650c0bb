"""A small, fast HTTP/2 server for the provider fakes, written on asyncio so that one core answers thousands a second.

It knows frames and how to misbehave on command; what a request deserves is the provider's business.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque

from ._hpack import Decoder
from ._provider import INITIAL_WINDOW_SIZE, Answer, Provider, Request

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 1, 1, 4, 8, 32

_DEFAULT_WINDOW = 65_535
_OUR_WINDOW = 1 << 24


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame as bytes (RFC 9113 §4.1)."""
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream_id) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that enters no table (RFC 7541 §6.2.2), both strings below 16 KiB."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    length -= 127
    return bytes((127, length & 127 | 128, length >> 7)) + text if length >= 128 else bytes((127, length)) + text


class _Stream:
    __slots__ = ("block", "body", "flags", "headers", "pending", "window")

    def __init__(self, window: int) -> None:
        self.block = b""
        self.flags = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.pending: deque[tuple[bytes, bool]] = deque()
        self.window = window


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.number = 0
        self.transport: asyncio.Transport
        self._buffer = b""
        self._greeted = False
        self._streams: dict[int, _Stream] = {}
        self._decoder = Decoder()
        self._out: list[bytes] = []
        self._flushing = False
        self._credit = 0
        self._window = _DEFAULT_WINDOW
        self._stream_window = _DEFAULT_WINDOW
        self._last_id = 0
        self._continued: int | None = None
        self._leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.number = self.provider.opened_total = next(self.provider.opened)
        self.provider.connections.add(self)
        self.announce(self.provider.settings)
        self.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _OUR_WINDOW - _DEFAULT_WINDOW)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.provider.connections.discard(self)
        self.provider.in_flight -= len(self._streams)
        self._streams.clear()

    def announce(self, settings: dict[int, int]) -> None:
        """Send SETTINGS."""
        self.write(frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in settings.items())))

    def leave(self, code: int, *, last_stream_id: int | None = None, debug: bytes = b"") -> None:
        """Send GOAWAY; the connection closes when its last stream is answered."""
        last = self._last_id if last_stream_id is None else last_stream_id
        self.write(frame(GOAWAY, 0, 0, struct.pack(">II", last, code) + debug))
        for stream_id in [stream_id for stream_id in self._streams if stream_id > last]:
            self._drop(stream_id)
        self._leaving = True
        self._close_if_done()

    def write(self, data: bytes) -> None:
        """Queue bytes; everything queued in one turn of the loop goes out in one write."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self.transport.is_closing():
            self.transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer = self._buffer
        position = 0
        if not self._greeted:
            if len(buffer) < len(PREFACE):
                return
            if not buffer.startswith(PREFACE):
                self.transport.close()
                return
            self._greeted = True
            position = len(PREFACE)
        end = len(buffer)
        while position + 9 <= end:
            length = buffer[position] << 16 | buffer[position + 1] << 8 | buffer[position + 2]
            following = position + 9 + length
            if following > end:
                break
            kind, flags = buffer[position + 3], buffer[position + 4]
            stream_id = int.from_bytes(buffer[position + 5 : position + 9], "big") & 0x7FFFFFFF
            self._on_frame(kind, flags, stream_id, buffer[position + 9 : following])
            position = following
        self._buffer = buffer[position:]
        if self._credit >= _OUR_WINDOW // 4:
            self.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._credit)))
            self._credit = 0

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == DATA:
            self._credit += len(payload)
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.body += payload
                if flags & END_STREAM:
                    self._complete(stream_id, stream)
        elif kind == HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == CONTINUATION:
            stream = self._streams[stream_id]
            stream.block += payload
            if flags & END_HEADERS:
                self._on_block(stream_id, stream)
        elif kind == SETTINGS and not flags & ACK:
            self._on_settings(payload)
        elif kind == PING and not flags & ACK:
            self.provider.pings += 1
            self.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._on_window(stream_id, struct.unpack(">I", payload)[0])
        elif kind == RST_STREAM:
            self.provider.resets += 1
            self._drop(stream_id)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if flags & PRIORITY_FLAG:
            payload = payload[5:]
        self._last_id = max(self._last_id, stream_id)
        stream = self._streams[stream_id] = _Stream(self._stream_window)
        stream.block, stream.flags = payload, flags
        if flags & END_HEADERS:
            self._on_block(stream_id, stream)

    def _on_block(self, stream_id: int, stream: _Stream) -> None:
        try:
            stream.headers = self._decoder.decode(stream.block)
        except IndexError:
            self.leave(9)  # COMPRESSION_ERROR
            self.transport.close()
            return
        if stream.flags & END_STREAM:
            self._complete(stream_id, stream)

    def _complete(self, stream_id: int, stream: _Stream) -> None:
        moment = time.monotonic()
        self.provider.on_request(
            self, Request(self.number, stream_id, stream.headers, stream.body, moment, time.time())
        )

    def _on_settings(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
        self.write(frame(SETTINGS, ACK, 0))

    def _on_window(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self._window += increment
        elif stream_id in self._streams:
            self._streams[stream_id].window += increment
        for waiting in list(self._streams):
            self._send_pending(waiting)

    def give(self, stream_id: int, answer: Answer) -> None:
        """Answer a request, or do to it what the script says."""
        stream = self._streams.get(stream_id)
        if stream is None or answer.stall == "headers":
            return
        if answer.close:
            self.transport.abort()
        elif answer.goaway is not None:
            self.leave(answer.goaway, last_stream_id=stream_id - 1, debug=answer.debug.encode())
        elif answer.reset is not None:
            self.write(frame(RST_STREAM, 0, stream_id, struct.pack(">I", answer.reset)))
            self._drop(stream_id)
        elif answer.trailing_ms:
            pause_s, answer.trailing_ms = answer.trailing_ms / 1_000, 0
            self._send_headers(stream_id, answer, last=False)
            self.provider.later(pause_s, self, stream_id, Answer(status=0, body=answer.body, chunks=answer.chunks))
        else:
            self._give_whole(stream_id, stream, answer)

    def _give_whole(self, stream_id: int, stream: _Stream, answer: Answer) -> None:
        if answer.status:
            self._send_headers(stream_id, answer, last=not answer.body and not answer.stall)
        if answer.stall == "body":
            part = answer.body.encode()[:-1]
            if part:
                self.write(frame(DATA, 0, stream_id, part))
        elif answer.body:
            body = answer.body.encode()
            size = -(-len(body) // max(1, answer.chunks))
            size = min(size, 16_384)
            parts = [body[start : start + size] for start in range(0, len(body), size)]
            stream.pending.extend((part, number == len(parts)) for number, part in enumerate(parts, start=1))
            self._send_pending(stream_id)
        else:
            self._drop(stream_id)

    def _send_headers(self, stream_id: int, answer: Answer, *, last: bool) -> None:
        self.provider.statuses[answer.status] += 1
        block = b"\x88" if answer.status == 200 else b"\x08\x03%d" % answer.status
        for name, value in answer.headers.items():
            block += literal(name.encode(), value.encode())
        self.write(frame(HEADERS, END_HEADERS | (END_STREAM if last else 0), stream_id, block))

    def _send_pending(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        while stream is not None and stream.pending:
            part, last = stream.pending[0]
            if len(part) > min(self._window, stream.window):
                return
            stream.pending.popleft()
            self._window -= len(part)
            stream.window -= len(part)
            self.write(frame(DATA, END_STREAM if last else 0, stream_id, part))
            if last:
                self._drop(stream_id)

    def _drop(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None:
            self.provider.in_flight -= 1
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._leaving and not self._streams:
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, self.transport.close)
