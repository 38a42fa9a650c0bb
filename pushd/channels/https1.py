"""One HTTPS connection to one checked address, carrying one POST after the other.

h11 knows the protocol, Trio the socket; here is what neither does: how much of a hostile answer is read. Nothing is
followed, decoded, remembered or logged, and there is no queue in which a cancelled request could stay behind.
"""

from __future__ import annotations

import re
import ssl
from socket import AF_INET, AF_INET6, SOCK_STREAM

import h11
import trio

from pushd.channels.tls_client import TlsStream
from pushd.core.addresses import Address
from pushd.core.webhook_url import WebhookUrl

MAX_HEAD_BYTES = 16_384  # of a final or interim answer's head: twice what common servers send or accept
MAX_HEADERS = 100
MAX_INTERIM_ANSWERS = 8  # 100 Continue, 103 Early Hints; nobody sends more than two
MAX_BODY_BYTES = 16_384  # read so that the connection can be used again; a longer body ends it

_SWITCHING_PROTOCOLS = re.compile(rb"HTTP/1\.[01] 101")
_STATUS_BYTES = 12  # "HTTP/1.1 101"

Header = tuple[bytes, bytes]


class HttpsConnection:
    """A connection after its TLS handshake. Its owner uses it for one request at a time, and closes it in the end."""

    def __init__(self, stream: TlsStream, address: Address) -> None:
        self.address = address
        """The checked address that the socket is connected to."""
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._status_start = b""
        self._answered = self._ended = False

    def __repr__(self) -> str:
        return f"HttpsConnection({self._http.our_state}, {self._http.their_state})"

    async def post(self, target: bytes, headers: list[Header], body: bytes) -> int:
        """Send one POST and return the status of its final answer, once that one's head is complete.

        Raises:
            trio.BrokenResourceError: the connection broke or ended first; the request may have been processed.
            h11.RemoteProtocolError: the answer is not HTTP/1.1, or its head is too large.
        """
        http = self._http
        self._status_start, self._answered = b"", False
        request = h11.Request(method=b"POST", target=target, headers=headers)
        message = (request, h11.Data(data=body), h11.EndOfMessage())
        await self._stream.send_all(b"".join(http.send(event) or b"" for event in message))
        for _ in range(MAX_INTERIM_ANSWERS + 1):
            try:
                answer = await self._next_event()
            except h11.RemoteProtocolError:
                if _SWITCHING_PROTOCOLS.match(self._status_start):
                    return 101  # h11 refuses it, since no upgrade was asked for; yet it is a status, and final
                if self._ended:  # cut or closed; Python 3.11.2 cannot tell them apart
                    raise trio.BrokenResourceError from None
                raise
            if isinstance(answer, h11.Response | h11.InformationalResponse):
                if not answer.http_version.startswith(b"1."):  # h11 takes any; RFC 9112 §2.3
                    raise h11.RemoteProtocolError("another version of HTTP")
                if _is_too_large(answer):
                    raise h11.RemoteProtocolError("too large an answer")
            if isinstance(answer, h11.Response):
                self._answered = True
                return answer.status_code
        raise h11.RemoteProtocolError("too many interim answers")

    async def finish(self) -> bool:
        """Read the rest of the answer, up to `MAX_BODY_BYTES`; False when the connection cannot be used again."""
        if not self._answered or self._http.our_state is not h11.DONE:
            return False  # out of step, or to be closed whatever the body is
        left = MAX_BODY_BYTES
        try:
            while isinstance(event := await self._next_event(), h11.Data):
                left -= len(event.data)
                if left < 0:
                    return False
            if self._http.trailing_data != (b"", False):
                return False
            self._http.start_next_cycle()
        except (trio.BrokenResourceError, h11.ProtocolError):
            return False
        return True

    def is_quiet(self) -> bool:
        """False when an idle connection has something to read: the peer closed it, or speaks out of turn."""
        return self._stream.is_quiet()

    async def aclose(self) -> None:
        """Say goodbye in TLS and close the socket; when cancelled, just close it."""
        await self._stream.aclose()

    def close(self) -> None:
        """Close the socket at once."""
        self._stream.close()

    async def _next_event(self) -> h11.Event:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Event):
                return event
            if event is h11.PAUSED:
                # The answer is over and h11 waits for the next cycle, which only `finish` starts.
                raise h11.RemoteProtocolError("nothing left to read")
            data = await self._stream.receive_some()
            if len(self._status_start) < _STATUS_BYTES:
                self._status_start += data[:_STATUS_BYTES]
            self._ended = not data
            self._http.receive_data(data)


async def connect(
    url: WebhookUrl,
    address: Address,
    context: ssl.SSLContext,
    *,
    tcp_deadline: float,
    turns: trio.CapacityLimiter,
) -> HttpsConnection:
    """Open a connection to `address` for requests to `url`'s host.

    The certificate must carry the host of the URL, which is also the name sent in the handshake (SNI); an address in
    the URL is not sent, and must be in the certificate as an address.

    Args:
        tcp_deadline: when to give up on the TCP connection, by Trio's clock.
        turns: from `handshake_turns`, shared by all connections of a sender.

    Raises:
        OSError: no TCP connection, or not in time.
        TlsError: no TLS on it, or a certificate that does not fit.
    """
    socket = trio.socket.socket(AF_INET if address.version == 4 else AF_INET6, SOCK_STREAM)
    try:
        with trio.CancelScope(deadline=tcp_deadline) as waiting:
            await socket.connect((str(address), url.port))
        if waiting.cancelled_caught:
            raise OSError("no TCP connection in time")
        stream = TlsStream(trio.SocketStream(socket), context, url.host, turns)
        await stream.do_handshake()
    except BaseException:
        socket.close()
        raise
    return HttpsConnection(stream, address)


def client_context(ca_file: str | None = None) -> ssl.SSLContext:
    """TLS settings for every webhook: made once, because reading the certificate store takes 17 ms.

    `ssl.create_default_context` would also write session keys to the file that SSLKEYLOGFILE names.

    Args:
        ca_file: PEM file of certificate authorities to accept beside those of the system.

    Raises:
        OSError: the file cannot be read.
        ssl.SSLError: it holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_default_certs()
    if ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    return context


def _is_too_large(answer: h11.Response | h11.InformationalResponse) -> bool:
    # h11 bounds a head that is incomplete; one that came in a single piece can be longer.
    headers = answer.headers.raw_items()
    return len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES
