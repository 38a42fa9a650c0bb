"""All connections of a server share the event loop with everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio
import trio.testing

from pushd.errors import Code
from pushd.rpc.rounds import PIECE_BYTES, ROUND_BYTES, Rounds
from tests.rpc.harness import BIDI, eventually, framed, raw_client, serving
from tests.rpc.test_server import connections

# One turn of the loop may see a round for those in line and the next one for newcomers, two turns may lie between two
# looks, and the last piece of a round may go beyond it.
MOST_BYTES = 5 * ROUND_BYTES


@asynccontextmanager
async def running() -> AsyncIterator[Rounds]:
    async with trio.open_nursery() as nursery:
        rounds = Rounds()
        nursery.start_soon(rounds.run)
        yield rounds
        nursery.cancel_scope.cancel()


class Watch:
    """How much is done at most between two turns of another task."""

    def __init__(self) -> None:
        self.most = self.done = 0
        self._seen = 0

    async def run(self) -> None:
        while True:
            self.look()
            await trio.lowlevel.checkpoint()

    def look(self) -> None:
        self.most = max(self.most, self.done - self._seen)
        self._seen = self.done


async def test_others_have_a_turn_after_every_round() -> None:
    watch = Watch()

    async def work(name: int) -> None:
        for _ in range(50):
            await rounds.take(PIECE_BYTES)
            watch.done += PIECE_BYTES
            order.append(name)

    order: list[int] = []
    async with running() as rounds, trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        async with trio.open_nursery() as workers:
            for name in range(100):
                workers.start_soon(work, name)
        nursery.cancel_scope.cancel()
    assert watch.done == 100 * 50 * PIECE_BYTES
    assert watch.most <= MOST_BYTES
    for start in range(200, len(order), 100):  # and nobody has a second turn before everybody had one
        assert len(set(order[start : start + 100])) >= 90


async def test_small_pieces_do_not_wait() -> None:
    async with running() as rounds:
        with trio.testing.assert_no_checkpoints():
            for _ in range(ROUND_BYTES // 1_000):
                await rounds.take(1_000)


async def test_whoever_gives_up_in_the_line_holds_nobody_up() -> None:
    async with running() as rounds:
        await rounds.take(ROUND_BYTES)
        with trio.CancelScope() as scope:
            scope.cancel()
            await rounds.take(PIECE_BYTES)
        with trio.fail_after(10):
            for _ in range(10):
                await rounds.take(ROUND_BYTES)


async def test_many_busy_connections_leave_the_loop_to_others() -> None:
    """All of them have sent as much as their windows allow before the first byte of it is read."""
    watch = Watch()

    async def look() -> None:
        while True:
            watch.done = sum(one.machine.received for one in served)
            watch.look()
            await trio.lowlevel.checkpoint()

    with trio.fail_after(60):
        async with serving() as server, AsyncExitStack() as stack, trio.open_nursery() as nursery:
            clients = [await stack.enter_async_context(raw_client(server.port)) for _ in range(20)]
            for client in clients:
                assert (await client.call(framed(b"x"))).code == Code.OK
                stream_id = await client.open(b"\0\0\xff\0\0", end=False, p_path=BIDI)
                for _ in range(4):
                    client.h2.send_data(stream_id, b"x" * 15_000)
            served = connections()
            await eventually(lambda: all(one.calls == 1 for one in served))
            nursery.start_soon(look)
            for client in clients:
                nursery.start_soon(client.flush)
            await eventually(lambda: watch.done >= 20 * 60_000)
            nursery.cancel_scope.cancel()
    assert watch.most <= MOST_BYTES
