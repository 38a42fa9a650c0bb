"""The server over real sockets against raw HTTP/2: deadlines, cancellation, limits, silence, TLS."""

from __future__ import annotations

import gc
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress

import pytest
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from pushd.errors import Code
from pushd.rpc.connection import ServerConnection
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic
from tests.rpc.harness import (
    BIDI,
    CLIENT,
    HANG,
    HANG_CLIENT,
    HANG_STREAM,
    REQUEST,
    SERVER,
    UNARY,
    Echo,
    RawClient,
    Tls,
    connect,
    eventually,
    framed,
    message,
    over_both,
    raw_client,
    serving,
)


def connections() -> list[ServerConnection]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is ServerConnection]


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
async def test_calls_of_every_kind(secure: bool, tls: Tls) -> None:
    with trio.fail_after(30):
        async with serving(tls=tls.server if secure else None) as server:
            async with raw_client(server.port, tls.client if secure else None) as client:
                assert (await client.call(framed(b"abc"))).messages == [message(b"abc")]
                assert (await client.call(framed(b"ab"), p_path=SERVER)).messages == [message(b"a"), message(b"b")]
                assert (await client.call(framed(b"a") + framed(b"b"), p_path=CLIENT)).messages == [message(b"ab")]
                answer = await client.call(framed(b"a") + framed(b"b"), p_path=BIDI)
                assert answer.messages == [message(b"a"), message(b"b")]
                assert (answer.code, answer.headers["content-type"]) == (Code.OK, "application/grpc")


async def test_the_limits_are_advertised() -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            await client.until(lambda: bool(client.settings))
            assert client.settings[SettingCodes.MAX_CONCURRENT_STREAMS] == 100
            assert client.settings[SettingCodes.MAX_HEADER_LIST_SIZE] == 16_384
            assert client.settings[SettingCodes.INITIAL_WINDOW_SIZE] == 65_535


# --- deadlines and cancellation


@over_both
@pytest.mark.parametrize("path", [HANG, HANG_STREAM])
async def test_a_deadline_cancels_the_handler_and_is_answered(path: str) -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"), p_path=path, grpc_timeout="100m")
            assert (answer.code, answer.text) == (Code.DEADLINE_EXCEEDED, "deadline exceeded")
            assert server.echo.hanging == 0


@over_both
async def test_a_deadline_covers_a_request_that_never_comes() -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            answer = await client.call(b"\0\0\0\0\x09abc", end=False, grpc_timeout="100m")
            assert answer.code == Code.DEADLINE_EXCEEDED


@over_both
async def test_a_deadline_in_the_past_is_exceeded_before_anything_is_done() -> None:
    done: list[bytes] = []
    with trio.fail_after(10):
        async with serving(Echo(lambda data: done.append(data) or data)) as server, raw_client(server.port) as client:
            assert (await client.call(framed(b"x"), grpc_timeout="0n")).code == Code.DEADLINE_EXCEEDED
            assert (await client.call(framed(b"y"), grpc_timeout="1M")).code == Code.OK
    assert done == [b"y"]


@over_both
async def test_a_deadline_covers_an_answer_the_caller_does_not_take() -> None:
    with trio.fail_after(10):
        async with serving(Echo(lambda data: b"L" * 1_000_000)) as server, raw_client(server.port) as client:
            client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
            answer = await client.call(framed(b"x"), grpc_timeout="200m")
            assert answer.reset == ErrorCodes.CANCEL


@over_both
@pytest.mark.parametrize("path", [HANG, HANG_STREAM])
async def test_a_reset_cancels_the_handler(path: str) -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            stream_id = await client.open(framed(b"x"), p_path=path)
            await server.echo.hung.wait()
            client.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
            await client.flush()
            await server.echo.released.wait()
            assert (await client.call(framed(b"after"))).code == Code.OK


@over_both
async def test_a_vanished_caller_cancels_its_handlers() -> None:
    with trio.fail_after(10):
        async with serving() as server:
            async with raw_client(server.port) as client:
                await client.open(framed(b"x"), p_path=HANG)
                await server.echo.hung.wait()
            await server.echo.released.wait()


