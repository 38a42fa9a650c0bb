"""Our client against grpcio's server in its own process, and against servers that die, drain or misbehave."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from attrs import define

from pushd.errors import Code, StatusError
from pushd.rpc.check import check_health
from pushd.rpc.client import Channel, ChannelSettings, ClientCall, open_channel
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic
from pushd.rpc.health import Health
from pushd.rpc.server import serve_rpc
from pushd.rpc.settings import RpcSettings
from pushd.stop import StopSignal
from pushd.telemetry import Metrics
from tests.rpc.harness import BIDI, HANG, HANG_CLIENT, HANG_STREAM, SERVER, UNARY, Echo, Tls, serving

QUICK = ChannelSettings(backoff_min_s=0.05, backoff_max_s=0.2, connect_s=2.0)


@define
class Peer:
    """grpcio's server process."""

    process: trio.Process
    port: int

    async def says(self, line: bytes) -> None:
        """Waits for a line of its standard output."""
        assert self.process.stdout is not None
        seen = b""
        while line not in seen:
            piece = await self.process.stdout.receive_some()
            assert piece, "the peer ended"
            seen += piece

    async def tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(line + b"\n")


@asynccontextmanager
async def grpcio_server() -> AsyncIterator[Peer]:
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "tests.rpc.grpcio_peer", "server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                check=False,
            )
        )
        line = b""
        while not line.endswith(b"\n"):
            line += await process.stdout.receive_some()
        yield Peer(process, int(line))
        process.kill()


async def refused(channel: Channel, path: str, *, deadline_s: float = 5.0, data: bytes = b"") -> StatusError:
    with pytest.raises(StatusError) as caught:
        await channel.unary(path, Topic(topic=data), Topic, deadline_s=deadline_s)
    return caught.value


async def echoed(channel: Channel, data: bytes = b"x", path: str = UNARY) -> bytes:
    return bytes((await channel.unary(path, Topic(topic=data), Topic, deadline_s=10)).topic)


async def test_calls_of_every_kind_go_to_a_foreign_server() -> None:
    with trio.fail_after(60):
        async with grpcio_server() as peer, open_channel("127.0.0.1", peer.port) as channel:
            assert await echoed(channel, b"hello") == b"hello"
            assert await echoed(channel, b"L" * 5_000_000) == b"L" * 5_000_000
            refusal = await refused(channel, "/e.E/Refuse")
            assert (refusal.code, refusal.message) == (Code.NOT_FOUND, "no ünicorn")
            assert (await refused(channel, "/e.E/Nothing")).code == Code.UNIMPLEMENTED
            metadata = [(b"authorization", b"Bearer t")]
            reply = await channel.unary("/e.E/Metadata", Topic(), Topic, deadline_s=5, metadata=metadata)
            assert reply.topic == b"Bearer t"
            async with channel.stream("/e.E/Server", Topic, deadline_s=5) as call:
                await call.send(Topic(topic=b"y"))
                call.half_close()
                assert [one.topic async for one in call] == [b"y"] * 3
            async with channel.stream("/e.E/Bidi", Topic, deadline_s=5) as call:
                for data in (b"1", b"2"):
                    await call.send(Topic(topic=data))
                    one = await call.receive()
                    assert one is not None
                    assert one.topic == data
                call.half_close()
                assert await call.receive() is None
            # The deadline is the server's too: it hears of it by header or by reset.
            assert (await refused(channel, "/e.E/Hang", deadline_s=0.2)).code == Code.DEADLINE_EXCEEDED
            await peer.says(b"released")


async def test_a_dead_server_ends_its_calls_at_once_and_a_new_one_is_found() -> None:
    with trio.fail_after(60):
        async with grpcio_server() as peer, open_channel("127.0.0.1", peer.port, settings=QUICK) as channel:
            failures: list[StatusError] = []

            async def hang() -> None:
                failures.append(await refused(channel, "/e.E/Hang", deadline_s=3_600))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(hang)
                await peer.says(b"hanging")
                peer.process.kill()
            assert [one.code for one in failures] == [Code.UNAVAILABLE]
            assert (await refused(channel, UNARY)).code == Code.UNAVAILABLE


async def test_reconnecting_pauses_longer_after_every_failure_and_works_at_last() -> None:
    with trio.fail_after(30):
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        await listeners[0].aclose()
        settings = ChannelSettings(backoff_min_s=3_600)
        async with open_channel("127.0.0.1", port, settings=settings) as channel:
            for _ in range(3):  # within the pause nothing is tried
                assert (await refused(channel, UNARY)).message == "the server cannot be reached"
            assert channel._retry_at > trio.current_time() + 2_800
            assert channel._pause_s == ChannelSettings().backoff_max_s
            channel._retry_at = trio.current_time()
            async with trio.open_nursery() as nursery:
                again = await trio.open_tcp_listeners(port, host="127.0.0.1")
                await nursery.start(
                    partial(serve_rpc, [Echo()], again, RpcSettings(), metrics=Metrics(), stop=StopSignal())
                )
                assert await echoed(channel) == b"x"
                assert channel._pause_s == settings.backoff_min_s
                nursery.cancel_scope.cancel()


