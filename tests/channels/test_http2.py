"""The HTTP/2 client against a scripted peer on memory streams; clocks are virtual."""

from __future__ import annotations

import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import h2.errors
import h2.settings
import hpack
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from pushd.channels import http2
from pushd.channels.http2 import ConnectionFailed, Http2Client, Origin, Response, literal, open_http2_client
from pushd.channels.http2.connection import Connection
from pushd.channels.http2.framing import FrameFilter, GoAway
from pushd.core.providers.answers import FAILURES
from tests.channels.http2_peer import (
    CONTINUATION,
    DATA,
    HEADERS,
    ORIGIN,
    PING,
    PUSH_PROMISE,
    QUIET_ORIGIN,
    SETTINGS,
    Call,
    Line,
    Peer,
    accept,
    frame,
)

BLOCK = literal(b":method", b"POST") + literal(b":scheme", b"https") + literal(b":authority", b"api.push.apple.com")
STATUS_IS_ENOUGH = {200: 0.0, 503: 0.0}


def block(path: str) -> bytes:
    return BLOCK + literal(b":path", path.encode(), private=True)


class Rig:
    """A client, its peer, and short ways to send."""

    def __init__(self, client: Http2Client, peer: Peer, origin: Origin) -> None:
        self.client = client
        self.peer = peer
        self.origin = origin

    @property
    def line(self) -> Line:
        return self.peer.lines[-1]

    async def send(self, path: str = "/3/device/ab", body: bytes = b"{}") -> Response:
        return await self.client.request(self.origin, block(path), body, STATUS_IS_ENOUGH)

    async def try_send(self, path: str = "/3/device/ab", body: bytes = b"{}") -> str:
        """`send` as an attempt does it: 10 s, and a word for what came of it."""
        with trio.move_on_after(10):
            try:
                return str((await self.send(path, body)).status)
            except ConnectionFailed as failure:
                return failure.kind
        return "timeout"

    async def send_many(self, count: int, path: str = "/3/device/ab") -> list[str]:
        results: list[str] = []

        async def one() -> None:
            results.append(await self.try_send(path))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)
        return results


def go_deaf(line: Line) -> None:
    """The peer's machine is gone without a word, or something between has forgotten the connection."""
    line.h2.receive_data = lambda data: []  # type: ignore[method-assign]


@asynccontextmanager
async def rig(
    answer: Callable[[Call], Awaitable[None]] = accept, origin: Origin = ORIGIN, **initial: int
) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        peer = Peer(nursery, answer, initial)
        async with open_http2_client(peer.opener) as client:
            yield Rig(client, peer, origin)
        nursery.cancel_scope.cancel()


