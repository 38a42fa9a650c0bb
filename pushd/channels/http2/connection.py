"""One HTTP/2 connection to a provider: many exchanges, one writer, one reader.

The connection owns its streams and its socket. It does not choose between connections and does not know what a request
means. Requests are queued by synchronous calls; the writer task sends everything that becomes ready within a few turns
of the scheduler in one `send_all`, and one `receive_some` feeds as many exchanges as the bytes hold.

The hard part is giving streams back. An exchange whose caller left is reset at once, so that the peer's slot returns.
An exchange whose caller has decided on the status alone stays until the peer ends it, because a reset per answer would
look like an attack to the peer; it is reset when it does not end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import trio

from pushd.channels.http2 import engine
from pushd.channels.http2.exchange import MAX_BODY_BYTES, ConnectionFailed, Exchange, NotProcessed
from pushd.channels.http2.framing import FrameFilter, GoAway

_READ_BYTES = 4_096  # about 70 answers: more at once and 256 sends march in step, all waiting at the same time
_GATHER_TURNS = 16  # at most: in a loop that starts a send a turn, every turn makes something ready
_GATHER_BYTES = 16_384  # a TLS record: waiting longer saves nothing more and makes 256 sends march in step
_MAX_STREAM_ID = 2**31 - 1
_WINDOW_CHUNK = 32_768  # half of the default connection window: one WINDOW_UPDATE per that many bytes
# Frames that answer nothing, in a row. A busy honest peer sends two WINDOW_UPDATEs a request, and each request of ours
# gives back that much; a flood of PING, SETTINGS or empty DATA passes the limit within one read.
_MAX_IDLE_FRAMES = 1_000
_FRAMES_PER_REQUEST = 8
_SILENT_S = 5.0  # half of an attempt; that no answer came to what was given up sooner tells nothing of the peer
_SILENT_EXCHANGES = 3  # in a row, while other frames come; a connection on which nothing comes is left at once
_IDLE_S = 60.0  # Google and Apple close idle connections after minutes; address translation often forgets earlier
_PONG_S = 10.0  # as long as an attempt: whoever takes longer would not answer a request in time either
_LEFTOVER_S = 10.0  # the rest of an answer that was decided on its status
_WATCH_S = 5.0  # by so much the three times above are exceeded
_GOODBYE_S = 1.0  # the peer may not read any more, and the end of the process waits for this


class Connection:
    """An open connection; `run` serves it until it ends.

    Args:
        transport: the byte stream, TLS handshake done.
        pings: whether an idle connection is kept and pinged; otherwise it is closed.
        on_change: called when a stream may have become free or the connection ended.
    """

    def __init__(self, transport: trio.abc.Stream, *, pings: bool, on_change: Callable[[], None]) -> None:
        self._transport = transport
        self._pings = pings
        self._on_change = on_change
        self._wire = engine.Wire()
        self._filter = FrameFilter()
        self._wake = trio.Event()
        self._exchanges: dict[int, Exchange] = {}
        self._blocked: dict[int, Exchange] = {}
        self._next_id = 1
        self._limit = 0  # until the peer's SETTINGS: APNs allows one stream at first, and says so there
        self._accepting = True
        self._scope = trio.CancelScope()
        self._mid_write = False
        self._unacknowledged = 0
        self._idle_frames = 0
        self._silent = 0
        self._used_at = self._heard_at = trio.current_time()
        self._pinged_at: float | None = None
        self._ready = trio.Event()

    def __repr__(self) -> str:
        return f"<Connection streams={len(self._exchanges)}/{self._limit} accepting={self._accepting}>"

    @property
    def accepting(self) -> bool:
        """Whether new streams may ever be opened here."""
        return self._accepting

    def has_room(self) -> bool:
        """Whether a stream may be opened now."""
        return self._accepting and len(self._exchanges) < self._limit

    def room(self) -> int:
        """Streams that may be opened now."""
        return self._limit - len(self._exchanges) if self._accepting else 0

    def open(self, block: bytes, body: bytes, body_wait_s: Mapping[int, float]) -> Exchange:
        """Queue a request; `has_room` has just been true.

        Args:
            block: the header block as `engine.literal` makes it.
            body: the request body.
            body_wait_s: seconds to wait for the rest of an answer, by status; the whole answer where none is given.
        """
        stream_id = self._next_id
        self._next_id += 2
        if self._next_id > _MAX_STREAM_ID:
            self._accepting = False
        self._used_at = now = trio.current_time()
        exchange = Exchange(stream_id, body, body_wait_s, now)
        self._exchanges[stream_id] = exchange
        if self._idle_frames > 0:
            self._idle_frames -= _FRAMES_PER_REQUEST
        self._wire.send_request(stream_id, block)
        self._send_body(exchange)
        self._wake.set()
        return exchange

    def close(self, exchange: Exchange) -> None:
        """Give the exchange's stream back; its caller needs no more of the answer."""
        if exchange.ended or exchange.error is not None:
            return
        if exchange.status in exchange.body_wait_s and not exchange.unsent:
            exchange.left_at = trio.current_time()
            exchange.content = None
            return
        if exchange.status == 0 and trio.current_time() - exchange.sent_at >= _SILENT_S:
            self._silent += 1
            # A connection may go deaf without an end. If nothing at all came, the next attempt must not die here too.
            if self._heard_at < exchange.sent_at or self._silent >= _SILENT_EXCHANGES:
                self._accepting = False
        self._reset(exchange, engine.ErrorCodes.CANCEL)

    def abort(self) -> None:
        """End the connection now; every exchange on it fails."""
        self._accepting = False
        self._scope.cancel()

    async def run(self, task_status: trio.TaskStatus[Connection] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until the connection ends. Started once the peer's settings are known."""
        self._wire.initiate_connection()
        self._wake.set()
        try:
            with self._scope:
                async with trio.open_nursery() as serving:
                    serving.start_soon(self._write)
                    serving.start_soon(self._read)
                    await self._ready.wait()
                    task_status.started(self)
                    await self._watch()
        finally:
            self._accepting = False
            self._fail_all(ConnectionFailed("closed"))
            await self._say_goodbye()
        if not self._ready.is_set():
            raise ConnectionFailed("closed")

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            data = await self._gather()
            if data:
                self._mid_write = True
                try:
                    await self._transport.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return self._scope.cancel()
                self._mid_write = False
            if not self._accepting and not self._exchanges:
                return self._scope.cancel()

    async def _gather(self) -> bytes:
        """Everything that is ready, and what becomes ready in the next few turns of the scheduler.

        A write through TLS costs as much as several requests. A loop that starts one send per turn, as one that takes
        permits does, would otherwise pay it for each.
        """
        data = self._wire.data_to_send()
        for _ in range(_GATHER_TURNS):
            await trio.lowlevel.checkpoint()
            more = self._wire.data_to_send()
            if not more:
                break
            data += more
            if len(data) >= _GATHER_BYTES:
                break
        self._wake = trio.Event()
        return data

    async def _read(self) -> None:
        while True:
            try:
                data = await self._transport.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return self._scope.cancel()
            if not data:
                return self._scope.cancel()
            try:
                self._receive(bytes(data))
            except (engine.ProtocolError, ValueError):
                self._fail_all(ConnectionFailed("protocol"))
                return self._scope.cancel()

    async def _watch(self) -> None:
        while True:
            await trio.sleep(_WATCH_S)
            now = trio.current_time()
            for exchange in list(self._exchanges.values()):
                if exchange.left_at is not None and now - exchange.left_at >= _LEFTOVER_S:
                    self._reset(exchange, engine.ErrorCodes.CANCEL)
            if self._pings:
                if self._pinged_at is not None and now - self._pinged_at >= _PONG_S:
                    return self._scope.cancel()
                if self._pinged_at is None and now - self._heard_at >= _IDLE_S:
                    self._pinged_at = now
                    self._wire.ping(b"pushd\0\0\0")
                    self._wake.set()
            elif not self._exchanges and now - self._used_at >= _IDLE_S:
                return self._scope.cancel()

    async def _say_goodbye(self) -> None:
        # After a write that was cut short the peer would read anything more as the rest of a frame.
        if not self._mid_write:
            with contextlib.suppress(engine.ProtocolError):
                self._wire.close_connection()
            with trio.move_on_after(_GOODBYE_S, shield=True):
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._transport.send_all(self._wire.data_to_send())
        await trio.aclose_forcefully(self._transport)

    # Everything below is synchronous: between two awaits nothing else changes a stream.

    def _receive(self, data: bytes) -> None:
        before = self._filter.frames
        wire_data, leaving = self._filter.feed(data)
        self._idle_frames += self._filter.frames - before
        self._heard_at = trio.current_time()
        for event in self._wire.receive_data(wire_data):
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)
        if self._unacknowledged >= _WINDOW_CHUNK:
            self._wire.increment_flow_control_window(self._unacknowledged)
            self._unacknowledged = 0
        for notice in leaving:
            self._leave(notice)
        if self._idle_frames > _MAX_IDLE_FRAMES:
            self._wire.close_connection(engine.ErrorCodes.ENHANCE_YOUR_CALM)
            raise ValueError("flood")
        self._wake.set()

    def _on_response(self, event: Any) -> None:
        self._idle_frames = 0
        self._silent = 0
        exchange = self._exchanges.get(event.stream_id)
        if exchange is None:
            return
        status = _status(event.headers)
        if status is None:
            self._reset(exchange, engine.ErrorCodes.PROTOCOL_ERROR, ConnectionFailed("protocol"))
            return
        exchange.status = status
        exchange.headers = event.headers
        if status in exchange.body_wait_s:
            exchange.done.set()

    def _on_data(self, event: Any) -> None:
        self._unacknowledged += event.flow_controlled_length
        exchange = self._exchanges.get(event.stream_id)
        if exchange is None or exchange.content is None:
            return
        exchange.content.append(event.data)
        exchange.size += len(event.data)
        if exchange.size > MAX_BODY_BYTES:
            exchange.content = None
            exchange.ended = True
            self._reset(exchange, engine.ErrorCodes.CANCEL)

    def _on_end(self, event: Any) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is not None:
            exchange.ended = True
            if exchange.unsent:  # answered before it was asked in full: nobody waits for the rest
                self._reset(exchange, engine.ErrorCodes.NO_ERROR)
            else:
                self._forget(exchange)

    def _on_reset(self, event: Any) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is not None:
            refused = event.error_code == engine.ErrorCodes.REFUSED_STREAM
            self._fail(exchange, NotProcessed("refused") if refused else ConnectionFailed("reset"))

    def _on_settings(self, event: Any) -> None:
        self._limit = self._wire.remote_settings.max_concurrent_streams
        self._ready.set()
        self._send_blocked()
        self._on_change()

    def _on_window(self, event: Any) -> None:
        self._send_blocked()

    def _on_pong(self, event: Any) -> None:
        self._pinged_at = None

    def _leave(self, notice: GoAway) -> None:
        self._accepting = False
        for exchange in list(self._exchanges.values()):
            if exchange.stream_id > notice.last_stream_id:
                self._fail(exchange, NotProcessed("goaway"))
        self._on_change()

    def _send_body(self, exchange: Exchange) -> None:
        while exchange.unsent:
            window = self._wire.local_flow_control_window(exchange.stream_id)
            room = min(window, self._wire.max_outbound_frame_size)
            if room <= 0:
                self._blocked[exchange.stream_id] = exchange
                return
            part, exchange.unsent = exchange.unsent[:room], exchange.unsent[room:]
            self._wire.send_data(exchange.stream_id, part, end_stream=not exchange.unsent)

    def _send_blocked(self) -> None:
        blocked, self._blocked = self._blocked, {}
        for exchange in blocked.values():
            # h2 may have read that the peer closed this stream; the event that tells us comes next.
            with contextlib.suppress(engine.ProtocolError):
                self._send_body(exchange)

    def _reset(self, exchange: Exchange, code: engine.ErrorCodes, error: ConnectionFailed | None = None) -> None:
        # The peer may have closed the stream in bytes that h2 has read and we have not handled yet.
        with contextlib.suppress(engine.ProtocolError):
            self._wire.reset_stream(exchange.stream_id, code)
        exchange.error = error
        self._forget(exchange)
        self._wake.set()

    def _fail(self, exchange: Exchange, error: ConnectionFailed) -> None:
        if exchange.status in exchange.body_wait_s:
            exchange.ended = True
            exchange.content = None
        else:
            exchange.error = error
        self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        self._exchanges.pop(exchange.stream_id, None)
        self._blocked.pop(exchange.stream_id, None)
        exchange.done.set()
        if not self._accepting and not self._exchanges:
            self._wake.set()
        self._on_change()

    def _fail_all(self, error: ConnectionFailed) -> None:
        self._accepting = False
        for exchange in list(self._exchanges.values()):
            self._fail(exchange, error)
        self._on_change()


_HANDLERS: dict[type[engine.Event], Callable[[Connection, Any], None]] = {
    engine.ResponseReceived: Connection._on_response,
    engine.DataReceived: Connection._on_data,
    engine.StreamEnded: Connection._on_end,
    engine.StreamReset: Connection._on_reset,
    engine.RemoteSettingsChanged: Connection._on_settings,
    engine.WindowUpdated: Connection._on_window,
    engine.PingAckReceived: Connection._on_pong,
}


def _status(headers: list[tuple[bytes, bytes]]) -> int | None:
    name, value = headers[0] if headers else (b"", b"")
    if name != b":status" or len(value) != 3 or not value.isdigit():
        return None
    return int(value)
