"""Targets that are one end of a connection, on memory streams and a clock that jumps: ten seconds cost nothing.

The other end sends the input: a provider or a webhook receiver that answers, or somebody who asks the operators'
listener. The first byte of an input says how: in which pieces, and what happens around it.
"""

from __future__ import annotations

import http.client
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv4Address
from typing import Any, TypeVar

import h11
import trio
import trio.testing
from hypothesis import strategies as st

from pushd.channels.http2 import ConnectionFailed, Http2Client, Origin, open_http2_client
from pushd.channels.https1 import MAX_BODY_BYTES, MAX_HEAD_BYTES, MAX_INTERIM_ANSWERS, HttpsConnection
from pushd.core.providers.answers import FAILURES
from pushd.model import ATTEMPT_S
from pushd.ops.http import Page, serve_ops
from tests.channels.http2_peer import DATA, GOAWAY, HEADERS, ORIGIN, RST_STREAM, SETTINGS, Peer, accept, frame
from tests.channels.test_http2 import STATUS_IS_ENOUGH, block, frames, goaways
from tests.fuzz.engine import Target
from tests.fuzz.inputs import mostly, packed, unpacked
from tests.rpc.frames import server_frames

_T = TypeVar("_T")
REQUESTS = 3
PIECES = (65_536, 1_000, 50, 7)


def run_the_same(attack: Callable[[bytes], Awaitable[_T]], data: bytes) -> _T:
    """Run `attack` with tasks taking turns as its input says, so that it fails again if it fails.

    Trio keeps no order of its own as soon as hypothesis is imported, and draws by lot who goes first.
    """
    trio._core._run._r.seed(data)
    return trio.run(attack, data, clock=trio.testing.MockClock(autojump_threshold=0))


def flagged(inputs: st.SearchStrategy[bytes], flags: int = 8) -> st.SearchStrategy[bytes]:
    """Inputs with a first byte that says how they come."""
    return st.builds(lambda flag, data: bytes([flag]) + data, st.integers(0, flags - 1), inputs)


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def in_frames(data: bytes) -> list[bytes]:
    """HTTP/2 frames, the last one cut short perhaps."""
    parts = []
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        parts.append(data[:end])
        data = data[end:]
    return parts


class Http2Peers(Target):
    """A provider's side of an HTTP/2 connection; the next connection is a good one.

    First byte: 1 for "before the requests" instead of after them, then 0 for frames one by one or the size of pieces.
    """

    name = "http2"
    share = 2.0
    mutations = 2

    def made(self) -> st.SearchStrategy[bytes]:
        ids = st.sampled_from([1, 1, 3, 5])
        blocks = st.sampled_from(
            [b"\x88", b"\x8d", b"\x8c", b"\x8e", b"\x08\x03410", b"\x88\x0f\x0d\x012", b"\x08\x03103"]
        )
        heads = st.builds(
            lambda flags, one, fields: frame(HEADERS, flags, one, fields), st.sampled_from([4, 5]), ids, blocks
        )
        bodies = st.sampled_from([b"", b'{"reason":"BadDeviceToken"}', b"x" * 2_000, b"\3abc\0\0\0"])
        data = st.builds(
            lambda flags, one, body: frame(DATA, flags, one, body), st.sampled_from([0, 1, 9]), ids, bodies
        )
        resets = ids.map(lambda one: frame(RST_STREAM, 0, one, b"\0\0\0\7"))
        leaving = ids.map(lambda one: frame(GOAWAY, 0, 0, one.to_bytes(4, "big") + bytes(4)))
        whole = st.builds(
            lambda one, fields, body: frame(HEADERS, 4, one, fields) + frame(DATA, 1, one, body),
            ids,
            st.sampled_from([b"\x88", b"\x8c", b"\x8d", b"\x08\x03410"]),
            bodies,
        )
        fair = mostly(whole, mostly(heads, data | resets | leaving, 1), 2)
        odd = frames | goaways | server_frames() | st.binary(max_size=40)
        return flagged(st.lists(mostly(fair, odd, 8), min_size=1, max_size=12).map(b"".join))

    def pieces(self, data: bytes) -> list[bytes]:
        return [data[:1], *in_frames(data[1:])]

    def check(self, data: bytes) -> str:
        return run_the_same(self._attack, data)

    async def _attack(self, data: bytes) -> str:
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            good = Peer(nursery, accept)
            bad: list[trio.StapledStream[Any, Any]] = []

            async def opener(origin: Origin) -> trio.abc.Stream:
                if bad:
                    return await good.opener(origin)
                client, server = trio.testing.memory_stream_pair()
                bad.append(server)
                nursery.start_soon(self._misbehave, server, data)
                return client

            results: list[str] = []

            async def send() -> None:
                results.append(await self._request(client))

            async with open_http2_client(opener) as client:
                async with trio.open_nursery() as sending:
                    for _ in range(REQUESTS):
                        sending.start_soon(send)
                assert all(result in FAILURES or result.isdecimal() for result in results)
                # Requests that moved on to the good connection were answered there.
                answered = sum(map(str.isdecimal, results)) > len(good.calls)
                await bad[0].aclose()
                # The first to use a connection that has just ended may be told so; a retry gets another one.
                again = await self._request(client)
                await trio.sleep(1)
                assert "200" in (again, await self._request(client)), again
            nursery.cancel_scope.cancel()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        return "status" if answered else ""

    async def _misbehave(self, stream: trio.StapledStream[Any, Any], data: bytes) -> None:
        flags = (data or b"\0")[0]
        try:
            await stream.send_all(frame(SETTINGS, 0, 0))
            if not flags & 1:  # let the requests come first: before them there is no stream to answer on
                await trio.testing.wait_all_tasks_blocked()
            size = (0, 65_536, 50, 7)[flags >> 1 & 3]
            for piece in in_pieces(data[1:], size) if size else in_frames(data[1:]):
                await stream.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
            while await stream.receive_some():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _request(self, client: Http2Client) -> str:
        with trio.move_on_after(ATTEMPT_S):
            try:
                response = await client.request(ORIGIN, block("/3/device/ab"), b"{}", STATUS_IS_ENOUGH)
            except ConnectionFailed as failure:
                return failure.kind
            assert response.body is None or len(response.body) <= 16_384
            return str(response.status)
        return "timeout"


