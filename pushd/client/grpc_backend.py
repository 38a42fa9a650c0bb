"""The backend over gRPC: the connection machine of the server's edge, seen from the other side, on anyio's sockets.

anyio is what lets one code base run under Trio and under asyncio. The machine does the protocol; this module gives it a
socket, a clock and the callers.

Notification calls have a connection of their own. On a shared one, a batch of a thousand subscriptions that a stalled
backend does not read would use up the connection's flow-control window, and a message behind it would not leave
(PUSH-103). A connection is opened by the first call and closed after ten quiet seconds, so that no call is ever lost in
one that a phone's network forgot.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSAttribute
from attrs import define, frozen
from google.protobuf.message import DecodeError, Message

import pushd
from pushd.client.errors import CallFailed
from pushd.errors import Code
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, query_pb2
from pushd.rpc.machine import CallEnded, ClientMachine, Limits, MachineEvent, MessageReceived, RawHeaders, ReceiveBudget

LOG = logging.getLogger("pushd.client")

QUIET_S = 10.0  # an unused connection is closed, a used one is pinged, and given up after another such time
_LIMITS = Limits(
    max_concurrent_streams=100,
    max_receive_message_bytes=25 * 2**20,  # the transport's ceiling in both directions
    max_header_list_bytes=16 * 1024,
    connection_receive_bytes=64 * 2**20,
    abuse_burst=200,
    abuse_per_s=100.0,
)
_LOSSES = (OSError, ssl.SSLError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)

Token = Callable[[], Awaitable[str]]


class _Decodable(Protocol):
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


Answer = TypeVar("Answer", bound=_Decodable)


@frozen
class Address:
    """Where the backend is; `tls` None for a connection in clear."""

    host: str
    port: int
    tls: ssl.SSLContext | None

    @property
    def authority(self) -> str:
        """The value of `:authority`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def read_address(address: str, ssl_context: ssl.SSLContext | None, *, allow_plaintext: bool) -> Address:
    """Take `https://host:port` or `http://host:port` apart.

    Raises:
        ValueError: neither of the two, or in clear to another machine without permission.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.username:
        raise ValueError("the address is https://host:port, or http://host:port in clear")
    if parts.scheme == "http":
        if not (allow_plaintext or _is_this_machine(parts.hostname)):
            raise ValueError("in clear the recipient's secret can be read on the way; see allow_plaintext")
        return Address(parts.hostname, parts.port or 80, None)
    if ssl_context is None:
        ssl_context = ssl.create_default_context()
        ssl_context.minimum_version = ssl.TLSVersion.TLSv1_2
        ssl_context.set_alpn_protocols(["h2"])
    return Address(parts.hostname, parts.port or 443, ssl_context)


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GrpcBackend:
    """`Backend` over the network. An asynchronous context manager: its connections live inside the block.

    Args:
        address: from `read_address`.
        token: called before each call for a bearer token, or None.
    """

    def __init__(self, address: Address, token: Token | None = None) -> None:
        self._address = address
        self._token = token
        self._running = anyio.create_task_group()
        self._control = _Line(self._connect)
        self._messages = _Line(self._connect)

    async def __aenter__(self) -> Self:
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._running.cancel_scope.cancel()
        return await self._running.__aexit__(kind, exc, traceback)

    async def register(self, request: notification_pb2.RegisterRequest) -> notification_pb2.RecipientState:
        path = "/xmtp.backend.v1.NotificationService/Register"
        return await self._call(self._control, path, request, notification_pb2.RecipientState)

    async def unregister(self, request: notification_pb2.UnregisterRequest) -> None:
        path = "/xmtp.backend.v1.NotificationService/Unregister"
        await self._call(self._control, path, request, notification_pb2.UnregisterResponse)

    async def update_subscriptions(
        self, request: notification_pb2.UpdateSubscriptionsRequest
    ) -> notification_pb2.RecipientState:
        path = "/xmtp.backend.v1.NotificationService/UpdateSubscriptions"
        return await self._call(self._control, path, request, notification_pb2.RecipientState)

    async def publish(self, request: publish_pb2.PublishRequest) -> publish_pb2.PublishResponse:
        path = "/xmtp.backend.v1.PublishService/Publish"
        return await self._call(self._messages, path, request, publish_pb2.PublishResponse)

    async def query(self, request: query_pb2.QueryRequest) -> query_pb2.QueryResponse:
        path = "/xmtp.backend.v1.QueryService/Query"
        return await self._call(self._messages, path, request, query_pb2.QueryResponse)

    async def _call(self, line: _Line, path: str, request: Message, answer_type: type[Answer]) -> Answer:
        metadata: RawHeaders = []
        if self._token is not None:
            metadata.append((b"authorization", b"Bearer " + (await self._token()).encode("ascii")))
        outcome = await line.call(path, request.SerializeToString(), metadata)
        if outcome.code is Code.OK and outcome.payload is not None:
            with contextlib.suppress(DecodeError):
                return answer_type.FromString(outcome.payload)
        raise CallFailed(Code.INTERNAL if outcome.code is Code.OK else outcome.code)

    async def _connect(self) -> _Connection | None:
        """A new connection, or None when there is none to be had."""
        address = self._address
        try:
            if address.tls is None:
                stream: ByteStream = await anyio.connect_tcp(address.host, address.port)
            else:
                # A peer that only closes the socket is not told from one that says goodbye: HTTP/2 frames its own ends.
                stream = await anyio.connect_tcp(
                    address.host, address.port, ssl_context=address.tls, tls_standard_compatible=False
                )
                if stream.extra(TLSAttribute.alpn_protocol, None) != "h2":
                    LOG.warning("the backend does not speak HTTP/2 over TLS")
                    await anyio.aclose_forcefully(stream)
                    return None
        except _LOSSES as exc:
            LOG.info("the backend was not reached: %s", type(exc).__name__)
            return None
        connection = _Connection(stream, address)
        self._running.start_soon(connection.run)
        return connection


@frozen
class _Outcome:
    code: Code
    payload: bytes | None = None
    unprocessed: bool = False


_UNREACHED = _Outcome(Code.UNAVAILABLE)


class _Line:
    """The present connection of one purpose, replaced when it takes no more calls."""

    def __init__(self, connect: Callable[[], Awaitable[_Connection | None]]) -> None:
        self._connect = connect
        self._connecting = anyio.Lock()
        self._connection: _Connection | None = None

    async def call(self, path: str, payload: bytes, metadata: RawHeaders) -> _Outcome:
        outcome = _UNREACHED
        for _ in range(2):
            async with self._connecting:
                if self._connection is None or not self._connection.usable:
                    self._connection = await self._connect()
                connection = self._connection
            if connection is None:
                return _UNREACHED
            outcome = await connection.call(path, payload, metadata)
            # A server that is going away says which calls it has not seen; those may be made again elsewhere, once.
            if not outcome.unprocessed:
                break
        return outcome


@define(eq=False)
class _Call:
    ended: anyio.Event
    payload: bytes | None = None
    outcome: _Outcome = _UNREACHED


class _Connection:
    """One socket, with a task that reads and one that writes, so that a caller who gives up never cuts a frame."""

    def __init__(self, stream: ByteStream, address: Address) -> None:
        self._stream = stream
        self._machine = ClientMachine(
            _LIMITS,
            ReceiveBudget(_LIMITS.connection_receive_bytes),
            authority=address.authority,
            scheme="http" if address.tls is None else "https",
            user_agent=f"pushd-client/{pushd.__version__}",
        )
        self._calls: dict[int, _Call] = {}
        self._output = anyio.Event()
        self._room = anyio.Event()

    @property
    def usable(self) -> bool:
        """Whether another call may be made."""
        return self._machine.usable

    async def call(self, path: str, payload: bytes, metadata: RawHeaders) -> _Outcome:
        """One unary call, with the caller's deadline as its time-out."""
        while not self._machine.has_room:
            if not self.usable:
                return _UNREACHED
            await self._room.wait()
        if not self.usable:
            return _UNREACHED
        deadline = anyio.current_effective_deadline()
        timeout_s = None if deadline == math.inf else max(deadline - anyio.current_time(), 0.0)
        stream_id = self._machine.open_call(path, timeout_s, metadata)
        call = self._calls[stream_id] = _Call(anyio.Event())
        self._machine.send(stream_id, payload)
        self._machine.half_close(stream_id)
        self._output.set()
        try:
            await call.ended.wait()
        finally:
            if self._calls.pop(stream_id, None) is not None:
                self._machine.cancel(stream_id)
                self._made_room()
        return call.outcome

    async def run(self) -> None:
        """Keep the connection until it is lost, refused, or of no use."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, tasks.cancel_scope)
                await self._read()
                tasks.cancel_scope.cancel()
        finally:
            self._act(self._machine.lost())
            self._made_room()
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        pinged = False
        while not (self._machine.going_away and not self._calls):
            with anyio.move_on_after(QUIET_S) as quiet:
                try:
                    data = await self._stream.receive()
                except _LOSSES:
                    return
            if quiet.cancelled_caught:
                if pinged or not self._calls:
                    return
                self._machine.ping()
                pinged = True
            else:
                pinged = False
                self._act(self._machine.receive_data(data, anyio.current_time()))
            self._output.set()
            if self._machine.closed:
                return

    async def _write(self, scope: anyio.CancelScope) -> None:
        while True:
            self._output = anyio.Event()
            while data := self._machine.data_to_send():
                try:
                    await self._stream.send(data)
                except _LOSSES:
                    scope.cancel()
                    return
            await self._output.wait()

    def _act(self, events: list[MachineEvent] | list[CallEnded]) -> None:
        for event in events:
            match event:
                case MessageReceived(stream_id, payload):
                    self._machine.consumed(stream_id, payload)
                    if stream_id in self._calls:
                        self._calls[stream_id].payload = payload
                case CallEnded(stream_id, status, unprocessed):
                    call = self._calls.pop(stream_id, None)
                    if call is not None:
                        # What was concluded here, or from a proxy's HTTP status, is not the backend's judgement: a
                        # load balancer without a route answers 404, and that must not stop notifications for good.
                        code = status.code if status.from_peer else Code.UNAVAILABLE
                        call.outcome = _Outcome(code, call.payload, unprocessed)
                        call.ended.set()
                    self._made_room()
                case _:
                    pass  # a failed connection shows in `closed`, one that goes away in `going_away`

    def _made_room(self) -> None:
        self._room.set()
        self._room = anyio.Event()
