"""The client's side of TLS over one Trio socket.

`trio.SSLStream` would do, but for one question it cannot answer: is there anything left that was received and not yet
read? A connection is used again only when there is not, or an answer nobody asked for would be taken for the next
one's. Used by one task at a time, this also needs none of its locks.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from select import POLLIN, poll

import trio

RECEIVE_BYTES = 16_384  # one TLS record


def handshake_turns() -> trio.CapacityLimiter:
    """What all handshakes of a sender share, so that a burst of them does not hold up everything else.

    A step of a handshake is a millisecond or two of arithmetic. 256 of them in one turn of the scheduler, turn after
    turn, delay every other task by seconds on a busy machine, the one that proves the dispatcher lock included. A
    token is held from one turn to the next, so no turn has more steps than this.
    """
    return trio.CapacityLimiter(8)


class TlsError(Exception):
    """The peer is not who it should be, or does not speak TLS as it should. The text says nothing of either."""


class TlsStream:
    """TLS over `transport`. Sending and receiving raise `trio.BrokenResourceError` when the connection breaks.

    Args:
        transport: connected, and owned by this object from now on.
        server_name: ASCII name or address that the certificate must carry.
        turns: bounds the handshake steps of one turn of the scheduler, see `handshake_turns`.
    """

    def __init__(
        self,
        transport: trio.SocketStream,
        context: ssl.SSLContext,
        server_name: str,
        turns: trio.CapacityLimiter,
    ) -> None:
        self._transport = transport
        self._turns = turns
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        # Bytes at run time: text goes through an IDNA codec, which refuses names that resolve well (a_b.example).
        name: str = server_name.encode("ascii")  # type: ignore[assignment]
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    async def do_handshake(self) -> None:
        """Agree on keys and check the certificate.

        Raises:
            TlsError: there will be no connection.
        """
        try:
            while True:
                try:
                    async with self._turns:
                        self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._receive()
                else:
                    await self._flush()
                    return
        except ssl.SSLError as error:
            with suppress(trio.BrokenResourceError):
                await self._flush()  # the alert that tells the peer why
            raise TlsError("handshake failed") from error
        except trio.BrokenResourceError as error:
            raise TlsError("connection lost in the handshake") from error

    async def send_all(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            self._tls.write(data)  # the outgoing buffer takes any amount, and renegotiation is off: it never waits
        except ssl.SSLError as error:
            raise trio.BrokenResourceError from error
        await self._flush()

    async def receive_some(self) -> bytes:
        """At least one byte, or none at the peer's end of the connection."""
        while True:
            try:
                data = self._tls.read(RECEIVE_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()  # an answer of the protocol itself, such as a key update
                await self._receive()
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            else:
                return data

    def is_quiet(self) -> bool:
        """Whether nothing lies unread, here or in the socket. The peer's end of the connection counts as something."""
        if self._incoming.pending or self._tls.pending():
            return False
        readable = poll()
        readable.register(self._transport.socket.fileno(), POLLIN)
        return not readable.poll(0)

    async def aclose(self) -> None:
        """Say goodbye and close the socket, without waiting for the peer's goodbye; when cancelled, just close."""
        with suppress(ssl.SSLError):
            self._tls.unwrap()
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket at once."""
        self._transport.socket.close()

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self._transport.send_all(data)

    async def _receive(self) -> None:
        if data := await self._transport.receive_some(RECEIVE_BYTES):
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
