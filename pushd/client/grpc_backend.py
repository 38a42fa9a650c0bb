"""The backend over gRPC, on anyio's sockets: that is what lets one code base run under Trio and under asyncio.

Notification calls have a connection of their own. On a shared one, a batch of a thousand subscriptions that a stalled
backend does not read would use up the connection's flow-control window, and a message behind it would not leave
(PUSH-103). A connection is opened by the first call and closed after ten quiet seconds, so that no call is ever lost in
one that a phone's network forgot.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, Self, TypeVar
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.tls import TLSAttribute
from attrs import frozen
from google.protobuf.message import DecodeError, Message

from pushd.client.background import background_tasks
from pushd.client.connection import LOSSES, Connection, Line
from pushd.client.errors import CallFailed, UnusableToken
from pushd.errors import Code
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, query_pb2
from pushd.rpc.machine import RawHeaders

LOG = logging.getLogger("pushd.client")

CONNECT_S = 10.0  # name, TCP and TLS together; a message has no deadline of its own, and others wait for the attempt

Token = Callable[[], Awaitable[str]]
_SENDABLE = re.compile("[!-~]+")  # h2 sends a line end as it is, for which a peer drops the connection


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
    """Take `https://host:port` or `http://host:port` apart, and have the context offer HTTP/2.

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


@asynccontextmanager
async def open_backend(address: Address, token: Token | None = None) -> AsyncIterator[GrpcBackend]:
    """`Backend` over the network; its connections live inside the block, and none is made before the first call.

    Args:
        address: from `read_address`.
        token: called before each call for a bearer token, or None.
    """
    async with background_tasks() as running:
        yield GrpcBackend(running, address, token)


class GrpcBackend:
    """Made by `open_backend`."""

    def __init__(self, running: TaskGroup, address: Address, token: Token | None) -> None:
        self._running = running
        self._address = address
        self._token = token
        self._control = Line(self._connect)
        self._messages = Line(self._connect)

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

    async def _call(self, line: Line, path: str, request: Message, answer_type: type[Answer]) -> Answer:
        metadata: RawHeaders = []
        if self._token is not None:
            token = await self._token()
            if not _SENDABLE.fullmatch(token):
                raise UnusableToken
            metadata.append((b"authorization", b"Bearer " + token.encode("ascii")))
        outcome = await line.call(path, request.SerializeToString(), metadata)
        if outcome.code is Code.OK and outcome.payload is not None:
            with contextlib.suppress(DecodeError):
                return answer_type.FromString(outcome.payload)
        raise CallFailed(Code.INTERNAL if outcome.code is Code.OK else outcome.code)

    async def _connect(self) -> Connection | None:
        """A new connection, or None when there is none to be had."""
        address = self._address
        try:
            with anyio.fail_after(CONNECT_S):
                stream = await _open(address)
            if address.tls is not None and stream.extra(TLSAttribute.alpn_protocol, None) != "h2":
                LOG.warning("the backend does not speak HTTP/2 over TLS")
                await anyio.aclose_forcefully(stream)
                return None
        except LOSSES as exc:
            LOG.info("the backend was not reached: %s", type(exc).__name__)
            return None
        connection = Connection(stream, authority=address.authority, scheme="http" if address.tls is None else "https")
        self._running.start_soon(connection.run)
        return connection


async def _open(address: Address) -> ByteStream:
    if address.tls is None:
        return await anyio.connect_tcp(address.host, address.port)
    # A peer that only closes the socket is not told from one that says goodbye: HTTP/2 frames its own ends.
    return await anyio.connect_tcp(address.host, address.port, ssl_context=address.tls, tls_standard_compatible=False)
