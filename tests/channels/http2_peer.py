"""A scripted HTTP/2 server inside the test, on memory streams, so that hours of clock cost nothing.

`Peer.opener` is what `open_http2_client` takes. The peer is driven by h2 where it behaves and by raw frames where it
does not. `answer` decides about each complete request; it may await, and answers by calling `Call` methods.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import trio
import trio.testing

from pushd.channels.http2 import ConnectionFailed, Origin

FOREVER = 10_000_000.0
ORIGIN = Origin("api.push.apple.com", 443, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pings=True)
QUIET_ORIGIN = Origin("fcm.googleapis.com", 443, ORIGIN.tls, pings=False)

GOAWAY, RST_STREAM, PING, SETTINGS, PUSH_PROMISE, HEADERS, CONTINUATION, DATA = 7, 3, 6, 4, 5, 1, 9, 0


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream_id) + payload


class Call:
    """One request that has arrived, and the ways to answer it."""

    def __init__(self, line: Line, stream_id: int, headers: dict[str, str], body: bytes) -> None:
        self.line = line
        self.stream_id = stream_id
        self.headers = headers
        self.body = body

    @property
    def path(self) -> str:
        return self.headers[":path"]

    def head(self, status: int, *fields: tuple[str, str], end: bool = False) -> None:
        self.line.h2.send_headers(self.stream_id, [(":status", str(status)), *fields], end_stream=end)
        self.line.wake.set()

    def data(self, part: bytes, *, end: bool = False) -> None:
        self.line.h2.send_data(self.stream_id, part, end_stream=end)
        self.line.wake.set()

    def reply(self, status: int, body: bytes = b"", *fields: tuple[str, str]) -> None:
        self.head(status, *fields, end=not body)
        for start in range(0, len(body), 16_384):
            self.data(body[start : start + 16_384], end=start + 16_384 >= len(body))

    def reset(self, code: int) -> None:
        self.line.h2.reset_stream(self.stream_id, code)
        self.line.wake.set()


class Line:
    """The server end of one connection."""

    def __init__(self, peer: Peer, stream: trio.StapledStream[Any, Any], number: int) -> None:
        self.peer = peer
        self.stream = stream
        self.number = number
        self.wake = trio.Event()
        self.resets: list[tuple[int, int]] = []
        self.pings = 0
        self.sends = 0
        self.closed = trio.Event()
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8", validate_inbound_headers=True)
        )
        self._calls: dict[int, tuple[dict[str, str], bytearray]] = {}

    def settings(self, **values: int) -> None:
        codes = {h2.settings.SettingCodes[name.upper()]: value for name, value in values.items()}
        self.h2.update_settings(codes)
        self.wake.set()

    def raw(self, data: bytes) -> None:
        """Bytes past h2, which would refuse to send them."""
        self.h2._data_to_send += data
        self.wake.set()

    def goaway(self, last_stream_id: int, code: int = 0, debug: bytes = b"") -> None:
        self.raw(frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + debug))

    async def cut(self) -> None:
        await self.stream.aclose()

    async def serve(self) -> None:
        initial = {h2.settings.SettingCodes[name.upper()]: value for name, value in self.peer.initial.items()}
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=initial)
        self.h2.initiate_connection()
        self.wake.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read(nursery)
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.closed.set()

    async def _write(self) -> None:
        while True:
            await self.wake.wait()
            self.wake = trio.Event()
            data = self.h2.data_to_send()
            if data:
                await self.stream.send_all(data)

    async def _read(self, nursery: trio.Nursery) -> None:
        while data := await self.stream.receive_some(65_536):
            self.sends += 1
            for event in self.h2.receive_data(bytes(data)):
                self._on_event(event, nursery)
            self.wake.set()

    def _on_event(self, event: h2.events.Event, nursery: trio.Nursery) -> None:
        match event:
            case h2.events.RequestReceived():
                self._calls[event.stream_id] = (dict(event.headers), bytearray())
            case h2.events.DataReceived():
                self._calls[event.stream_id][1].extend(event.data)
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                headers, body = self._calls.pop(event.stream_id)
                call = Call(self, event.stream_id, headers, bytes(body))
                self.peer.calls.append(call)
                nursery.start_soon(self.peer.answer, call)
            case h2.events.StreamReset():
                self._calls.pop(event.stream_id, None)
                self.resets.append((event.stream_id, int(event.error_code)))
            case h2.events.PingReceived():
                self.pings += 1


class Peer:
    """All connections of one test.

    Args:
        nursery: where connections are served.
        answer: called for each complete request.
        initial: settings of a new connection, by lower-case name.
    """

    def __init__(
        self, nursery: trio.Nursery, answer: Callable[[Call], Awaitable[None]], initial: dict[str, int] | None = None
    ) -> None:
        self.nursery = nursery
        self.answer = answer
        self.initial = {"max_concurrent_streams": 1_000, **(initial or {})}
        self.calls: list[Call] = []
        self.lines: list[Line] = []
        self.opened = 0
        self.refuse: str | None = None
        self.connect_s = 0.0

    async def opener(self, origin: Origin) -> trio.abc.Stream:
        self.opened += 1
        await trio.sleep(self.connect_s)
        if self.refuse is not None:
            raise ConnectionFailed(self.refuse)
        client, server = trio.testing.memory_stream_pair()
        line = Line(self, server, self.opened)
        self.lines.append(line)
        self.nursery.start_soon(line.serve)
        return client


async def accept(call: Call) -> None:
    """Answer 200 as APNs does."""
    call.reply(200, b"", ("apns-id", "3f1c"))


async def ignore(call: Call) -> None:
    """Never answer."""