@over_both
async def test_nothing_is_left_of_ten_thousand_cancelled_calls(transport: Tls | None) -> None:
    rounds = 100 if transport is None else 10
    with trio.fail_after(120):
        async with serving(abuse_burst=20_000) as server:
            async with raw_client(server.port) as client:
                for _ in range(rounds):
                    ids = [await client.open(framed(b"x"), p_path=HANG) for _ in range(100)]
                    for stream_id in ids:
                        client.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
                    await client.flush()
                    assert (await client.call(framed(b"x"))).code == Code.OK
                    client.answers.clear()
                (connection,) = connections()
                assert connection.calls == 0
                assert server.echo.hanging == 0
                machine = connection.machine
                assert machine.idle
                assert (machine._committed, machine._budget.held, machine._started) == (0, 0, set())
                # h2's own memory of closed streams is bounded too.
                assert len(machine._h2._closed_streams) <= 4_096
                assert trio.lowlevel.current_statistics().tasks_living < 30


@over_both
async def test_S083_rapid_reset_costs_the_offender_its_connection_and_others_are_served() -> None:
    with trio.fail_after(60):
        async with serving() as server, raw_client(server.port) as client:
            async with raw_client(server.port) as offender:
                for _ in range(2_000):
                    stream_id = offender.h2.get_next_available_stream_id()
                    offender.h2.send_headers(stream_id, list((REQUEST | {":path": HANG}).items()))
                    offender.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_flush_quietly, offender)
                    for _ in range(20):
                        assert (await client.call(framed(b"x"))).code == Code.OK
                    await offender.until_closed()
                assert offender.goaway is not None
                assert offender.goaway[1] == ErrorCodes.ENHANCE_YOUR_CALM
            assert (await client.call(framed(b"x"))).code == Code.OK
            assert server.echo.hanging == 0


async def _flush_quietly(client: RawClient) -> None:
    with suppress(trio.BrokenResourceError):
        await client.flush()


# --- limits


@over_both
async def test_a_stalled_request_is_ended() -> None:
    with trio.fail_after(10):
        async with serving(stall_s=0.1) as server, raw_client(server.port) as client:
            quiet = await client.open(b"", end=False, p_path=BIDI)
            for path in (UNARY, BIDI):
                answer = await client.call(b"\0\0\0\0\x09abc", end=False, p_path=path)
                assert (answer.code, answer.text) == (Code.UNAVAILABLE, "request stalled")
            assert not client.answers[quiet].ended, "a stream may be silent between its messages"


@over_both
async def test_a_peer_that_takes_no_answers_is_given_up() -> None:
    with trio.fail_after(30):
        async with serving(Echo(lambda data: b"L" * 30_000_000), stall_s=0.3, max_response_bytes=2**25) as server:
            async with raw_client(server.port) as client:
                client.h2.increment_flow_control_window(2**30)
                stream_id = await client.open(None, end=False)
                client.h2.increment_flow_control_window(2**30, stream_id)
                client.h2.send_data(stream_id, framed(b"x"), end_stream=True)
                await client.flush()
                await server.wait_connections(0)  # nothing is read here: the server's write stalls


@over_both
async def test_when_the_receive_budget_is_full_the_call_that_gets_on_worst_ends() -> None:
    promise = b"\0\0\0\xea\x60"  # 60,000 bytes
    with trio.fail_after(30):
        async with serving(receive_bytes=100_000) as server:
            async with raw_client(server.port) as holder, raw_client(server.port) as client:
                held = await _send_part(holder, promise)
                assert (await client.call(framed(b"x" * 9_000))).code == Code.OK
                newer = await _send_part(client, promise)
                answer = await holder.answer(held)
                assert (answer.code, answer.text) == (Code.UNAVAILABLE, "server is overloaded")
                assert (await holder.call(framed(b"x" * 9_000))).code == Code.OK, "it lost that call only"
                assert not client.answers[newer].ended
                await trio.aclose_forcefully(client.stream)
                await server.wait_connections(1)
                newest = await _send_part(holder, promise)  # its bytes are free again
                assert not holder.answers[newest].ended


