"""Targets that are connections to somebody else: what a provider or a webhook receiver sends back.

Both run on memory streams and a clock that jumps, so that ten seconds of waiting cost nothing.
"""

from __future__ import annotations

import time
from ipaddress import IPv4Address

import h11
import trio
import trio.testing
from hypothesis import strategies as st

from pushd.channels.http2 import ConnectionFailed, Http2Client, Origin, open_http2_client
from pushd.channels.https1 import MAX_BODY_BYTES, MAX_HEAD_BYTES, MAX_INTERIM_ANSWERS, HttpsConnection
from pushd.core.providers.answers import FAILURES
from pushd.model import ATTEMPT_S
from tests.channels.http2_peer import ORIGIN, SETTINGS, Peer, accept, frame
from tests.channels.test_http2 import STATUS_IS_ENOUGH, block, frames, goaways
from tests.fuzz.engine import Target
from tests.rpc.frames import server_frames

REQUESTS = 3
PATIENCE_S = 20.0  # of the real clock, for one input: whatever a peer sends, reading it must not keep a processor busy


class Http2Peers(Target):
    """A provider's side of an HTTP/2 connection, after its first SETTINGS. The next connection is a good one."""

    name = "http2"
    share = 1.5

    def inputs(self) -> st.SearchStrategy[bytes]:
        return st.lists(frames | goaways | server_frames() | st.binary(max_size=40), max_size=12).map(b"".join)

    def check(self, data: bytes) -> None:
        began = time.monotonic()
        trio.run(self._attack, data, clock=trio.testing.MockClock(autojump_threshold=0))
        assert time.monotonic() - began < PATIENCE_S

    async def _attack(self, data: bytes) -> None:
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            good = Peer(nursery, accept)
            bad: list[trio.StapledStream[object, object]] = []

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
                await bad[0].aclose()
                # The first to use a connection that has just ended may be told so; a retry gets another one.
                again = await self._request(client)
                await trio.sleep(1)
                assert "200" in (again, await self._request(client)), again
            nursery.cancel_scope.cancel()
        assert trio.lowlevel.current_statistics().tasks_living == tasks

    async def _misbehave(self, stream: trio.abc.Stream, data: bytes) -> None:
        try:
            await stream.send_all(frame(SETTINGS, 0, 0) + data)
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
    """What stands where TLS would: gives `data` in pieces, once or for ever, and counts what was taken."""

    def __init__(self, data: bytes, *, piece: int, endless: bool) -> None:
        self._data = data
        self._piece = piece
        self._endless = endless
        self._at = 0
        self.taken = 0

    async def send_all(self, _data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._endless and self._at >= len(self._data):
            self._at = 0
        piece = self._data[self._at : self._at + self._piece]
        self._at += len(piece)
        self.taken += len(piece)
        return piece


class Webhooks(Target):
    """An answer of a webhook receiver. The first byte says in how large pieces it comes and whether it ever ends."""

    name = "webhooks"

    def check(self, data: bytes) -> None:
        flags, answer = data[:1] or b"\0", data[1:]
        # An endless answer of nothing would be a connection that ended.
        piece = (1, 7, 1_000, 65_536)[flags[0] >> 1 & 3]
        stream = _Scripted(answer, piece=piece, endless=bool(flags[0] & 1 and answer))
        began = time.monotonic()
        trio.run(self._exchange, stream)
        assert time.monotonic() - began < PATIENCE_S
        # Every head and the body are bounded, and a read can overshoot each by one piece.
        heads = (MAX_INTERIM_ANSWERS + 2) * (MAX_HEAD_BYTES + 65_536)
        assert stream.taken <= 2 * (heads + MAX_BODY_BYTES + 65_536)

    async def _exchange(self, stream: _Scripted) -> None:
        connection = HttpsConnection(stream, IPv4Address("192.0.2.1"))  # type: ignore[arg-type]
        for _ in range(2):
            try:
                status = await connection.post(b"/", [(b"Host", b"h"), (b"Content-Length", b"2")], b"{}")
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                assert await connection.finish() is False
                return
            assert 0 <= status <= 999
            if not await connection.finish():
                return
