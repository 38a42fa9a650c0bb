"""The proxy breaks what it is told to break, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.faults.cluster import until
from tests.faults.proxy import Proxy, open_proxy


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[Proxy, trio.SocketStream]]:
    async def echo(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                async for chunk in stream:
                    await stream.send_all(chunk)
            except trio.BrokenResourceError:
                pass

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, echo, listeners)
            async with open_proxy(listeners[0].socket.getsockname()[1]) as proxy:
                async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as client:
                    await say(client, b"hello")
                    yield proxy, client
            nursery.cancel_scope.cancel()


async def say(client: trio.SocketStream, data: bytes) -> None:
    await client.send_all(data)
    assert await client.receive_some() == data


async def test_cut_resets_what_is_open_and_takes_new_connections() -> None:
    async with echo_behind_proxy() as (proxy, client):
        proxy.cut()
        with pytest.raises(trio.BrokenResourceError):
            await client.receive_some()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as again:
            await say(again, b"again")
        assert proxy.accepted == 2


async def test_refuse_resets_new_connections_too_until_healed() -> None:
    async with echo_behind_proxy() as (proxy, client):
        proxy.refuse()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as second:
            for stream in (client, second):
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
        proxy.heal()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as again:
            await say(again, b"again")


async def test_deaf_passes_nothing_until_healed_and_then_everything_in_order() -> None:
    async with echo_behind_proxy() as (proxy, client):
        proxy.go_deaf()
        await client.send_all(b"one")
        with trio.move_on_after(0.1) as silence:
            await client.receive_some()
        assert silence.cancelled_caught
        await client.send_all(b"two")
        proxy.heal()
        heard = b""
        while len(heard) < 6:
            heard += await client.receive_some()
        assert heard == b"onetwo"


async def test_connections_taken_while_deaf_are_refused_and_never_carried() -> None:
    async with echo_behind_proxy() as (proxy, client):
        proxy.go_deaf()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as second:
            await second.send_all(b"never heard")
            await taken(proxy, 2)
            proxy.refuse()
            proxy.heal()
            for stream in (client, second):
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as again:
            await say(again, b"again")


async def test_cut_resets_connections_taken_while_deaf_and_leaves_later_ones() -> None:
    async with echo_behind_proxy() as (proxy, _):
        proxy.go_deaf()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as second:
            await taken(proxy, 2)
            proxy.cut()
            with pytest.raises(trio.BrokenResourceError):
                await second.receive_some()
        assert proxy.is_deaf
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as third:
            await third.send_all(b"heard late")
            await taken(proxy, 3)
            proxy.heal()
            assert await third.receive_some() == b"heard late"


async def test_deafness_that_follows_a_refusal_takes_connections_again() -> None:
    async with echo_behind_proxy() as (proxy, _):
        proxy.refuse()
        proxy.go_deaf()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as second:
            await second.send_all(b"heard late")
            await taken(proxy, 2)
            proxy.heal()
            assert await second.receive_some() == b"heard late"


async def taken(proxy: Proxy, connections: int) -> None:
    """Return once the proxy has taken so many; the system completes a connection before that."""
    await until(lambda: proxy.accepted >= connections)


async def test_delay_holds_bytes_in_both_directions() -> None:
    async with echo_behind_proxy() as (proxy, client):
        proxy.delay(0.1)
        began = trio.current_time()
        await say(client, b"slow")
        assert trio.current_time() - began >= 0.2


async def test_absent_upstream_is_a_reset(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with open_proxy(tmp_path / "nothing") as proxy:
            async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as client:
                with pytest.raises(trio.BrokenResourceError):
                    await client.receive_some()