@over_both
async def test_peers_that_drip_do_not_keep_others_out() -> None:
    """A byte now and then is progress on every one of these calls; the budget is theirs until somebody needs it."""
    with trio.fail_after(60):
        async with serving(receive_bytes=210_000) as server:
            async with AsyncExitStack() as stack:
                holders = [await stack.enter_async_context(raw_client(server.port)) for _ in range(4)]
                for holder in holders:
                    await _send_part(holder, b"\0\0\0\xea\x60")
                client = await stack.enter_async_context(raw_client(server.port))
                for _ in range(10):
                    for holder in holders:
                        for stream_id in [number for number, one in holder.answers.items() if not one.ended]:
                            holder.h2.send_data(stream_id, b"x")
                        await holder.flush()
                    assert (await client.call(framed(b"x" * 16_000))).code == Code.OK


@over_both
async def test_when_the_send_budget_is_full_the_answer_taken_worst_ends() -> None:
    with trio.fail_after(30):
        async with serving(Echo(lambda data: b"L" * 1_500_000), send_bytes=4_000_000) as server:
            async with raw_client(server.port) as one, raw_client(server.port) as other:
                first, second = await _leave_untaken(one), await _leave_untaken(other)
                async with raw_client(server.port) as client:
                    assert (await client.call(framed(b"x"))).code == Code.OK
                assert (await one.answer(first)).reset == ErrorCodes.CANCEL
                await eventually(lambda: sum(connection.calls for connection in connections()) == 1)
                assert not other.answers[second].ended


async def _leave_untaken(client: RawClient) -> int:
    """A call whose answer has begun, of which nothing more is taken."""
    client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
    stream_id = await client.open(framed(b"x"))
    await client.until(lambda: bool(client.answers[stream_id].headers))
    return stream_id


@over_both
async def test_answers_that_are_not_taken_end_calls_before_they_fill_the_memory() -> None:
    with trio.fail_after(30):
        async with serving(Echo(lambda data: b"L" * 1_000_000), send_bytes=4_000_000) as server:
            async with raw_client(server.port) as client:
                client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
                first = await client.open(framed(b"x"))
                await client.until(lambda: bool(client.answers[first].headers))
                second = await client.open(framed(b"x"))
                await client.until(lambda: bool(client.answers[second].headers))
                third = await client.call(framed(b"x"))
                assert (third.code, third.text) == (Code.UNAVAILABLE, "server is overloaded")


@over_both
@pytest.mark.parametrize("timeout", [None, "50m"], ids=["stalled", "late"])
async def test_a_stream_that_ended_with_its_answers_untaken_holds_nothing(timeout: str | None) -> None:
    class Pours(Echo):
        async def server(self, input_message: Topic) -> AsyncIterator[Topic]:
            while True:
                yield Topic(topic=b"L" * 1_000_000)

    with trio.fail_after(30):
        async with serving(Pours(), stall_s=0.2) as server, raw_client(server.port) as client:
            client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
            await client.answer(await client.open(framed(b"x"), p_path=SERVER, grpc_timeout=timeout))
            (connection,) = connections()
            assert (connection.machine._unsent.held, connection.machine.idle) == (0, True)
            assert not connection.machine.closed


async def _send_part(client: RawClient, promise: bytes) -> int:
    """50,000 bytes of a longer message."""
    await client.until(lambda: client.h2.outbound_flow_control_window > 65_535)
    stream_id = await client.open(promise, end=False, p_path=BIDI)
    for _ in range(5):
        client.h2.send_data(stream_id, b"x" * 10_000)
    await client.flush()
    return stream_id


@over_both
async def test_one_stream_too_many_is_refused_and_may_be_repeated() -> None:
    with trio.fail_after(10):
        async with serving(max_concurrent_streams=2) as server, raw_client(server.port) as client:
            ids = [await client.open(framed(b"x"), p_path=HANG) for _ in range(3)]
            answer = await client.answer(ids[2])
            assert answer.reset == ErrorCodes.REFUSED_STREAM
            server.echo.let_go.set()
            assert [(await client.answer(one)).code for one in ids[:2]] == [Code.OK, Code.OK]
            assert (await client.call(framed(b"x"))).code == Code.OK


