"""The operators' listener answers GET and HEAD, and outlives whatever else is sent to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
import trio
import trio.testing

from pushd.ops.http import MAX_CONNECTIONS, REQUEST_S, Page, serve_ops


async def fine() -> Page:
    return Page(b"fine\n")


async def large() -> Page:
    return Page(b"x" * 1_000_000)


async def not_ready() -> Page:
    return Page(b"waiting\n", status=503)


@asynccontextmanager
async def ops_server() -> AsyncIterator[int]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    pages = {"/large": large, "/healthz": fine, "/readyz": not_ready}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_ops, listeners, pages)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/healthz", 200, b"fine\n"),
        ("GET", "/healthz?verbose", 200, b"fine\n"),
        ("HEAD", "/healthz", 200, b""),
        ("GET", "/readyz", 503, b"waiting\n"),
        ("GET", "/nothing", 404, b"nothing here\n"),
        ("GET", "/%ff", 404, b"nothing here\n"),
        ("POST", "/healthz", 405, b"only GET is served here\n"),
    ],
)
async def test_answers(method: str, path: str, status: int, body: bytes) -> None:
    async with ops_server() as port, httpx2.AsyncClient(trust_env=False) as client:
        response = await client.request(method, f"http://127.0.0.1:{port}{path}")
        assert (response.status_code, response.content) == (status, body)


async def test_a_page_larger_than_any_buffer_arrives_whole() -> None:
    async with ops_server() as port, httpx2.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/large")).content == b"x" * 1_000_000


async def test_pages_load_nothing_and_are_framed_by_nobody() -> None:
    async with ops_server() as port, httpx2.AsyncClient(trust_env=False) as client:
        headers = (await client.get(f"http://127.0.0.1:{port}/healthz")).headers
    assert headers["content-security-policy"] == (
        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    )
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01", b"GET / HTTP/9\r\n\r\n", b"GET /" + b"x" * 20_000, b"\r\n" * 500, b""]
)
async def test_junk_costs_only_its_own_connection(junk: bytes) -> None:
    with trio.fail_after(30):
        async with ops_server() as port:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                try:
                    await stream.send_all(junk)
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
            async with httpx2.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200


async def test_silent_connections_are_bounded_in_number_and_time(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = 0.2  # real sockets: let them settle before time jumps
    async with ops_server() as port:
        start = trio.current_time()
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        await trio.testing.wait_all_tasks_blocked(0.1)
        surplus = await trio.open_tcp_stream("127.0.0.1", port)
        assert await surplus.receive_some() == b""  # closed at once
        assert trio.current_time() == start
        for stream in streams:
            assert await stream.receive_some() == b""
            await stream.aclose()
        assert REQUEST_S <= trio.current_time() - start < REQUEST_S + 1
        await surplus.aclose()