async def test_goaway_lets_running_calls_finish_and_new_ones_go_elsewhere() -> None:
    with trio.fail_after(60):
        async with grpcio_server() as peer, open_channel("127.0.0.1", peer.port, settings=QUICK) as channel:
            answers: list[bytes] = []

            async def hang() -> None:
                answers.append(await echoed(channel, b"slow", "/e.E/Hang"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(hang)
                await peer.says(b"hanging")
                await peer.tell(b"stop")
                connection = channel._connection
                assert connection is not None
                while connection.machine.usable:
                    await connection.wait_change()
                assert (await refused(channel, UNARY)).code == Code.UNAVAILABLE
            assert answers == [b"slow"]


async def test_a_deadline_ends_each_kind_of_wait() -> None:
    with trio.fail_after(30):
        async with serving() as server, open_channel("127.0.0.1", server.port) as channel:
            assert (await refused(channel, HANG, deadline_s=0.1)).code == Code.DEADLINE_EXCEEDED
            await server.echo.released.wait()
            async with channel.stream(HANG_STREAM, Topic, deadline_s=0.2) as call:
                await call.send(Topic())
                call.half_close()
                assert await call.receive() is not None
                with pytest.raises(StatusError, match="DEADLINE_EXCEEDED"):
                    await call.receive()
            async with channel.stream(HANG_CLIENT, Topic, deadline_s=0.2) as call:
                with pytest.raises(StatusError, match="DEADLINE_EXCEEDED"):
                    while True:
                        await call.send(Topic(topic=b"x" * 100_000))
            async with channel.stream("/no.Such/Method", Topic, deadline_s=60) as call:
                with pytest.raises(StatusError, match="UNIMPLEMENTED"):
                    await call.receive()
                await call.send(Topic())  # nobody listens; not an error, and not a way around the scheduler
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")  # connects, and then never says a word
        async with open_channel("127.0.0.1", listeners[0].socket.getsockname()[1]) as channel:
            assert (await refused(channel, UNARY, deadline_s=0.1)).code == Code.DEADLINE_EXCEEDED
        await listeners[0].aclose()


async def test_leaving_a_stream_early_cancels_it_on_the_server() -> None:
    with trio.fail_after(30):
        async with serving() as server, open_channel("127.0.0.1", server.port) as channel:
            async with channel.stream(HANG_STREAM, Topic, deadline_s=60) as call:
                await call.send(Topic())
                call.half_close()
                assert await call.receive() is not None
                await server.echo.hung.wait()
            await server.echo.released.wait()
            assert await echoed(channel) == b"x"


async def test_closing_a_call_tells_the_task_that_waits_for_it() -> None:
    with trio.fail_after(30):
        async with serving() as server, open_channel("127.0.0.1", server.port) as channel:
            async with channel.stream(HANG_CLIENT, Topic, deadline_s=60) as call, trio.open_nursery() as nursery:
                nursery.start_soon(_expect_cancelled, call)
                await server.echo.hung.wait()
                call.close()
            await server.echo.released.wait()


async def _expect_cancelled(call: ClientCall[Topic]) -> None:
    with pytest.raises(StatusError, match="CANCELLED"):
        await call.receive()


async def test_more_calls_than_streams_wait_for_their_turn() -> None:
    with trio.fail_after(30):
        async with serving(max_concurrent_streams=3) as server, open_channel("127.0.0.1", server.port) as channel:
            answers: list[bytes] = []

            async def one(n: int) -> None:
                answers.append(await echoed(channel, b"%d" % n))

            async with trio.open_nursery() as nursery:
                for n in range(30):
                    nursery.start_soon(one, n)
            assert sorted(answers) == sorted(b"%d" % n for n in range(30))


async def test_a_silent_server_is_given_up_after_an_unanswered_ping() -> None:
    async def swallow(stream: trio.SocketStream) -> None:
        await stream.send_all(b"\0\0\0\4\0\0\0\0\0")  # SETTINGS, and not a word more
        while await stream.receive_some():
            pass

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, swallow, 0, host="127.0.0.1"))
            port = listeners[0].socket.getsockname()[1]
            settings = ChannelSettings(idle_s=0.1, ping_s=0.1)
            async with open_channel("127.0.0.1", port, settings=settings) as channel:
                assert (await refused(channel, UNARY, deadline_s=3_600)).code == Code.UNAVAILABLE
            nursery.cancel_scope.cancel()


async def test_tls_is_verified_and_spoken(tls: Tls) -> None:
    with trio.fail_after(30):
        async with serving(tls=tls.server) as server:
            async with open_channel("localhost", server.port, tls=tls.client) as channel:
                assert await echoed(channel, b"secret") == b"secret"
                async with channel.stream(SERVER, Topic, deadline_s=5) as call:
                    await call.send(Topic(topic=b"ab"))
                    call.half_close()
                    assert [one.topic async for one in call] == [b"a", b"b"]
            async with open_channel("localhost", server.port, tls=ssl.create_default_context()) as channel:
                assert (await refused(channel, UNARY)).code == Code.UNAVAILABLE


async def test_health_is_asked_from_outside(tls: Tls) -> None:
    health = Health.serving(["a.B"])
    health.set_serving("a.C", False)
    with trio.fail_after(30):
        async with serving(health=health, tls=tls.server) as server:
            ask = partial(check_health, "localhost", server.port, deadline_s=5, tls=tls.client)
            assert [await ask(name) for name in ("", "a.B", "a.C", "a.D")] == [True, True, False, False]
            assert not await check_health("localhost", server.port, deadline_s=1), "clear text to a TLS port"
        assert not await check_health("127.0.0.1", server.port, deadline_s=1), "nobody listens any more"


async def test_bidi_goes_back_and_forth() -> None:
    with trio.fail_after(30):
        async with serving() as server, open_channel("127.0.0.1", server.port) as channel:
            async with channel.stream(BIDI, Topic, deadline_s=20) as call:
                for size in (0, 1, 70_000, 3_000_000):
                    await call.send(Topic(topic=b"b" * size))
                    reply = await call.receive()
                    assert reply is not None
                    assert len(reply.topic) == size
                call.half_close()
                assert await call.receive() is None
