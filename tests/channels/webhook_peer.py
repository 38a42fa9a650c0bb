"""A webhook receiver inside the test: real sockets and TLS, every byte of its answers chosen by the test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from ipaddress import ip_address

import h11
import trio
import trustme
from attrs import define, field

from pushd.channels.https1 import client_context
from pushd.channels.webhook import WebhookSender, open_webhook_sender
from pushd.core.addresses import Address

NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
HOST = "push.invalid"

Stream = trio.SSLStream[trio.SocketStream]
Answer = bytes | Callable[[Stream], Awaitable[None]]


class Names:
    """A resolver without threads. A host that is not in the table hangs; answers may be changed between attempts."""

    def __init__(self, **table: list[str]) -> None:
        self.table = {HOST: ["127.0.0.1"], **table}
        self.asked: list[str] = []

    async def resolve(self, host: str) -> tuple[Address, ...]:
        self.asked.append(host)
        await trio.lowlevel.checkpoint()
        if host not in self.table:
            await trio.sleep_forever()
        return tuple(map(ip_address, self.table[host]))


@define
class Received:
    """One request as it came over the wire."""

    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def __getitem__(self, name: str) -> str:
        [value] = [value for key, value in self.headers if key == name]
        return value


@define(eq=False)
class Peer:
    """What the receiver saw. `answers` are used in turn; the last one is repeated."""

    port: int
    answers: list[Answer]
    connections: int = 0
    handshakes: int = 0
    open_now: int = 0
    server_names: list[str | None] = field(factory=list)
    requests: list[Received] = field(factory=list)
    ended: trio.Event = field(factory=trio.Event)

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        while self.open_now:
            await self.ended.wait()

    def url(self, path: str = "/hook", host: str = HOST) -> str:
        return f"https://{host}:{self.port}{path}"


@lru_cache
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@lru_cache
def trusting_context() -> ssl.SSLContext:
    context = client_context()
    authority().configure_trust(context)
    return context


def server_context(*names: str, issuer: trustme.CA | None = None, **options: object) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (issuer or authority()).issue_cert(*names, **options).configure_cert(context)  # type: ignore[arg-type]
    return context


@lru_cache
def usual_context() -> ssl.SSLContext:
    return server_context(HOST, "other.invalid", "*.hosts.invalid")


@asynccontextmanager
async def open_peer(
    *answers: Answer, context: ssl.SSLContext | None = None, address: str = "127.0.0.1"
) -> AsyncIterator[Peer]:
    context = context or usual_context()
    async with trio.open_nursery() as serving:
        [listener] = await trio.open_tcp_listeners(0, host=address, backlog=1024)
        peer = Peer(listener.socket.getsockname()[1], list(answers or [NO_CONTENT]))
        context.sni_callback = lambda _socket, name, _context: peer.server_names.append(name)

        async def handle(transport: trio.SocketStream) -> None:
            peer.connections += 1
            peer.open_now += 1
            try:
                await _serve(peer, trio.SSLStream(transport, context, server_side=True))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                peer.open_now -= 1
                peer.ended.set()
                peer.ended = trio.Event()
                await trio.aclose_forcefully(transport)

        serving.start_soon(trio.serve_listeners, handle, [listener])
        yield peer
        serving.cancel_scope.cancel()


@asynccontextmanager
async def open_sender(
    names: Names | None = None, *, private: bool = True, tls: ssl.SSLContext | None = None
) -> AsyncIterator[WebhookSender]:
    async with open_webhook_sender(
        resolver=names or Names(), tls=tls or trusting_context(), allow_private_addresses=private
    ) as sender:
        yield sender


async def _serve(peer: Peer, stream: Stream) -> None:
    await stream.do_handshake()
    peer.handshakes += 1
    http = h11.Connection(h11.SERVER)
    while True:
        body = b""
        request: h11.Request | None = None
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(bytes(await stream.receive_some()))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return
        assert request is not None
        headers = [(name.decode(), value.decode()) for name, value in request.headers]
        peer.requests.append(Received(request.target.decode(), headers, body))
        answer = peer.answers.pop(0) if len(peer.answers) > 1 else peer.answers[0]
        if isinstance(answer, bytes):
            await stream.send_all(answer)
        else:
            await answer(stream)
        http = h11.Connection(h11.SERVER)
