"""How slow a peer may be inside one call, on a virtual clock: hours of dripping cost nothing here."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hyperframe.frame import DataFrame

from pushd.errors import Code, StatusError
from pushd.rpc.calls import Call, Reason
from pushd.rpc.machine import CallOpened, HalfClosed, MessageReceived, Status
from pushd.rpc.wire import Wire
from tests.rpc.frames import frame
from tests.rpc.test_machine import PATH, Pair
from tests.rpc.test_wire import Line

STALL_S = 30.0
SLOWEST = 1_200  # bytes a second that are always enough


class Rig:
    """One side of a connection with real calls, the other one scripted."""

    def __init__(self, pair: Pair, wire: Wire) -> None:
        self.pair = pair
        self.wire = wire
        self.calls: dict[int, Call] = {}

    def open(self) -> Call:
        stream_id = self.pair.client.open_call(PATH, None)
        self.feed(self.pair.client.data_to_send())
        return self.calls[stream_id]

    def feed(self, data: bytes) -> None:
        """Bytes from the peer."""
        machine = self.pair.server
        for event in machine.receive_data(data, trio.current_time()):
            match event:
                case CallOpened():
                    self.calls[event.stream_id] = Call(machine, self.wire, event.stream_id, event.request, "")
                case MessageReceived():
                    self.calls[event.stream_id].put_message(event.payload)
                case HalfClosed():
                    self.calls[event.stream_id].put_end()
        assert not machine.closed
        self.wire.poke()

    async def send(self, call: Call, size: int, per_s: float) -> None:
        """So much of a message body, in pieces that come at this rate."""
        piece = max(1, min(1_000, int(per_s)))
        while size > 0:
            await trio.sleep(piece / per_s)
            self.feed(DataFrame(call.stream_id, b"x" * min(piece, size)).serialize())
            size -= piece

    async def take(self, call: Call, per_s: float) -> None:
        """Widens the windows at this rate, for ever."""
        piece = max(1, min(1_000, int(per_s)))
        while True:
            await trio.sleep(piece / per_s)
            step = struct.pack(">L", piece)
            self.feed(frame(8, 0, 0, step) + frame(8, 0, call.stream_id, step))

    async def reset_after(self, call: Call, seconds: float) -> None:
        """The peer gives the call up, and says nothing else."""
        await trio.sleep(seconds)
        self.feed(frame(3, 0, call.stream_id, b"\0\0\0\x08"))
        call.cancel(Reason.PEER)


@asynccontextmanager
async def rig(line: trio.abc.Stream | None = None) -> AsyncIterator[Rig]:
    pair = Pair()
    pair.server.data_to_send()
    ours, theirs = trio.testing.memory_stream_pair()
    wire = Wire(line or ours, pair.server, STALL_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.write_until, lambda: False)
        nursery.start_soon(_drain, theirs)
        yield Rig(pair, wire)
        nursery.cancel_scope.cancel()


async def _drain(stream: trio.abc.ReceiveStream) -> None:
    while await stream.receive_some():
        pass


async def _verdict(act: Callable[[], Awaitable[object]]) -> tuple[str | None, float]:
    """What became of it, and how long that took: not for ever."""
    begun, text = trio.current_time(), None
    try:
        with trio.fail_after(3_600):
            await act()
    except StatusError as exc:
        text = f"{exc.code.name} {exc.message}"
    return text, trio.current_time() - begun


def _prefix(size: int) -> bytes:
    return b"\0" + size.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("size", "per_s"), [(200_000, SLOWEST), (2_000, 1), (10, 0.1)], ids=["large", "small", "smallest"]
)
async def test_a_slow_request_is_read_to_its_end(size: int, per_s: float, autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r, trio.open_nursery() as nursery:
        call = r.open()
        r.feed(DataFrame(call.stream_id, _prefix(size)).serialize())
        nursery.start_soon(r.send, call, size, per_s)
        assert await call.receive() == b"x" * size


async def test_a_request_that_drips_is_given_up_once_it_holds_much(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r, trio.open_nursery() as nursery:
        call = r.open()
        r.feed(DataFrame(call.stream_id, _prefix(10_000_000)).serialize())
        for _ in range(7):
            r.feed(DataFrame(call.stream_id, b"x" * 10_000).serialize())
        nursery.start_soon(r.send, call, 10_000_000, 1)
        text, took_s = await _verdict(call.receive_only)
        assert (text, took_s) == ("UNAVAILABLE request stalled", STALL_S)
        nursery.cancel_scope.cancel()


async def test_requests_that_share_a_slow_line_are_read_to_their_ends(autojump_clock: trio.abc.Clock) -> None:
    """Each of them gets a tenth of what the line carries."""
    async with rig() as r, trio.open_nursery() as nursery:
        for _ in range(10):
            call = r.open()
            r.feed(DataFrame(call.stream_id, _prefix(150_000)).serialize())
            nursery.start_soon(r.send, call, 150_000, SLOWEST / 10)
            nursery.start_soon(_receive, call)


async def test_a_finished_call_is_over_when_its_peer_resets_it(autojump_clock: trio.abc.Clock) -> None:
    """Not when the peer would have had to have taken the answer."""
    async with rig() as r, trio.open_nursery() as nursery:
        call = r.open()
        call.begin()
        call.send_nowait(b"a" * 100_000)
        call.finish(Status(Code.OK))
        nursery.start_soon(r.reset_after, call, STALL_S / 3)
        _, took_s = await _verdict(call.part)
        assert took_s == STALL_S / 3


async def _receive(call: Call) -> None:
    assert await call.receive() == b"x" * 150_000


async def test_a_handler_that_waits_for_room_only_ends_with_its_stream() -> None:
    """The reset comes when the handler has been woken already, by room for what it sent before."""
    async with rig() as r:
        call = r.open()
        call.begin()
        with call.scope:
            r.feed(frame(3, 0, call.stream_id, b"\0\0\0\x08"))
            call.cancel(Reason.PEER)
            for _ in range(1_000):
                call.send_nowait(b"a")
                await call.wait_room()
        assert call.scope.cancelled_caught


@pytest.mark.parametrize(("waiting", "per_s"), [(200_000, SLOWEST), (2_000, 1)], ids=["much", "little"])
async def test_a_peer_that_takes_its_answer_slowly_gets_it(
    waiting: int, per_s: float, autojump_clock: trio.abc.Clock
) -> None:
    async with rig() as r, trio.open_nursery() as nursery:
        call = r.open()
        call.begin()
        call.send_nowait(b"a" * (65_535 - 5))  # the windows it has from the start
        call.send_nowait(b"a" * (waiting - 5))
        call.finish(Status(Code.OK))
        nursery.start_soon(r.take, call, per_s)
        text, took_s = await _verdict(lambda: call.wait_room(0))
        assert text is None
        assert took_s == pytest.approx(waiting / per_s, rel=0.1)
        nursery.cancel_scope.cancel()


async def test_an_answer_over_a_slow_line_is_sent_to_its_end_with_the_windows_wide_open(
    autojump_clock: trio.abc.Clock,
) -> None:
    """A quarter of a MiB is written at once, and takes minutes; nothing else of the answer moves meanwhile."""
    async with rig(Line(SLOWEST)) as r:  # type: ignore[arg-type]
        call = r.open()
        call.begin()
        step = struct.pack(">L", 2**20)
        r.feed(frame(8, 0, 0, step) + frame(8, 0, call.stream_id, step))
        call.send_nowait(b"a" * 1_000_000)
        call.finish(Status(Code.OK))
        text, took_s = await _verdict(lambda: call.wait_room(0))
        assert text is None
        assert took_s > 500


async def test_a_peer_that_lets_its_answer_drip_is_given_up(autojump_clock: trio.abc.Clock) -> None:
    async with rig() as r, trio.open_nursery() as nursery:
        call = r.open()
        call.begin()
        call.send_nowait(b"a" * 1_000_000)
        nursery.start_soon(r.take, call, 1)
        text, took_s = await _verdict(call.wait_room)
        assert text == "UNAVAILABLE response stalled"
        assert STALL_S <= took_s <= 2 * STALL_S
        nursery.cancel_scope.cancel()
