"""A small, fast HTTP/2 server for the provider fakes, written on asyncio so that one core answers thousands a second.

It knows frames, scripted answers and how to misbehave on command; what a request deserves is the provider's business
(`Provider.answer`). Header blocks of plain literals are read by hand, all others by hpack.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import struct
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 1, 1, 4, 8, 32
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4

_DEFAULT_WINDOW = 65_535
_OUR_WINDOW = 1 << 24
_TICK_S = 0.0005  # answers due within this are sent together: timers are not more exact than that anyway


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


def read_literals(block: bytes) -> dict[str, str] | None:
    """Header fields of a block that holds only new-name literals without Huffman code, else None."""
    fields: dict[str, str] = {}
    position, end = 0, len(block)
    while position < end:
        if block[position] & 0xEF:
            return None
        texts = []
        position += 1
        for _ in range(2):
            length = block[position]
            position += 1
            if length & 128:
                return None
            if length == 127:
                shift = 0
                while True:
                    part = block[position]
                    position += 1
                    length += (part & 127) << shift
                    shift += 7
                    if not part & 128:
                        break
            texts.append(block[position : position + length].decode("latin-1"))
            position += length
        fields[texts[0]] = texts[1]
    return fields


@dataclass
class Answer:
    """What to do with one request. The field names are those of the control protocol.

    Args:
        status: HTTP status.
        headers: more response headers.
        body: response body.
        delay_ms: before anything is sent, instead of the server's latency.
        stall: "headers" sends nothing ever, "body" sends the headers and no end.
        chunks: number of DATA frames the body is cut into.
        trailing_ms: pause between the headers and the body.
        reset: RST_STREAM with this error code instead of an answer.
        goaway: GOAWAY with this error code instead of an answer; streams from this one on are not processed.
        debug: GOAWAY's debug data.
        close: close the connection instead of answering.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    delay_ms: float | None = None
    stall: str = ""
    chunks: int = 1
    trailing_ms: float = 0
    reset: int | None = None
    goaway: int | None = None
    debug: str = ""
    close: bool = False


@dataclass
class Request:
    """One complete request."""

    connection: int
    stream_id: int
    headers: dict[str, str]
    body: bytes
    received_s: float
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """For the control protocol."""
        return {
            "connection": self.connection,
            "stream_id": self.stream_id,
            "headers": self.headers,
            "body": self.body.decode("utf-8", "replace"),
            "received_s": self.received_s,
            "wall_s": self.wall_s,
        }


class Provider:
    """Base of a fake: scripts by token, recording, latency, statistics. Subclasses say what a request deserves."""

    def __init__(self, *, latency_ms: float, streams: int, record: int) -> None:
        self.latency_s = latency_ms / 1_000
        self.settings = {MAX_CONCURRENT_STREAMS: streams}
        self.scripts: dict[str, deque[Answer]] = {}
        self.default: Answer | None = None
        self.recorded: deque[Request] = deque(maxlen=record)
        self.statuses: Counter[int] = Counter()
        self.requests = 0
        self.resets = 0
        self.pings = 0
        self.connections: set[Connection] = set()
        self.opened = itertools.count(1)
        self.opened_total = 0
        self.in_flight = 0
        self.peak = 0
        self._due: list[tuple[float, int, Connection, int, Answer]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def token(self, request: Request) -> str:
        """The device token a request is for."""
        raise NotImplementedError

    def judge(self, request: Request) -> Answer:
        """The answer for a request that no script covers."""
        raise NotImplementedError

    def shorthand(self, fields: dict[str, Any]) -> Answer:
        """An answer from the control protocol's fields."""
        return Answer(**fields)

    def on_request(self, connection: Connection, request: Request) -> None:
        """A request has arrived in full: choose its answer and when to give it."""
        self.requests += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        if self.recorded.maxlen:
            self.recorded.append(request)
        script = self.scripts.get(self.token(request)) if self.scripts else None
        answer = script.popleft() if script else self.default or self.judge(request)
        delay_s = self.latency_s if answer.delay_ms is None else answer.delay_ms / 1_000
        if delay_s <= 0:
            connection.give(request.stream_id, answer)
        else:
            self.later(delay_s, connection, request.stream_id, answer)

    def later(self, delay_s: float, connection: Connection, stream_id: int, answer: Answer) -> None:
        """Give `answer` after `delay_s` seconds."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        heapq.heappush(self._due, (due, next(self._order), connection, stream_id, answer))
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._give_due)

    def _give_due(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _TICK_S
        due = self._due
        while due and due[0][0] <= until:
            _, _, connection, stream_id, answer = heapq.heappop(due)
            connection.give(stream_id, answer)
        self._timer = loop.call_at(due[0][0], self._give_due) if due else None

    def forget(self) -> None:
        """Scripts, records and counters start anew; connections stay."""
        self.scripts.clear()
        self.default = None
        self.recorded.clear()
        self.statuses.clear()
        self.requests = self.resets = self.pings = self.peak = 0

    def statistics(self) -> dict[str, Any]:
        """Counters for the control protocol."""
        return {
            "requests": self.requests,
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "resets": self.resets,
            "pings": self.pings,
            "connections_opened": self.opened_total,
            "connections_open": len(self.connections),
            "in_flight": self.in_flight,
            "in_flight_peak": self.peak,
        }


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
        headers = read_literals(stream.block)
        if headers is None:
            try:
                decoded = self._decoder.decode(stream.block, raw=True)
            except HPACKError:
                self.leave(9)
                self.transport.close()
                return
            headers = {bytes(name).decode("latin-1"): bytes(value).decode("latin-1") for name, value in decoded}
        stream.headers = headers
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