@over_both
async def test_a_header_list_over_the_limit_ends_the_connection() -> None:
    with trio.fail_after(10):
        async with serving() as server:
            async with raw_client(server.port) as client:
                await client.open(framed(b"x"), x_large="v" * 20_000)
                await client.until_closed()
                assert client.goaway is not None
            async with raw_client(server.port) as client:
                assert (await client.call(framed(b"x"), x_large="v" * 12_000)).code == Code.OK


@over_both
async def test_calls_that_wait_hold_no_headers() -> None:
    """A stream that never ends, one that reads nothing, one at work and one whose request is not complete."""
    seen: list[str] = []
    waiting = {"/grpc.health.v1.Health/Watch": b"\0\0\0\0\0", HANG_CLIENT: b"", HANG: framed(b"x"), UNARY: b"\0\0\0"}

    def authenticate(path: str, headers: Mapping[str, str]) -> None:
        seen.append(headers["authorization"])

    with trio.fail_after(20):
        async with serving(authenticate=authenticate) as server, raw_client(server.port) as client:
            for path, body in waiting.items():
                end = path not in (HANG_CLIENT, UNARY)
                await client.open(body, end=end, p_path=path, authorization=path, x="v" * 9_000)
            await _first_message(client)
            await eventually(lambda: server.echo.hanging == 2 and len(seen) == 3)
            (connection,) = connections()
            assert [call.path for call in connection._calls.values()] == list(waiting)
            assert [dict(call.headers) for call in connection._calls.values()] == [{}] * 4
    assert sorted(seen) == sorted([HANG_CLIENT, HANG, UNARY])


@over_both
async def test_the_connection_silent_for_longest_makes_room_and_busy_ones_stay() -> None:
    with trio.fail_after(20):
        async with serving(max_connections=3) as server:
            async with (
                raw_client(server.port) as busy,
                raw_client(server.port) as idle,
                raw_client(server.port) as other,
            ):
                await busy.open(framed(b"x"), p_path=HANG)
                await server.echo.hung.wait()
                assert (await idle.call(framed(b"x"))).code == Code.OK
                assert (await other.call(framed(b"x"))).code == Code.OK
                async with raw_client(server.port) as fourth:
                    assert (await fourth.call(framed(b"x"))).code == Code.OK
                    await idle.until_closed()
                    assert (await other.call(framed(b"x"))).code == Code.OK
                assert server.echo.hanging == 1


@over_both
async def test_whoever_watches_the_health_makes_room_too_but_after_idle_ones() -> None:
    """Nobody needs a credential for that, so it must not lock out those who have one."""
    with trio.fail_after(20):
        async with serving(max_connections=4) as server:
            async with (
                raw_client(server.port) as busy,
                raw_client(server.port) as first,
                raw_client(server.port) as second,
                raw_client(server.port) as idle,
            ):
                await busy.open(framed(b"x"), p_path=HANG)
                await server.echo.hung.wait()
                for watcher in (first, second):
                    await watcher.open(b"\0\0\0\0\0", p_path="/grpc.health.v1.Health/Watch")
                    await _first_message(watcher)
                for _ in range(2):  # the one is read with the last of the first watcher's bytes at the latest, so ...
                    assert (await second.call(framed(b"x"))).code == Code.OK  # ... the other one is read after them
                assert (await idle.call(framed(b"x"))).code == Code.OK
                async with raw_client(server.port) as fifth:
                    assert (await fifth.call(framed(b"x"))).code == Code.OK
                    await idle.until_closed()
                    hung = await fifth.open(framed(b"x"), p_path=HANG)
                    await eventually(lambda: server.echo.hanging == 2)
                    async with raw_client(server.port) as sixth:
                        assert (await sixth.call(framed(b"x"))).code == Code.OK
                        answer = await first.answer(1)
                        assert (answer.code, answer.text) == (Code.UNAVAILABLE, "server is overloaded")
                        await first.until_closed()
                        assert not second.answers[1].ended
                        assert not fifth.answers[hung].ended
                assert server.echo.hanging >= 1


async def _first_message(client: RawClient) -> None:
    await client.until(lambda: bool(client.answers[1].messages))


@over_both
async def test_a_call_after_the_goodbye_of_its_connection_is_not_served() -> None:
    """GOAWAY tells its caller that it may repeat the call elsewhere, so it must not be done here as well."""
    done: list[bytes] = []
    with trio.fail_after(20):
        async with serving(Echo(lambda data: done.append(data) or data)) as server:
            async with raw_client(server.port) as client:
                running = await client.open(framed(b"x"), p_path=HANG)
                await server.echo.hung.wait()
                (connection,) = connections()
                connection.drain()
                late = await client.call(framed(b"late"))
                assert (late.code, late.text) == (Code.UNAVAILABLE, "server is shutting down")
                assert client.goaway == (running, ErrorCodes.NO_ERROR)
                server.echo.let_go.set()
                assert (await client.answer(running)).code == Code.OK
                await client.until_closed()
    assert done == []


@over_both
async def test_when_every_connection_is_busy_a_further_one_is_closed() -> None:
    with trio.fail_after(20):
        async with serving(max_connections=1) as server, raw_client(server.port) as busy:
            await busy.open(framed(b"x"), p_path=HANG)
            await server.echo.hung.wait()
            with suppress(trio.BrokenResourceError):  # TLS does not get through its handshake
                async with raw_client(server.port) as second:
                    await second.until_closed()
            assert server.value("grpc_server_connections") == 1
            server.echo.let_go.set()
            assert (await busy.answer(1)).code == Code.OK


# --- silence


@pytest.mark.parametrize("trickle", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_connection_without_a_handshake_is_closed_in_time(trickle: bytes) -> None:
    with trio.fail_after(10):
        async with serving(handshake_s=0.3) as server:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(_trickle, stream, trickle)  # does not win time
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some():
                        pass
                nursery.cancel_scope.cancel()


async def _trickle(stream: trio.SocketStream, data: bytes) -> None:
    """A byte every 50 ms, for longer than the test may take."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        for byte in data:
            await stream.send_all(bytes((byte,)))
            await trio.sleep(0.05)
        while data:
            await stream.send_all(b"\0\0\0\4\0\0\0\0\0"[:1])
            await trio.sleep(0.05)


@over_both
async def test_a_silent_connection_is_pinged_and_closed_when_it_does_not_answer() -> None:
    with trio.fail_after(10):
        async with serving(idle_s=0.1, ping_s=0.2) as server:
            async with raw_client(server.port) as alive:
                await alive.until(lambda: alive.pings >= 3)  # each answered by h2
                assert (await alive.call(framed(b"x"))).code == Code.OK
            async with raw_client(server.port) as dead:
                assert (await dead.call(framed(b"x"))).code == Code.OK
                while await dead.stream.receive_some():
                    pass


# --- TLS


async def test_tls_without_agreement_on_h2_is_closed(tls: Tls, authority: object) -> None:
    plain = ssl.create_default_context()
    authority.configure_trust(plain)  # type: ignore[attr-defined]
    http1 = ssl.create_default_context()
    authority.configure_trust(http1)  # type: ignore[attr-defined]
    http1.set_alpn_protocols(["http/1.1"])
    with trio.fail_after(10):
        async with serving(tls=tls.server) as server:
            for context in (plain, http1):
                stream = await connect(server.port, context)
                try:
                    await stream.do_handshake()
                    assert await stream.receive_some() == b""
                except trio.BrokenResourceError:
                    pass  # some TLS versions refuse the handshake itself
                await trio.aclose_forcefully(stream)
            async with raw_client(server.port, tls.client) as client:
                assert (await client.call(framed(b"x"))).code == Code.OK


async def test_tls_below_1_2_is_refused(tls: Tls) -> None:
    assert tls.server.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_tls_handshake_that_stalls_is_closed(tls: Tls) -> None:
    with trio.fail_after(10):
        async with serving(tls=tls.server, handshake_s=0.2) as server:
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                await stream.send_all(b"\x16\x03\x01")
                assert await stream.receive_some() == b""


async def test_clear_text_to_a_tls_port_is_closed(tls: Tls) -> None:
    with trio.fail_after(10):
        async with serving(tls=tls.server) as server:
            async with raw_client(server.port) as client:
                with suppress(trio.BrokenResourceError):
                    await client.flush()
                await client.until_closed()
            async with raw_client(server.port, tls.client) as client:
                assert (await client.call(framed(b"x"))).code == Code.OK
