"""Stopping: what running calls, new calls, streams and probes see, and when it is over."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import trio
from h2.errors import ErrorCodes

from pushd.errors import Code
from pushd.rpc.gen.grpc.health.v1 import health_pb2
from pushd.rpc.health import Health
from tests.rpc.harness import HANG, HANG_STREAM, Tls, eventually, framed, message, over_both, raw_client, serving

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
EMPTY = b"\0\0\0\0\0"
NOT_SERVING = health_pb2.HealthCheckResponse(status="NOT_SERVING").SerializeToString()
SERVING = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()


@over_both
async def test_a_drain_as_a_connection_with_everything_sees_it() -> None:
    with trio.fail_after(20):
        async with serving() as server, raw_client(server.port) as client:
            running = await client.open(framed(b"slow"), p_path=HANG)
            stream = await client.open(framed(b"x"), p_path=HANG_STREAM)
            watch = await client.open(EMPTY, p_path=WATCH)
            await client.until(lambda: bool(client.answers[stream].messages and client.answers[watch].messages))
            server.stop.request(trio.current_time() + 3_600)
            ended = await client.answer(stream)
            assert (ended.code, ended.text) == (Code.UNAVAILABLE, "server is shutting down")
            assert client.goaway == (watch, ErrorCodes.NO_ERROR)
            watched = await client.answer(watch)
            assert (watched.messages, watched.code) == ([SERVING, NOT_SERVING], Code.UNAVAILABLE)
            late = await client.call(framed(b"late"))
            assert (late.code, late.text) == (Code.UNAVAILABLE, "server is shutting down")
            assert not client.answers[running].ended
            assert not server.ended.is_set()
            server.echo.let_go.set()
            assert (await client.answer(running)).code == Code.OK
            await client.until_closed()
            await server.ended.wait()


@over_both
async def test_a_connection_made_while_draining_hears_not_serving_and_unavailable() -> None:
    with trio.fail_after(20):
        async with serving() as server, raw_client(server.port) as busy:
            await busy.open(framed(b"x"), p_path=HANG)
            await server.echo.hung.wait()
            server.stop.request(trio.current_time() + 3_600)
            await busy.until(lambda: busy.goaway is not None)
            async with raw_client(server.port) as probe:
                check = await probe.open(EMPTY, p_path=CHECK)
                call = await probe.open(framed(b"x"))
                answers = []
                while not (probe.answers[check].ended and probe.answers[call].ended):
                    assert await probe.receive()
                answers = [probe.answers[check], probe.answers[call]]
                assert answers[0].messages == [NOT_SERVING]
                assert answers[1].code == Code.UNAVAILABLE
            server.echo.let_go.set()
            await server.ended.wait()


@over_both
async def test_what_still_runs_at_the_deadline_ends_unavailable() -> None:
    with trio.fail_after(20):
        async with serving() as server, raw_client(server.port) as client:
            running = await client.open(framed(b"x"), p_path=HANG)
            await server.echo.hung.wait()
            server.stop.request(trio.current_time() + 0.2)
            answer = await client.answer(running)
            assert (answer.code, answer.text) == (Code.UNAVAILABLE, "server is shutting down")
            await server.ended.wait()
            assert server.echo.hanging == 0


@over_both
async def test_a_deadline_that_moves_closer_counts() -> None:
    with trio.fail_after(20):
        async with serving() as server, raw_client(server.port) as client:
            running = await client.open(framed(b"x"), p_path=HANG)
            await server.echo.hung.wait()
            server.stop.request(trio.current_time() + 3_600)
            await client.until(lambda: client.goaway is not None)
            server.stop.request(trio.current_time())
            assert (await client.answer(running)).code == Code.UNAVAILABLE
            await server.ended.wait()


@over_both
async def test_grpcio_sees_its_running_call_finish_its_stream_end_and_its_new_call_fail(
    transport: Tls | None,
) -> None:
    with trio.fail_after(60):
        async with serving() as server, trio.open_nursery() as nursery:
            command = [sys.executable, "-m", "tests.rpc.grpcio_peer", "drain", str(server.port)]
            command += [] if transport is None else [str(transport.ca_pem)]
            peer = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE))
            said = b""
            async for piece in peer.stdout:
                said += piece
                if said == b"ready\n":
                    await eventually(lambda: server.echo.hanging == 2)
                    server.stop.request(trio.current_time() + 3_600)
                elif said.endswith(b"drained\n"):
                    assert not server.ended.is_set()
                    server.echo.let_go.set()
            await server.ended.wait()
    result = json.loads(said.splitlines()[-1])
    assert result["stream"] == ["UNAVAILABLE", "server is shutting down"]
    assert result["new"][0] == "UNAVAILABLE"
    assert result["slow"] == message(b"slow").hex()


@over_both
async def test_an_idle_server_stops_at_once_and_says_goodbye() -> None:
    with trio.fail_after(20):
        async with serving() as server, raw_client(server.port) as client:
            assert (await client.call(framed(b"x"))).code == Code.OK
            server.stop.request(trio.current_time() + 3_600)
            await client.until_closed()
            assert client.goaway == (1, ErrorCodes.NO_ERROR)
            await server.ended.wait()


@over_both
async def test_a_stop_before_anybody_came_is_over_at_once() -> None:
    with trio.fail_after(20):
        async with serving() as server:
            server.stop.request(trio.current_time() + 3_600)
            await server.ended.wait()


async def test_a_peer_in_the_middle_of_its_handshake_does_not_hold_the_drain() -> None:
    with trio.fail_after(20):
        async with serving(handshake_s=3_600) as server:
            async with await trio.open_tcp_stream("127.0.0.1", server.port):
                await server.wait_connections(1)
                server.stop.request(trio.current_time() + 3_600)
                await server.ended.wait()


# --- health by itself


@over_both
async def test_health_tells_changes_to_watchers_and_knows_names_later() -> None:
    health = Health()
    with trio.fail_after(20):
        async with serving(health=health) as server, raw_client(server.port) as client:
            assert (await client.call(EMPTY, p_path=CHECK)).messages == [NOT_SERVING]
            named = _framed_check("a.B")
            unknown = await client.call(named, p_path=CHECK)
            assert (unknown.code, unknown.text) == (Code.NOT_FOUND, "unknown service")
            watch = client.answers[await client.open(named, p_path=WATCH)]
            seen = ["SERVICE_UNKNOWN"]
            await client.until(lambda: len(watch.messages) == 1)
            for serving_now in (True, True, False):
                health.set_serving("a.B", serving_now)
                if seen[-1] != (status := "SERVING" if serving_now else "NOT_SERVING"):
                    seen.append(status)
                    await client.until(lambda: len(watch.messages) == len(seen))
            assert watch.messages == [
                health_pb2.HealthCheckResponse(status=status).SerializeToString() for status in seen
            ]
            listed = health_pb2.HealthListResponse.FromString(
                (await client.call(EMPTY, p_path="/grpc.health.v1.Health/List")).messages[0]
            )
            assert {name: one.status for name, one in listed.statuses.items()} == {"": 2, "a.B": 2}


def _framed_check(name: str) -> bytes:
    payload = health_pb2.HealthCheckRequest(service=name).SerializeToString()
    return b"\0" + len(payload).to_bytes(4, "big") + payload