async def test_one_connection_carries_256_requests_in_few_writes(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.send_many(256) == ["200"] * 256
        assert r.peer.opened == 1
        # Preface and settings, their acknowledgement, then the requests in a handful of writes.
        assert r.line.sends <= 10


async def test_request_and_answer_pass_unchanged(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.reply(400, b'{"reason":"BadTopic"}', ("retry-after", "7"))

    async with rig(answer) as r:
        response = await r.send("/3/device/0123", b'{"a":1}')
        assert (response.status, response.body) == (400, b'{"reason":"BadTopic"}')
        assert response.header(b"retry-after") == "7"
        assert response.header(b"absent") is None
        assert r.peer.calls[0].headers == {
            ":method": "POST",
            ":scheme": "https",
            ":authority": "api.push.apple.com",
            ":path": "/3/device/0123",
        }
        assert r.peer.calls[0].body == b'{"a":1}'


async def test_answers_are_matched_by_stream_whatever_their_order_B035(autojump_clock: trio.abc.Clock) -> None:
    held: list[Call] = []

    async def answer(call: Call) -> None:
        held.append(call)
        if len(held) == 8:
            for earlier in reversed(held):
                earlier.reply(404, earlier.path.encode())

    async with rig(answer) as r:
        bodies: dict[str, bytes | None] = {}

        async def one(path: str) -> None:
            bodies[path] = (await r.send(path)).body

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, f"/{number}")
        assert bodies == {f"/{number}": f"/{number}".encode() for number in range(8)}


async def test_an_answer_of_headers_alone_is_complete_B033(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(410, end=True)

    async with rig(answer) as r:
        response = await r.send()
        assert (response.status, response.body) == (410, b"")


async def test_a_body_in_many_frames_is_joined(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(400)
        for byte in b'{"reason":"BadPath"}':
            await trio.sleep(0.1)
            call.data(bytes((byte,)))
        call.data(b"", end=True)

    async with rig(answer) as r:
        assert (await r.send()).body == b'{"reason":"BadPath"}'


@pytest.mark.parametrize(("size", "whole"), [(16_384, True), (16_385, False), (60_000, False)])
async def test_a_body_over_16_kib_counts_as_none_T134(autojump_clock: trio.abc.Clock, size: int, whole: bool) -> None:
    async def answer(call: Call) -> None:
        call.reply(400, b"x" * (size if call.stream_id == 1 else 1))

    async with rig(answer) as r:
        response = await r.send()
        assert response.status == 400
        assert response.body == (b"x" * size if whole else None)
        assert await r.try_send() == "400"  # the connection is fine
        assert r.peer.opened == 1


async def test_bodies_for_ever_do_not_exhaust_the_connection_window(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.reply(400, b"x" * 16_384)

    async with rig(answer) as r:
        for _ in range(20):  # 320 KiB through a window of 64 KiB
            response = await r.send()
            assert response.body is not None
            assert len(response.body) == 16_384


async def test_a_decided_status_does_not_wait_for_its_body_T145(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(503, ("retry-after", "120"))

    async with rig(answer) as r:
        before = trio.current_time()
        response = await r.send()
        assert (response.status, response.body, response.header(b"retry-after")) == (503, None, "120")
        assert trio.current_time() == before
        assert r.line.resets == []
        await trio.sleep(20)  # its stream is taken back when the answer never ends
        assert r.line.resets == [(1, h2.errors.ErrorCodes.CANCEL)]


async def test_a_decided_answer_that_ends_later_is_not_reset(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(200)
        await trio.sleep(1)
        call.data(b'{"name":"projects/p/messages/1"}', end=True)

    async with rig(answer) as r:
        for _ in range(3):
            assert await r.try_send() == "200"
        await trio.sleep(20)
        assert r.line.resets == []


async def test_a_cancelled_request_is_reset_and_its_stream_returns(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if call.path == "/fast":
            call.reply(200)

    async with rig(answer, max_concurrent_streams=1) as r:
        with trio.move_on_after(3):
            await r.send("/stalled")
        assert await r.try_send("/fast") == "200"
        assert r.line.resets == [(1, h2.errors.ErrorCodes.CANCEL)]
        assert r.peer.opened == 1


async def test_stream_limit_0_times_out_without_a_deadlock_S076(autojump_clock: trio.abc.Clock) -> None:
    async with rig(max_concurrent_streams=0) as r:
        before = trio.current_time()
        assert await r.send_many(8) == ["timeout"] * 8
        assert trio.current_time() - before == pytest.approx(10)
        assert r.peer.calls == []
        r.line.settings(max_concurrent_streams=100)
        assert await r.try_send() == "200"


async def test_stream_limit_1_sends_one_after_another_S076(autojump_clock: trio.abc.Clock) -> None:
    running = peak = 0

    async def answer(call: Call) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await trio.sleep(0.01)
        running -= 1
        call.reply(200)

    async with rig(answer, max_concurrent_streams=1) as r:
        assert await r.send_many(20) == ["200"] * 20
        assert peak == 1
        assert r.peer.opened == 1


async def test_a_limit_raised_after_the_first_answer_is_used_at_once_B043(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        await trio.sleep(0.05)
        if len(r.peer.calls) == 1:
            call.line.settings(max_concurrent_streams=1_000)
        call.reply(200)

    async with rig(answer, max_concurrent_streams=1) as r:
        before = trio.current_time()
        assert await r.send_many(256) == ["200"] * 256
        assert trio.current_time() - before == pytest.approx(0.1)
        assert r.peer.opened == 1


async def test_a_limit_that_stays_low_gets_more_connections_B043(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        await trio.sleep(2)
        call.reply(200)

    async with rig(answer, max_concurrent_streams=1) as r:
        assert await r.send_many(8) == ["200"] * 8
        assert r.peer.opened == 4


async def test_a_limit_lowered_below_the_number_in_flight_B051_S076(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if len(r.peer.calls) == 50:
            call.line.settings(max_concurrent_streams=2)
        await trio.sleep(0.1)
        call.reply(200)

    async with rig(answer, max_concurrent_streams=50) as r:
        assert await r.send_many(60) == ["200"] * 60
        r.line.settings(max_concurrent_streams=50)
        assert await r.send_many(60) == ["200"] * 60


async def test_a_closed_window_stalls_only_its_own_stream_S077(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.reply(200)

    async with rig(answer, initial_window_size=0) as r:
        results: dict[str, str] = {}

        async def one(path: str, body: bytes) -> None:
            results[path] = await r.try_send(path, body)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "/first", b"x" * 100)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(one, "/second", b"y" * 100)
            await trio.testing.wait_all_tasks_blocked()
            while "/second" not in results:
                r.line.h2.increment_flow_control_window(10, 3)
                r.line.wake.set()
                await trio.sleep(0.1)
        assert results == {"/first": "timeout", "/second": "200"}
        assert r.peer.calls[0].body == b"y" * 100


async def test_a_body_larger_than_window_and_frame_is_sent_in_parts(autojump_clock: trio.abc.Clock) -> None:
    async with rig(initial_window_size=1_000) as r:
        assert await r.try_send(body=b"z" * 50_000) == "200"
        assert r.peer.calls[0].body == b"z" * 50_000


async def test_a_stream_closed_while_its_window_opens_costs_only_itself(autojump_clock: trio.abc.Clock) -> None:
    async with rig(initial_window_size=0) as r:
        results: dict[str, str] = {}

        async def one(path: str) -> None:
            results[path] = await r.try_send(path)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "/first")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(one, "/second")
            await trio.testing.wait_all_tasks_blocked()
            r.line.h2.increment_flow_control_window(100, 1)
            r.line.h2.increment_flow_control_window(100, 3)
            r.line.h2.reset_stream(1, 2)
            r.line.wake.set()
        assert results == {"/first": "reset", "/second": "200"}


@pytest.mark.parametrize(
    ("code", "result", "sent"),
    [(7, "refused", 2), (8, "reset", 1), (2, "reset", 1), (11, "reset", 1)],
    ids=["REFUSED_STREAM", "CANCEL", "INTERNAL_ERROR", "ENHANCE_YOUR_CALM"],
)
async def test_only_a_refused_stream_is_sent_again_and_once_S082(
    autojump_clock: trio.abc.Clock, code: int, result: str, sent: int
) -> None:
    async def answer(call: Call) -> None:
        call.reset(code)

    async with rig(answer) as r:
        assert await r.try_send() == result
        assert len(r.peer.calls) == sent


async def test_a_stream_refused_once_succeeds_within_the_attempt(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if len(r.peer.calls) == 1:
            call.reset(7)
        else:
            call.reply(200)

    async with rig(answer) as r:
        assert await r.try_send() == "200"


async def test_a_reset_after_the_deciding_status_keeps_the_status(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        call.head(503)
        call.reset(2)

    async with rig(answer) as r:
        assert await r.try_send() == "503"


@pytest.mark.parametrize("code", [0, 2, 7, 8, 11])
async def test_goaway_lets_lower_streams_end_and_resends_the_others_once_S082(
    autojump_clock: trio.abc.Clock, code: int
) -> None:
    async def answer(call: Call) -> None:
        if call.line.number == 1 and len(r.peer.calls) == 10:
            call.line.goaway(9, code)  # streams 1 to 9 are processed, 11 to 19 are not
        await trio.sleep(1)
        if call.line.number == 2 or call.stream_id <= 9:
            call.reply(200)

    async with rig(answer) as r:
        assert await r.send_many(10) == ["200"] * 10
        assert [call.line.number for call in r.peer.calls] == [1] * 10 + [2] * 5
        await r.peer.lines[0].closed.wait()


async def test_goaway_in_the_middle_of_answers_loses_none(autojump_clock: trio.abc.Clock) -> None:
    held: list[Call] = []

    async def answer(call: Call) -> None:
        held.append(call)
        if len(held) == 4:
            held[0].reply(200)
            call.line.raw(call.line.h2.data_to_send())
            call.line.goaway(7, 0, b'{"reason":"Shutdown"}')
            for earlier in held[1:]:
                earlier.reply(200)

    async with rig(answer) as r:
        assert await r.send_many(4) == ["200"] * 4
        assert r.peer.opened == 1


async def test_goaway_for_all_with_debug_data_and_a_close_is_a_failure_B041(
    autojump_clock: trio.abc.Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    async def answer(call: Call) -> None:
        call.line.goaway(0, 0, b'{"reason":"BadCertificateEnvironment"}')
        await trio.testing.wait_all_tasks_blocked()
        await call.line.cut()

    async with rig(answer) as r:
        assert await r.try_send() == "goaway"
        assert r.peer.opened == 2
    assert "BadCertificate" not in "".join(capfd.readouterr())


async def test_every_connection_closed_fails_at_once_and_the_next_send_reconnects_B031(
    autojump_clock: trio.abc.Clock,
) -> None:
    async def answer(call: Call) -> None:
        if call.line.number == 1:
            await call.line.cut()
        else:
            call.reply(200)

    async with rig(answer) as r:
        before = trio.current_time()
        assert set(await r.send_many(32)) == {"closed"}
        assert trio.current_time() == before
        assert await r.try_send() == "200"


async def test_a_connect_that_stalls_is_inside_the_attempt_B045_B047(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        r.peer.connect_s = 1_000
        before = trio.current_time()
        assert await r.try_send() == "timeout"
        assert trio.current_time() - before == pytest.approx(10)
        r.peer.connect_s = 0
        await trio.sleep(1)
        assert await r.try_send() == "200"


async def test_a_name_that_no_thread_can_be_started_for_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trio asks the system for names in threads, and a container may have as many processes as it is allowed."""

    async def refuse(host: str, port: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio, "open_tcp_stream", refuse)
    async with open_http2_client() as client:
        with pytest.raises(ConnectionFailed) as failed:
            await client.request(ORIGIN, block("/"), b"", STATUS_IS_ENOUGH)
        assert failed.value.kind == "connect"


async def test_a_peer_without_settings_is_given_up(autojump_clock: trio.abc.Clock) -> None:
    async def opener(origin: Origin) -> trio.abc.Stream:
        client, silent = trio.testing.memory_stream_pair()
        streams.append(silent)
        return client

    streams: list[object] = []
    async with open_http2_client(opener) as client:
        with trio.move_on_after(10) as attempt:
            await client.request(ORIGIN, block("/"), b"{}", STATUS_IS_ENOUGH)
        assert attempt.cancelled_caught


async def test_256_senders_share_one_failed_connect(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        r.peer.refuse = "connect"
        assert await r.send_many(256) == ["connect"] * 256
        assert r.peer.opened == 1
        r.peer.refuse = None
        await trio.sleep(1)
        assert await r.try_send() == "200"


async def test_good_sends_succeed_after_a_thousand_cancelled_ones_B053(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if call.path == "/3/device/ab":
            call.reply(200)

    async with rig(answer, max_concurrent_streams=100) as r:
        r.peer.connect_s = 0.01

        async def give_up(after_s: float) -> None:
            with trio.move_on_after(after_s):
                await r.send("/stalled")

        async with trio.open_nursery() as nursery:
            for number in range(1_000):
                nursery.start_soon(give_up, number * 0.000_05)
        assert await r.send_many(256) == ["200"] * 256


@pytest.mark.parametrize("origin", [ORIGIN, QUIET_ORIGIN], ids=["apns", "fcm"])
async def test_a_push_alone_on_a_connection_gone_deaf_loses_one_attempt(
    origin: Origin, autojump_clock: trio.abc.Clock
) -> None:
    async with rig(origin=origin) as r:
        assert await r.try_send() == "200"
        await trio.sleep(5)
        go_deaf(r.line)
        assert [await r.try_send() for _ in range(2)] == ["timeout", "200"]
        assert r.peer.opened == 2
        await r.peer.lines[0].closed.wait()


async def test_256_requests_on_a_connection_gone_deaf_cost_one_new_connection(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.try_send() == "200"
        await trio.sleep(5)
        go_deaf(r.line)
        assert await r.send_many(256) == ["timeout"] * 256
        assert await r.send_many(256) == ["200"] * 256
        assert r.peer.opened == 2


async def test_a_connection_that_lives_and_answers_no_request_is_replaced_after_three(
    autojump_clock: trio.abc.Clock,
) -> None:
    async def answer(call: Call) -> None:
        if call.line.number > 1:
            call.reply(200)
            return
        await trio.sleep(1)
        call.line.h2.ping(b"I live.\0")
        call.line.wake.set()

    async with rig(answer) as r:
        assert [await r.try_send() for _ in range(4)] == ["timeout", "timeout", "timeout", "200"]
        assert r.peer.opened == 2
        await r.peer.lines[0].closed.wait()


async def test_one_slow_stream_does_not_cost_the_connection(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if call.path != "/stalled":
            call.reply(200)

    async with rig(answer) as r:
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(r.try_send, "/stalled")
                await trio.sleep(1)
                assert await r.try_send() == "200"
        assert r.peer.opened == 1


async def test_an_idle_apns_connection_is_pinged_and_kept(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.try_send() == "200"
        await trio.sleep(3_600)
        assert 30 <= r.line.pings <= 60
        assert await r.try_send() == "200"
        assert r.peer.opened == 1


async def test_a_ping_without_answer_ends_the_connection(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        assert await r.try_send() == "200"
        go_deaf(r.line)
        await r.line.closed.wait()
        assert await r.try_send() == "200"
        assert r.peer.opened == 2


async def test_an_idle_fcm_connection_is_closed_and_never_pinged(autojump_clock: trio.abc.Clock) -> None:
    async with rig(origin=QUIET_ORIGIN) as r:
        assert await r.try_send() == "200"
        await trio.sleep(30)
        assert not r.line.closed.is_set()
        await trio.sleep(40)
        assert r.line.closed.is_set()
        assert r.line.pings == 0
        assert await r.try_send() == "200"
        assert r.peer.opened == 2


@pytest.mark.parametrize(
    "attack",
    [
        frame(PING, 0, 0, bytes(8)) * 2_000,
        frame(SETTINGS, 0, 0) * 2_000,
        frame(DATA, 0, 1) * 2_000,
        frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 70_000) * 33),
        frame(CONTINUATION, 0, 1, b"x" * 100),
        frame(HEADERS, 0, 1, b"\x88") + frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b") * 10_000,
        frame(HEADERS, 4, 1, b"\x88" + b"\x40\x7f\x81\x7d" + b"n" * 16_000 + b"\x01v") * 2,
        frame(HEADERS, 4, 1, b"\x88" + (b"\x00\x7f\x21" + b"n" * 160 + b"\x01v") * 96),
        frame(HEADERS, 4, 1, b"\x3f\xe1\xff\x07\x88"),
        frame(PUSH_PROMISE, 4, 1, struct.pack(">I", 2) + b"\x82"),
        frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10,
        frame(7, 0, 0, b"x"),
        frame(DATA, 0, 0, b"x"),
    ],
    ids=[
        "ping-flood",
        "settings-flood",
        "empty-data-flood",
        "many-settings",
        "stray-continuation",
        "endless-continuation",
        "large-names",
        "header-list-over-16-kib",
        "table-growth",
        "push-promise",
        "bad-hpack",
        "http1",
        "short-goaway",
        "data-on-stream-0",
    ],
)
async def test_a_hostile_peer_loses_its_connection_and_nothing_else_S079_S080(
    autojump_clock: trio.abc.Clock, attack: bytes
) -> None:
    async def answer(call: Call) -> None:
        if call.line.number == 1:
            call.line.raw(attack)
        else:
            call.reply(200)

    async with rig(answer) as r:
        before = trio.current_time()
        assert await r.try_send() == "protocol"
        assert trio.current_time() - before < 1
        assert await r.try_send() == "200"


async def test_settings_nobody_knows_are_not_kept(autojump_clock: trio.abc.Clock) -> None:
    client, peer = trio.testing.memory_stream_pair()
    connection = Connection(client, pings=True, on_change=lambda: None)
    async with trio.open_nursery() as nursery:
        for first in range(16, 16 + 5_000, 32):
            settings = b"".join(struct.pack(">HL", code, 1) for code in range(first, first + 32))
            await peer.send_all(frame(SETTINGS, 0, 0, settings))
        await nursery.start(connection.run)
        await trio.testing.wait_all_tasks_blocked()
        assert connection.accepting
        assert len(connection._wire.remote_settings) <= len(h2.settings.SettingCodes)
        nursery.cancel_scope.cancel()


async def test_an_answer_without_a_status_fails_its_own_stream(autojump_clock: trio.abc.Clock) -> None:
    async def answer(call: Call) -> None:
        if call.path == "/bad":
            call.line.raw(frame(HEADERS, 5, call.stream_id, literal(b":status", b"2x0")))
        else:
            call.reply(200)

    async with rig(answer) as r:
        assert await r.try_send("/bad") == "protocol"
        assert await r.try_send() == "200"
        assert r.peer.opened == 1


async def test_a_peer_that_reads_nothing_costs_the_attempt_and_no_more(autojump_clock: trio.abc.Clock) -> None:
    """Answers to pings must not pile up behind a write that does not end."""

    async def opener(origin: Origin) -> trio.abc.Stream:
        client, peer = trio.testing.lockstep_stream_pair()
        nursery.start_soon(flood, peer)
        return client

    async def flood(peer: trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]) -> None:
        with trio.CancelScope():
            try:
                await peer.send_all(frame(SETTINGS, 0, 0))
                while True:
                    await peer.send_all(frame(PING, 0, 0, bytes(8)) * 100)
            except trio.BrokenResourceError:
                broken.set()

    broken = trio.Event()
    async with trio.open_nursery() as nursery:
        async with open_http2_client(opener) as client:
            with trio.move_on_after(10), pytest.raises(ConnectionFailed):
                await client.request(ORIGIN, block("/"), b"{}", STATUS_IS_ENOUGH)
            await broken.wait()
        nursery.cancel_scope.cancel()


async def test_leaving_the_client_ends_its_connections(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        peer = Peer(nursery, accept)
        async with open_http2_client(peer.opener) as client:
            await client.request(ORIGIN, block("/"), b"{}", STATUS_IS_ENOUGH)
        await peer.lines[0].closed.wait()


async def test_thousands_of_sends_leave_no_task_and_no_stream_behind(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r:
        await r.try_send()
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(3):
            await r.send_many(1_000)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before
        assert r.peer.opened == 1
        del r.peer.calls[:]


# What needs no peer.


def test_every_kind_of_failure_is_in_the_published_list() -> None:
    sources = Path(http2.__file__).parent.glob("*.py")
    kinds = {
        kind for source in sources for kind in re.findall(r'(?:Failed|NotProcessed)\("(\w+)"\)', source.read_text())
    }
    assert {"connect", "tls", "refused"} <= kinds <= set(FAILURES)


@given(st.binary(min_size=1, max_size=30), st.text("abc-.~ 019/=+", min_size=1, max_size=400), st.booleans())
def test_a_literal_field_is_hpack_for_itself(name: bytes, value: str, private: bool) -> None:
    (field,) = hpack.Decoder().decode(literal(name, value.encode(), private=private), raw=True)
    assert tuple(field) == (name, value.encode())
    assert field.indexable is not private


@pytest.mark.parametrize("value", [b"", b"a\r\nb", b"a\x00", "\u00e9".encode(), b"\x7f"])
def test_a_header_value_cannot_break_out_of_its_field(value: bytes) -> None:
    with pytest.raises(ValueError, match="visible ASCII"):
        literal(b"apns-topic", value)


frames = st.builds(
    frame,
    st.sampled_from([0, 1, 3, 4, 6, 8, 9, 255]),
    st.integers(0, 255),
    st.integers(0, 2**31 - 1),
    st.binary(max_size=40),
)
goaways = st.builds(
    lambda last, code, debug: frame(7, 0, 0, struct.pack(">II", last, code) + debug),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=20),
)


@given(st.lists(frames | goaways, max_size=8), st.data())
def test_the_filter_takes_out_goaway_and_nothing_else_however_bytes_are_cut(
    sequence: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(sequence)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    filter_ = FrameFilter()
    passed, found = b"", list[GoAway]()
    for part in parts:
        kept, notices = filter_.feed(part)
        passed += kept
        found += notices
    assert passed == b"".join(item for item in sequence if item[3] != 7)
    assert [(notice.last_stream_id, notice.error_code) for notice in found] == [
        struct.unpack(">II", item[9:17]) for item in sequence if item[3] == 7
    ]
    assert filter_.frames == len(sequence)


@settings(max_examples=200)
@given(st.lists(frames | goaways | st.binary(max_size=60), max_size=12))
async def test_no_bytes_from_a_peer_break_more_than_their_connection(sequence: list[bytes]) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            client, peer = trio.testing.memory_stream_pair()
            connection = Connection(client, pings=True, on_change=lambda: None)
            await peer.send_all(frame(SETTINGS, 0, 0))
            await nursery.start(connection.run)
            exchange = connection.open(block("/"), b"{}", STATUS_IS_ENOUGH)
            await peer.send_all(b"".join(sequence))
            await peer.send_eof()
            await exchange.done.wait()


async def test_a_connection_shows_its_streams() -> None:
    client, _peer = trio.testing.memory_stream_pair()
    assert repr(Connection(client, pings=True, on_change=lambda: None)) == "<Connection streams=0/0 accepting=True>"
