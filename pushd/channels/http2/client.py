"""Requests to providers over pooled HTTP/2 connections.

A pool belongs to one origin. Its connections are opened by tasks of the client, never by a caller: a caller that is
cancelled while it waits leaves nothing half done behind, and callers that need the same connection share one attempt to
open it. A caller waits for a stream inside its own deadline.
"""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import trio
from attrs import field, frozen

from pushd.channels.http2.connection import Connection
from pushd.channels.http2.exchange import ConnectionFailed, Exchange, NotProcessed, Response

_CONNECT_S = 10.0
# A failed attempt to connect answers for everybody who asks within this time, so that 256 senders do not become 256
# connection attempts; short enough to be invisible beside the shortest retry delay of 1 s.
_REFUSED_S = 0.25
# One connection carries a channel's 256 sends unless the peer allows fewer streams. APNs allows one at first and raises
# the limit with the first good answer, so another connection is opened only when the wait goes on.
_GROW_AFTER_S = 0.25
_MAX_CONNECTIONS = 4  # enough for a channel's 256 sends where the peer allows 64 streams on each


@frozen(cache_hash=True)
class Origin:
    """Where requests go: a host name and port, with the TLS settings to trust it by (None: a fake in clear).

    `pings` keeps an idle connection alive and checks it; for peers that punish pings it is closed instead.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = field(repr=False)
    pings: bool = True

    @property
    def authority(self) -> str:
        """The `:authority` of a request: the port only where it is not 443."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 443 else f"{host}:{self.port}"


