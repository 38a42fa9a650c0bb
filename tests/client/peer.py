"""A scripted gRPC peer on h2 alone, and a TCP proxy that can stop, cut and count."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import trio
from attrs import define, field, frozen


@frozen
class Answer:
    """What a call gets: an HTTP status, then (unless None) a gRPC status, before it a message if there is one."""

    grpc_status: int | None = 0
    grpc_message: bytes = b""
    message: bytes | None = None
    http_status: int = 200


Reaction = Answer | str
"""An answer; "silent"; "cut" the connection; "reset" or "refuse" the stream; "goaway" without having seen the call."""


@define
class Peer:
    """What the peer saw, and how it reacts to the calls to come."""

    react: Callable[[str], Reaction]
    port: int = 0
    connections: int = 0
    pings: int = 0
    requests: list[dict[bytes, bytes]] = field(factory=list)
    alive: set[trio.SocketStream] = field(factory=set)
    idle: trio.Event = field(factory=trio.Event)
    """Set once the last connection has been closed."""
    cancelled: trio.Event = field(factory=trio.Event)
    """Set once a caller has reset a stream."""


@asynccontextmanager
async def running_peer(
    react: Callable[[str], Reaction] | Reaction, *, answer_pings: bool = True
) -> AsyncIterator[Peer]:
    """Serve on loopback; `react` gets the path of each call."""
    peer = Peer(react if callable(react) else lambda path: react)

    async def serve(stream: trio.SocketStream) -> None:
        peer.connections += 1
        peer.alive.add(stream)
        try:
            await _serve(peer, stream, answer_pings)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            peer.alive.discard(stream)
            if not peer.alive:
                peer.idle.set()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        peer.port = listeners[0].socket.getsockname()[1]
        yield peer
        nursery.cancel_scope.cancel()


async def _serve(peer: Peer, stream: trio.SocketStream, answer_pings: bool) -> None:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    connection.initiate_connection()
    await stream.send_all(connection.data_to_send())
    paths: dict[int, str] = {}
    while data := await stream.receive_some(65_536):
        for event in connection.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    headers = dict(event.headers)
                    peer.requests.append(headers)
                    paths[event.stream_id] = headers[b":path"].decode()
                case h2.events.DataReceived():
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.PingReceived():
                    peer.pings += 1
                case h2.events.StreamReset():
                    peer.cancelled.set()
                case h2.events.StreamEnded():
                    if not _react(connection, event.stream_id, peer.react(paths.pop(event.stream_id))):
                        await stream.aclose()
                        return
        output = connection.data_to_send()
        if answer_pings or peer.pings == 0:
            await stream.send_all(output)
        if connection.state_machine.state is h2.connection.ConnectionState.CLOSED:
            while await stream.receive_some(65_536):  # after GOAWAY h2 listens to nothing more
                pass
            return


def _react(connection: h2.connection.H2Connection, stream_id: int, reaction: Reaction) -> bool:
    match reaction:
        case "silent":
            pass
        case "cut":
            return False
        case "reset":
            connection.reset_stream(stream_id, 8)
        case "refuse":
            connection.reset_stream(stream_id, 7)
        case "goaway":
            connection.close_connection(last_stream_id=stream_id - 2 if stream_id > 1 else 0)
        case Answer():
            _answer(connection, stream_id, reaction)
    return True


def _answer(connection: h2.connection.H2Connection, stream_id: int, answer: Answer) -> None:
    grpc = answer.grpc_status is not None
    content_type = b"application/grpc" if grpc else b"text/html"
    headers = [(b":status", str(answer.http_status).encode()), (b"content-type", content_type)]
    status = [(b"grpc-status", str(answer.grpc_status).encode()), (b"grpc-message", answer.grpc_message)]
    if answer.message is None:
        connection.send_headers(stream_id, headers + (status if grpc else []), end_stream=True)
        return
    connection.send_headers(stream_id, headers)
    connection.send_data(stream_id, b"\x00" + len(answer.message).to_bytes(4, "big") + answer.message)
    if grpc:
        connection.send_headers(stream_id, status, end_stream=True)
    else:
        connection.end_stream(stream_id)


class Proxy:
    """Forwards TCP to a port; may be told to hold everything back, or to cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = 0
        self.connections = 0
        self._flowing = trio.Event()
        self._flowing.set()
        self._scopes: set[trio.CancelScope] = set()

    def stall(self) -> None:
        """Accept and take everything, and pass nothing on."""
        self._flowing = trio.Event()

    def flow(self) -> None:
        """Pass on again, beginning with what was held back."""
        self._flowing.set()

    def cut(self) -> None:
        """Close every connection."""
        for scope in self._scopes:
            scope.cancel()

    async def _handle(self, client: trio.SocketStream) -> None:
        self.connections += 1
        async with await trio.open_tcp_stream("127.0.0.1", self._target_port) as server:
            async with trio.open_nursery() as nursery:
                self._scopes.add(nursery.cancel_scope)
                nursery.start_soon(self._pump, client, server, nursery.cancel_scope)
                nursery.start_soon(self._pump, server, client, nursery.cancel_scope)

    async def _pump(self, source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            while data := await source.receive_some(65_536):
                await self._flowing.wait()
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        scope.cancel()


@asynccontextmanager
async def running_proxy(target_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target_port)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, proxy._handle, 0)
        proxy.port = listeners[0].socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
