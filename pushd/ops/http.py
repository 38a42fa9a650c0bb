"""The HTTP listener for operators: metrics, probes and the status page. One request a connection, GET and HEAD only.

It serves people and scrapers on a trusted address; it still bounds every request in size and time, because a port that
is open is a port that somebody will talk to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import h11
import trio
from attrs import frozen

from pushd.listening import PatientListener

REQUEST_S = 10.0  # from the first byte to the last of the answer
MAX_CONNECTIONS = 64


@frozen
class Page:
    """One answer."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Handler = Callable[[], Awaitable[Page]]


async def serve_ops(listeners: list[trio.SocketListener], pages: Mapping[str, Handler]) -> None:
    """Answer GET and HEAD for the exact paths of `pages` until cancelled."""
    limiter = trio.CapacityLimiter(MAX_CONNECTIONS)

    async def handle(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                limiter.acquire_nowait()
            except trio.WouldBlock:
                return
            try:
                with trio.move_on_after(REQUEST_S):
                    await _answer(stream, pages)
            except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                pass  # the peer's affair
            finally:
                limiter.release()

    await trio.serve_listeners(handle, [PatientListener(listener) for listener in listeners])


async def _answer(stream: trio.SocketStream, pages: Mapping[str, Handler]) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=16_384)
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(16_384))
        elif isinstance(event, h11.Request):
            break
        else:
            return
    page = await _page_for(event, pages)
    head = event.method == b"HEAD"
    headers = [
        ("content-type", page.content_type),
        ("content-length", str(len(page.body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        # The page has its style in it and needs nothing else; nobody may frame it or learn its address from a link.
        ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        ("referrer-policy", "no-referrer"),
        ("connection", "close"),
    ]
    data = connection.send(h11.Response(status_code=page.status, headers=headers)) or b""
    if not head:
        data += connection.send(h11.Data(data=page.body)) or b""
        data += connection.send(h11.EndOfMessage()) or b""
    await stream.send_all(data)


async def _page_for(request: h11.Request, pages: Mapping[str, Handler]) -> Page:
    if request.method not in (b"GET", b"HEAD"):
        return Page(b"only GET is served here\n", status=405)
    handler = pages.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
    if handler is None:
        return Page(b"nothing here\n", status=404)
    return await handler()
