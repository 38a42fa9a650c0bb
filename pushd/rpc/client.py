"""A gRPC channel under Trio, on the client's side of the same machine.

    async with open_channel("127.0.0.1", 5050) as channel:
        state = await channel.unary(path, request, wire.RecipientState, deadline_s=5.0)

One connection at a time carries all calls. A server that disappears ends its calls at once; the next call connects
anew, with growing pauses after failures, during which calls fail at once instead of queueing. After GOAWAY running
calls finish on the old connection and new ones open another. A call the server promises not to have seen is repeated
once by itself.
"""

from __future__ import annotations

import math
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

import trio
from attrs import field, frozen
from google.protobuf.message import DecodeError

from pushd import __version__
from pushd.errors import Code, StatusError
from pushd.rpc.client_connection import ClientConnection, Inbox
from pushd.rpc.machine import ByteBudget, CallEnded, ClientMachine, Limits, RawHeaders, Status

_NONE: RawHeaders = []
_WAITING_BYTES = 64 * 1024  # of one stream's requests, before `send` waits
_BACKOFF_FACTOR = 1.6
_UNREACHABLE = Status(Code.UNAVAILABLE, "the server cannot be reached")
_DEADLINE = Status(Code.DEADLINE_EXCEEDED, "deadline exceeded")
_UNDECODABLE = Status(Code.INTERNAL, "the server's answer cannot be decoded")
_NOT_ONE = Status(Code.INTERNAL, "the server answered with another number of messages than one")


class _Message(Protocol):
    @classmethod
    def FromString(cls, s: bytes, /) -> Self: ...


M = TypeVar("M", bound=_Message)


@frozen(kw_only=True)
class ChannelSettings:
    """How a channel behaves.

    Attributes:
        max_response_bytes: one response message; more ends the call OUT_OF_RANGE.
        receive_bytes: response bytes held at once.
        connect_s: TCP, TLS and the server's first SETTINGS together.
        idle_s: silence with calls running, after which the server is asked for a sign of life ...
        ping_s: ... and how long that may take.
        stall_s: how long the server may refuse to take a write.
        backoff_min_s: pause after the first failed connection attempt; each further one is 1.6 times as long ...
        backoff_max_s: ... up to this.
    """

    max_response_bytes: int = 25 * 2**20
    receive_bytes: int = 64 * 2**20
    connect_s: float = 10.0
    idle_s: float = 30.0
    ping_s: float = 10.0
    stall_s: float = 30.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 120.0


@asynccontextmanager
async def open_channel(
    host: str, port: int, *, tls: ssl.SSLContext | None = None, settings: ChannelSettings = ChannelSettings()
) -> AsyncIterator[Channel]:
    """A channel to one server; nothing is connected before the first call. Leaving the block ends all calls.

    Args:
        tls: verifies the server's certificate for `host`; None speaks clear text.
    """
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    async with trio.open_nursery() as nursery:
        yield Channel(nursery, host, port, tls, settings)
        nursery.cancel_scope.cancel(reason="channel closed")


@frozen
class _Target:
    host: str
    port: int
    tls: ssl.SSLContext | None = field(repr=False)

    async def connect(self) -> trio.abc.Stream:
        """A stream that speaks HTTP/2.

        Raises:
            OSError: the server does not answer. trio.BrokenResourceError: its TLS is not what we want.
        """
        stream = await trio.open_tcp_stream(self.host, self.port)
        if self.tls is None:
            return stream
        secured = trio.SSLStream(stream, self.tls, server_hostname=self.host, https_compatible=True)
        try:
            await secured.do_handshake()
            if secured.selected_alpn_protocol() != "h2":
                raise trio.BrokenResourceError
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return secured


class Channel:
    """Calls to one server; made by `open_channel`."""

    def __init__(
        self, nursery: trio.Nursery, host: str, port: int, tls: ssl.SSLContext | None, settings: ChannelSettings
    ) -> None:
        self._nursery = nursery
        self._target = _Target(host, port, tls)
        self._settings = settings
        self._connection: ClientConnection | None = None
        self._connecting = trio.Lock()
        self._pause_s = settings.backoff_min_s
        self._retry_at = -math.inf

    def __repr__(self) -> str:
        return f"<Channel {self._target.host}:{self._target.port} {self._connection!r}>"

    async def unary(
        self, path: str, request: Any, response_type: type[M], *, deadline_s: float, metadata: RawHeaders = _NONE
    ) -> M:
        """One request, one response.

        Args:
            path: `/package.Service/Method`.
            metadata: further headers, names in lower case.

        Raises:
            StatusError: the call did not end OK: DEADLINE_EXCEEDED after `deadline_s`, UNAVAILABLE without a server.
        """
        payload = request.SerializeToString()
        deadline = trio.current_time() + deadline_s
        for repeatable in (True, False):
            call = await self._open(path, response_type, deadline, metadata)
            try:
                call.send_nowait(payload)
                call.half_close()
                ended = await call.wait_end()
            finally:
                call.close()
            if not (ended.unprocessed and repeatable):
                break
        return call.only_reply()

    @asynccontextmanager
    async def stream(
        self, path: str, response_type: type[M], *, deadline_s: float, metadata: RawHeaders = _NONE
    ) -> AsyncIterator[ClientCall[M]]:
        """A streaming call of any kind; leaving the block cancels it if it has not ended.

        Raises:
            StatusError: it could not be opened by the deadline (`math.inf` for none), or there is no server.
        """
        call = await self._open(path, response_type, trio.current_time() + deadline_s, metadata)
        try:
            yield call
        finally:
            call.close()

    async def _open(self, path: str, response_type: type[M], deadline: float, metadata: RawHeaders) -> ClientCall[M]:
        with trio.move_on_at(deadline):
            while True:
                connection = await self._usable_connection()
                if await connection.wait_room():
                    timeout_s = None if deadline == math.inf else deadline - trio.current_time()
                    stream_id, inbox = connection.open_call(path, timeout_s, metadata)
                    return ClientCall(connection, stream_id, inbox, response_type, deadline)
        raise _error(_DEADLINE)

    async def _usable_connection(self) -> ClientConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.machine.usable:
                if trio.current_time() < self._retry_at:
                    raise _error(_UNREACHABLE)
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> ClientConnection:
        """Connects, or notes the failure and raises UNAVAILABLE."""
        with trio.move_on_after(self._settings.connect_s):
            try:
                stream = await self._target.connect()
            except (OSError, trio.BrokenResourceError, ssl.SSLError):
                raise self._failed() from None  # the cause names addresses and certificates
            connection = self._start(stream)
            try:
                ready = await connection.wait_ready()
            finally:
                if not connection.machine.handshaken:
                    connection.retire()
            if ready:
                self._pause_s = self._settings.backoff_min_s
                return connection
        raise self._failed()

    def _start(self, stream: trio.abc.Stream) -> ClientConnection:
        settings, target = self._settings, self._target
        host = f"[{target.host}]" if ":" in target.host else target.host
        machine = ClientMachine(
            Limits(
                max_concurrent_streams=100,  # of streams the server opens, which gRPC has none of
                max_receive_message_bytes=settings.max_response_bytes,
                max_header_list_bytes=16 * 1024,
                connection_receive_bytes=settings.receive_bytes,
                abuse_burst=1_000,
                abuse_per_s=1_000.0,
            ),
            ByteBudget(settings.receive_bytes),
            authority=f"{host}:{target.port}",
            scheme="http" if target.tls is None else "https",
            user_agent=f"pushd/{__version__}",
        )
        connection = ClientConnection(
            stream, machine, idle_s=settings.idle_s, ping_s=settings.ping_s, stall_s=settings.stall_s
        )
        self._nursery.start_soon(connection.run)
        return connection

    def _failed(self) -> StatusError:
        jitter = random.uniform(0.8, 1.2)  # so that the clients of a restarted server do not come back in step
        self._retry_at = trio.current_time() + self._pause_s * jitter
        self._pause_s = min(self._pause_s * _BACKOFF_FACTOR, self._settings.backoff_max_s)
        return _error(_UNREACHABLE)


class ClientCall(Generic[M]):
    """A running call. Iterate over it for the replies; a status other than OK is raised."""

    def __init__(
        self, connection: ClientConnection, stream_id: int, inbox: Inbox, response_type: type[M], deadline: float
    ) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._inbox = inbox
        self._decode = response_type.FromString
        self._deadline = deadline

    def __repr__(self) -> str:
        return f"<ClientCall {self._stream_id} ended={self._inbox.ended}>"

    async def send(self, request: Any) -> None:
        """Sends one message, waiting while the server does not take what was sent before.

        Raises:
            StatusError: the deadline passed. After the server has ended the call, sending does nothing.
        """
        self.send_nowait(request.SerializeToString())
        connection, waiting = self._connection, self._connection.machine.waiting_bytes
        with trio.move_on_at(self._deadline) as scope:
            await trio.lowlevel.checkpoint()
            while self._inbox.ended is None and waiting(self._stream_id) > _WAITING_BYTES:
                await connection.wire.wait_progress()
        if scope.cancelled_caught:
            raise self._late()

    def send_nowait(self, payload: bytes) -> None:
        """Queues one encoded message."""
        self._connection.machine.send(self._stream_id, payload)
        self._connection.wire.poke()

    def half_close(self) -> None:
        """No further message follows."""
        self._connection.machine.half_close(self._stream_id)
        self._connection.wire.poke()

    def close(self) -> None:
        """Cancels the call if it has not ended."""
        self._connection.close_call(self._stream_id)

    async def receive(self) -> M | None:
        """The next reply; None after the last one of a call that ended OK.

        Raises:
            StatusError: the call ended otherwise, or its deadline passed.
        """
        inbox = self._inbox
        with trio.move_on_at(self._deadline) as scope:
            while not inbox.payloads and inbox.ended is None:
                await inbox.wait()
        if scope.cancelled_caught:
            raise self._late()
        if inbox.payloads:
            return self._take()
        self._raise_for_status()
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        reply = await self.receive()
        if reply is None:
            raise StopAsyncIteration
        return reply

    async def wait_end(self) -> CallEnded:
        """How the call ended; replies stay to be read.

        Raises:
            StatusError: the deadline passed first.
        """
        with trio.move_on_at(self._deadline):
            while self._inbox.ended is None:
                await self._inbox.wait()
            return self._inbox.ended
        raise self._late()

    def only_reply(self) -> M:
        """The reply of an ended unary call.

        Raises:
            StatusError: it did not end OK, or not with one reply.
        """
        self._raise_for_status()
        if len(self._inbox.payloads) != 1:
            raise _error(_NOT_ONE)
        return self._take()

    def _take(self) -> M:
        payload = self._inbox.payloads.popleft()
        self._connection.machine.consumed(self._stream_id, payload)
        self._connection.wire.poke()
        try:
            return self._decode(payload)
        except DecodeError as exc:
            raise _error(_UNDECODABLE) from exc

    def _raise_for_status(self) -> None:
        ended = self._inbox.ended
        if ended is not None and ended.status.code is not Code.OK:
            raise _error(ended.status)

    def _late(self) -> StatusError:
        self.close()
        return _error(_DEADLINE)


def _error(status: Status) -> StatusError:
    return StatusError(status.code, status.message, status.details)
