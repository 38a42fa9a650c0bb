"""A TCP proxy that stands in front of a database or a provider and breaks what passes through it, on command.

It listens on 127.0.0.1 and leads to a Unix socket or to another loopback port. Bytes pass unread, TLS included.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

_CHUNKS = 64  # of 64 KiB, on their way in each direction of a connection, before the sender has to wait


class Proxy:
    """A running proxy. Every method takes effect at once, on open connections too."""

    def __init__(self, upstream: Path | int) -> None:
        self._upstream = upstream
        self._hearing = trio.Event()
        self._hearing.set()
        self._refusing = False
        self._delay_s = 0.0
        self._open: set[trio.SocketStream] = set()
        self.port = 0
        self.accepted = 0
        """Connections ever taken."""

    def __repr__(self) -> str:
        return f"<Proxy open={len(self._open)} deaf={not self._hearing.is_set()} refusing={self._refusing}>"

    @property
    def is_deaf(self) -> bool:
        return not self._hearing.is_set()

    def cut(self) -> None:
        """Reset every open connection, those that were taken while deaf too; new ones are taken."""
        for stream in list(self._open):
            _reset(stream)
        self._open.clear()

    def refuse(self) -> None:
        """Reset every open connection and every new one, as a machine that is up without its server."""
        self._refusing = True
        self.cut()
        self._hearing.set()  # whoever waited has nothing left to wait for

    def go_deaf(self) -> None:
        """Keep connections, take new ones, and pass nothing on, not even the end of a connection."""
        self._refusing = False
        if self._hearing.is_set():
            self._hearing = trio.Event()

    def delay(self, seconds: float) -> None:
        """Hold everything that arrives from now on for so long, in each direction."""
        self._delay_s = seconds

    def heal(self) -> None:
        """Work as a proxy should. What was held while deaf is passed on."""
        self._refusing = False
        self._delay_s = 0.0
        self._hearing.set()

    async def serve(self, client: trio.SocketStream) -> None:
        """Carry one connection."""
        self.accepted += 1
        if self._refusing:
            _reset(client)
            return
        # Open from here on: one that was taken while deaf must not outlive a cut, nor be carried once it was refused.
        self._open.add(client)
        try:
            async with client:
                await self._hearing.wait()
                if client in self._open:
                    await self._join(client)
        finally:
            self._open.discard(client)

    async def _join(self, client: trio.SocketStream) -> None:
        try:
            server = await self._connect()
        except OSError:
            _reset(client)
            return
        async with server:
            if client not in self._open:
                return
            self._open.add(server)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, client, server, nursery.cancel_scope)
                    nursery.start_soon(self._carry, server, client, nursery.cancel_scope)
            finally:
                self._open.discard(server)

    async def _connect(self) -> trio.SocketStream:
        if isinstance(self._upstream, Path):
            return await trio.open_unix_socket(self._upstream)
        return await trio.open_tcp_stream("127.0.0.1", self._upstream)

    async def _carry(self, source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope) -> None:
        send, receive = trio.open_memory_channel[tuple[float, bytes]](_CHUNKS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, source, send)
            try:
                async for due, chunk in receive:
                    await trio.sleep_until(due)
                    await self._hearing.wait()
                    await target.send_all(chunk)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                nursery.cancel_scope.cancel()
        # A half-closed connection is of no use to any protocol that passes here.
        await self._hearing.wait()
        both.cancel()

    async def _read(self, source: trio.SocketStream, send: trio.MemorySendChannel[tuple[float, bytes]]) -> None:
        async with send:
            try:
                while chunk := await source.receive_some(65_536):
                    await send.send((trio.current_time() + self._delay_s, chunk))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass


def _reset(stream: trio.SocketStream) -> None:
    """Close with RST instead of FIN where there is such a thing."""
    with suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@asynccontextmanager
async def open_proxy(upstream: Path | int) -> AsyncIterator[Proxy]:
    """A proxy to the Unix socket or the loopback port `upstream`; it ends with the block."""
    proxy = Proxy(upstream)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
    proxy.port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, proxy.serve, listeners)
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