class _Scripted:
    """What stands where TLS would: sends one part for each request, in pieces, and counts what was taken.

    After the last part it begins again or ends, and it ends a connection that waits for more than was sent.
    """

    def __init__(self, parts: list[bytes], *, piece: int, endless: bool) -> None:
        self._parts = parts
        self._piece = piece
        self._endless = endless
        self._requests = 0
        self._waiting = b""
        self.sent = b""
        self.taken = 0

    async def send_all(self, _data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._send()

    def _send(self) -> None:
        if self._endless or self._requests < len(self._parts):
            part = self._parts[self._requests % len(self._parts)] if self._parts else b""
            self._waiting += part
            self.sent += part
            self._requests += 1

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._endless and not self._waiting:
            self._send()
        piece, self._waiting = self._waiting[: self._piece], self._waiting[self._piece :]
        self.taken += len(piece)
        return piece


class Webhooks(Target):
    """What a webhook receiver sends after each of several requests, as `packed`.

    First byte: 1 for "for ever", then the size of the pieces.
    """

    name = "webhooks"
    mutations = 2

    def made(self) -> st.SearchStrategy[bytes]:
        interim = st.sampled_from(
            [b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n"]
        )
        lines = st.sampled_from(
            [b"HTTP/1.1 200 OK", b"HTTP/1.1 204 X", b"HTTP/1.0 200 OK", b"HTTP/1.1 410", b"HTTP/1.1 304 X"]
        )
        bodies = st.sampled_from(
            [
                b"Content-Length: 0\r\n\r\n",
                b"Content-Length: 2\r\n\r\nok",
                b"Content-Length: 16384\r\n\r\n" + b"x" * 16_384,
                b"Content-Length: 16385\r\n\r\n" + b"x" * 16_385,
                b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nT: t\r\n\r\n",
                b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                b"Connection: close\r\n\r\nok",
                b"Connection: keep-alive\r\n\r\n",
                b"\r\n",
            ]
        )
        fields = st.lists(
            st.sampled_from([b"X: y\r\n", b"X:\r\n", b" folded\r\n", b"Y: " + b"z" * 3_000 + b"\r\n"]), max_size=3
        )
        answers = st.builds(
            lambda before, line, more, rest: before + line + b"\r\n" + b"".join(more) + rest,
            interim,
            lines,
            fields,
            bodies,
        )
        parts = mostly(answers, st.lists(answers, max_size=3).map(b"".join))
        return flagged(st.lists(parts, min_size=1, max_size=3).map(packed))

    def check(self, data: bytes) -> str:
        flags = (data or b"\0")[0]
        stream = _Scripted(unpacked(data[1:]), piece=PIECES[flags >> 1 & 3], endless=bool(flags & 1))
        statuses = trio.run(self._exchange, stream)
        if len(statuses) > 1:
            # Who reads on where the last answer ended must see the same answers: none is made of another's body.
            with suppress(http.client.UnknownProtocol):  # h11 lets any version pass, for what that is worth
                assert statuses == _statuses(stream.sent, len(statuses))
        return ("", "status", "reused")[min(len(statuses), 2)]

    async def _exchange(self, stream: _Scripted) -> list[int]:
        """The statuses of up to three exchanges on one connection."""
        statuses: list[int] = []
        connection = HttpsConnection(stream, IPv4Address("192.0.2.1"))  # type: ignore[arg-type]
        for _ in range(3):
            before = stream.taken
            try:
                status = await connection.post(b"/", [(b"Host", b"h"), (b"Content-Length", b"2")], b"{}")
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                assert await connection.finish() is False
                break
            finally:
                # Every head is bounded, and the last read can overshoot by one piece.
                heads = (MAX_INTERIM_ANSWERS + 2) * MAX_HEAD_BYTES
                assert stream.taken - before <= heads + 65_536
            assert 0 <= status <= 999
            statuses.append(status)
            before = stream.taken
            reusable = await connection.finish()
            # Chunks of one byte take six bytes each, beside what was read with the head.
            assert stream.taken - before <= 6 * MAX_BODY_BYTES + MAX_HEAD_BYTES + 65_536
            if not reusable:
                break
        return statuses


def _statuses(data: bytes, count: int) -> list[int]:
    """The statuses of the first final answers in `data`, as the standard library reads them."""
    source = io.BytesIO(data)
    statuses: list[int] = []
    while len(statuses) < count:
        answer = http.client.HTTPResponse(_Socket(source), method="POST")  # type: ignore[arg-type]
        answer.begin()
        if answer.status >= 200 or answer.status == 101:
            statuses.append(answer.status)
        if len(statuses) < count:
            answer.read()
    return statuses


class _Socket:
    def __init__(self, source: io.BytesIO) -> None:
        self._source = source

    def makefile(self, _mode: str) -> io.BufferedIOBase:
        class Open(io.BytesIO):
            """Reads on in the source, and leaves it open."""

            readline = self._source.readline
            read = self._source.read
            readinto = self._source.readinto

        return Open()


class _Listener(trio.abc.Listener[Any]):
    """Hands out memory streams."""

    def __init__(self) -> None:
        self._dial, self._accept = trio.open_memory_channel[Any](0)

    async def connect(self) -> trio.StapledStream[Any, Any]:
        client, server = trio.testing.memory_stream_pair()
        await self._dial.send(server)
        return client

    async def accept(self) -> Any:
        return await self._accept.receive()

    async def aclose(self) -> None:
        await self._accept.aclose()


class Operators(Target):
    """A request to the operators' listener. First byte: 1 for "and hangs up", then the size of the pieces."""

    name = "operators"
    mutations = 2

    def made(self) -> st.SearchStrategy[bytes]:
        methods = st.sampled_from([b"GET", b"GET", b"HEAD", b"POST", b"TRACE", b"get", b"PRI"])
        paths = [b"/healthz", b"/healthz?x", b"/", b"*", b"/../healthz", b"/%68ealthz", b"http://x/healthz", b"/\xff"]
        fields = st.lists(
            mostly(
                st.sampled_from([b"Accept: */*", b"X:", b"Connection: keep-alive", b"Y: " + b"z" * 5_000]),
                st.sampled_from(
                    [b"Host: y", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Expect: 100-continue"]
                )
                | st.binary(max_size=20),
            ),
            max_size=5,
        )
        versions = mostly(st.just(b"HTTP/1.1"), st.sampled_from([b"HTTP/1.0", b"HTTP/2.0", b""]))
        requests = st.builds(
            lambda method, path, version, more: b"\r\n".join(
                [b" ".join((method, path, version)), b"Host: x", *more, b"", b""]
            ),
            methods,
            st.sampled_from(paths),
            versions,
            fields,
        )
        return flagged(st.lists(requests, min_size=1, max_size=2).map(b"".join))

    def check(self, data: bytes) -> str:
        return run_the_same(self._attack, data)

    async def _attack(self, data: bytes) -> str:
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with _operators() as listener:
            heard = await self._ask(listener, data)
            # A neighbour is served; nothing is left of the connection before.
            assert b"\r\n\r\nfine\n" in await self._ask(listener, b"\0GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        if not heard:
            return ""
        # One answer, whole, and it says that it is the last.
        head, _, body = heard.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        named = dict(field.lower().split(b": ", 1) for field in fields)
        assert line.split(b" ")[:2] in ([b"HTTP/1.1", b"200"], [b"HTTP/1.1", b"404"], [b"HTTP/1.1", b"405"])
        assert named[b"connection"] == b"close"
        assert len(body) in (0, int(named[b"content-length"]))
        assert not (body and data[1:6] == b"HEAD ")
        assert body in (b"", b"fine\n", b"nothing here\n", b"only GET is served here\n")
        return "page" if b" 200 " in line else "refusal"

    async def _ask(self, listener: _Listener, data: bytes) -> bytes:
        stream = await listener.connect()
        heard = b""
        with suppress(trio.BrokenResourceError):
            for piece in in_pieces(data[1:], PIECES[(data or b"\0")[0] >> 1 & 3]):
                await stream.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
            if (data or b"\0")[0] & 1:
                await stream.send_eof()
        with suppress(trio.BrokenResourceError):
            while more := await stream.receive_some():
                heard += more
        await stream.aclose()
        return heard


@asynccontextmanager
async def _operators() -> AsyncIterator[_Listener]:
    async def fine() -> Page:
        return Page(b"fine\n")

    listener = _Listener()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_ops, [listener], {"/healthz": fine})  # type: ignore[arg-type]
        yield listener
        nursery.cancel_scope.cancel()