def provider_tls(ca_file: Path | None = None) -> ssl.SSLContext:
    """TLS settings for a provider: names checked, HTTP/2 offered and nothing else.

    Made once per provider: reading the system's trust store costs about 17 ms.

    Args:
        ca_file: PEM file with the only authorities to trust; the system's where None.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    return context


def provider_origin(host: str, endpoint: str | None, ca_file: Path | None, *, pings: bool) -> Origin:
    """The provider's own origin, or the fake at `endpoint` (development only, checked to be loopback by the config).

    Args:
        host: the provider's host name, port 443.
        endpoint: `http(s)://host:port` of a fake.
        ca_file: authority to trust instead of the system's.
        pings: see `Origin`.
    """
    tls = provider_tls(ca_file)
    if endpoint is None:
        return Origin(host, 443, tls, pings)
    parts = urlsplit(endpoint)
    plain = parts.scheme == "http"
    return Origin(parts.hostname or "", parts.port or (80 if plain else 443), None if plain else tls, pings)


async def open_transport(origin: Origin) -> trio.abc.Stream:
    """A connection that speaks HTTP/2, over TLS unless the origin is in clear.

    Raises:
        ConnectionFailed: `connect` when nobody answers or the name cannot be asked for, `tls` when the certificate is
            not `origin`'s or the peer does not choose HTTP/2.
    """
    try:
        socket = await trio.open_tcp_stream(origin.host, origin.port)
    except (OSError, RuntimeError) as error:  # the latter when the system has no thread left for asking for the name
        raise ConnectionFailed("connect") from error
    if origin.tls is None:
        return socket
    stream = trio.SSLStream(socket, origin.tls, server_hostname=origin.host, https_compatible=True)
    try:
        await stream.do_handshake()
        if stream.selected_alpn_protocol() != "h2":
            raise ConnectionFailed("tls")
    except trio.BrokenResourceError as error:
        await trio.aclose_forcefully(stream)
        raise ConnectionFailed("tls") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


class _Pool:
    """The connections of one origin, and those who wait for a stream."""

    def __init__(self, origin: Origin, opening: trio.Nursery, opener: Callable[[Origin], Awaitable[trio.abc.Stream]]):
        self._origin = origin
        self._opening = opening
        self._opener = opener
        self._connections: list[Connection] = []
        self._waiting = trio.lowlevel.ParkingLot()
        self._connecting = False
        self._failure = "connect"
        self._refuses_until = -math.inf

    def take(self) -> Connection | None:
        """A connection with room for one stream, or None."""
        for connection in self._connections:
            if connection.has_room():
                return connection
        return None

    def take_in_turn(self) -> Connection | None:
        """As `take`, but nobody overtakes those who wait already."""
        return None if self._waiting else self.take()

    async def wait_for_room(self) -> Connection:
        """A connection with room, opening one where needed.

        Raises:
            ConnectionFailed: no connection is open and none can be opened.
        """
        woken = False
        while True:
            connection = self.take() if woken else self.take_in_turn()
            if connection is not None:
                return connection
            woken = True
            usable = [connection for connection in self._connections if connection.accepting]
            if not usable and trio.current_time() < self._refuses_until:
                raise ConnectionFailed(self._failure)
            if not self._connecting and len(usable) < _MAX_CONNECTIONS:
                self._connecting = True
                self._opening.start_soon(self._connect, _GROW_AFTER_S if usable else 0.0)
            await self._waiting.park()

    def on_change(self) -> None:
        """Let waiters look again: as many as there may be streams for, or all when none is to be had here."""
        if not self._waiting:
            return
        for connection in self._connections:
            if connection.has_room():
                self._waiting.unpark(count=connection.room())
                return
        if not any(connection.accepting for connection in self._connections):
            self._waiting.unpark_all()

    async def _connect(self, delay_s: float) -> None:
        try:
            await trio.sleep(delay_s)
            if self.take() is None and self._waiting:
                with trio.fail_after(_CONNECT_S):
                    transport = await self._opener(self._origin)
                    connection = Connection(transport, pings=self._origin.pings, on_change=self.on_change)
                    await self._opening.start(self._serve, connection)
        except (ConnectionFailed, trio.TooSlowError) as failure:
            self._failure = failure.kind if isinstance(failure, ConnectionFailed) else "connect"
            self._refuses_until = trio.current_time() + _REFUSED_S
        finally:
            self._connecting = False
            self._waiting.unpark_all()

    async def _serve(self, connection: Connection, task_status: trio.TaskStatus[Connection]) -> None:
        self._connections.append(connection)
        try:
            await connection.run(task_status)
        finally:
            self._connections.remove(connection)
            self.on_change()


class Http2Client:
    """Sends requests; use `open_http2_client`."""

    def __init__(self, opening: trio.Nursery, opener: Callable[[Origin], Awaitable[trio.abc.Stream]]) -> None:
        self._opening = opening
        self._opener = opener
        self._pools: dict[Origin, _Pool] = {}

    async def request(self, origin: Origin, block: bytes, body: bytes, body_wait_s: Mapping[int, float]) -> Response:
        """POST-like exchange: one header block, one body, one answer.

        Sent a second time only when the peer states that it did not act on the first (GOAWAY below the stream,
        REFUSED_STREAM). The caller's deadline bounds the whole; leaving early gives the stream back.

        Args:
            origin: where to.
            block: the header block, made of `engine.literal` fields.
            body: the request body.
            body_wait_s: seconds to wait for the rest of an answer with that status, 0 for "the status says it all". For
                statuses not listed the whole answer is waited for.

        Raises:
            ConnectionFailed: no answer.
        """
        pool = self._pools.get(origin)
        if pool is None:
            pool = self._pools[origin] = _Pool(origin, self._opening, self._opener)
        try:
            return await self._exchange(pool, block, body, body_wait_s)
        except NotProcessed:
            return await self._exchange(pool, block, body, body_wait_s)

    async def _exchange(self, pool: _Pool, block: bytes, body: bytes, body_wait_s: Mapping[int, float]) -> Response:
        connection = pool.take_in_turn()
        if connection is None:
            connection = await pool.wait_for_room()
        exchange = connection.open(block, body, body_wait_s)
        try:
            await exchange.done.wait()
            if exchange.error is not None:
                # A copy: many exchanges may share the error of their connection, and each raise grows its traceback.
                raise type(exchange.error)(exchange.error.kind)
            if not exchange.ended and body_wait_s[exchange.status] > 0:
                await _wait_for_rest(exchange, body_wait_s[exchange.status])
            return exchange.response()
        finally:
            connection.close(exchange)


async def _wait_for_rest(exchange: Exchange, wait_s: float) -> None:
    exchange.done = trio.Event()
    with trio.move_on_after(wait_s):
        await exchange.done.wait()


@contextlib.asynccontextmanager
async def open_http2_client(
    opener: Callable[[Origin], Awaitable[trio.abc.Stream]] = open_transport,
) -> AsyncIterator[Http2Client]:
    """A client whose connections live inside the block.

    Args:
        opener: opens the byte stream to an origin; tests put memory streams here.
    """
    async with trio.open_nursery() as connections:
        try:
            yield Http2Client(connections, opener)
        finally:
            connections.cancel_scope.cancel()
