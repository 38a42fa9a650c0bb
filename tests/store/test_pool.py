"""The pool on virtual time, with sessions that are nothing but a socket."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from pushd.errors import StoreUnavailable
from pushd.store.pool import MAX_AGE_S, Pool

ACQUIRE_S = 5.0


class FakeSession:
    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.pgconn = SimpleNamespace(socket=self.ours.fileno())
        self.opened_at = trio.current_time()
        self.closed = False
        self.is_idle = True

    def close_now(self) -> None:
        self.closed = True
        self.is_idle = False
        self.ours.close()
        self.theirs.close()


class Server:
    """Makes sessions, and remembers them."""

    def __init__(self) -> None:
        self.made: list[FakeSession] = []
        self.fault: StoreUnavailable | None = None
        self.takes_s = 0.0

    async def open(self) -> Any:
        await trio.sleep(self.takes_s)
        if self.fault is not None:
            raise self.fault
        self.made.append(FakeSession())
        return self.made[-1]


@pytest.fixture
def server() -> Any:
    server = Server()
    yield server
    for session in server.made:
        session.close_now()


@pytest.fixture
def pool(server: Server) -> Pool:
    return Pool(server.open, 2, ACQUIRE_S)


async def test_session_given_back_is_lent_again_the_last_one_first(pool: Pool, server: Server) -> None:
    first, second = await pool.borrow(), await pool.borrow()
    pool.give_back(first)
    pool.give_back(second)
    assert await pool.borrow() is second
    assert await pool.borrow() is first
    assert len(server.made) == 2


async def test_borrower_waits_for_a_free_session(pool: Pool, server: Server, autojump_clock: Any) -> None:
    first = await pool.borrow()
    await pool.borrow()
    async with trio.open_nursery() as nursery:

        async def give_back_later() -> None:
            await trio.sleep(3)
            pool.give_back(first)

        nursery.start_soon(give_back_later)
        begun = trio.current_time()
        assert await pool.borrow() is first
        assert trio.current_time() - begun == 3
    assert len(server.made) == 2


async def test_borrower_gives_up_when_none_comes_free(pool: Pool, autojump_clock: Any) -> None:
    first = await pool.borrow()
    await pool.borrow()
    begun = trio.current_time()
    with pytest.raises(StoreUnavailable) as caught:
        await pool.borrow()
    assert (caught.value.kind, trio.current_time() - begun) == ("timeout", ACQUIRE_S)
    pool.give_back(first)
    assert await pool.borrow() is first


async def test_borrower_gives_up_on_a_server_that_takes_no_connection(
    pool: Pool, server: Server, autojump_clock: Any
) -> None:
    server.takes_s = 60
    for _ in range(3):  # more often than there are places: none is lost
        with pytest.raises(StoreUnavailable):
            await pool.borrow()
    server.takes_s = 0
    assert await pool.borrow()


async def test_failed_connection_takes_no_place(pool: Pool, server: Server) -> None:
    server.fault = StoreUnavailable()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await pool.borrow()
    server.fault = None
    assert await pool.borrow() is not await pool.borrow()


async def test_cancelled_borrower_takes_no_place(pool: Pool, server: Server, autojump_clock: Any) -> None:
    server.takes_s = 1
    for _ in range(3):
        with trio.move_on_after(0.5):
            await pool.borrow()
    server.takes_s = 0
    assert await pool.borrow() is not await pool.borrow()


async def test_broken_session_is_replaced(pool: Pool, server: Server) -> None:
    broken = await pool.borrow()
    broken.close_now()
    pool.give_back(broken)
    assert await pool.borrow() is not broken


async def test_session_that_still_runs_a_statement_is_not_lent_again(pool: Pool, server: Server) -> None:
    busy: Any = await pool.borrow()
    busy.is_idle = False
    pool.give_back(busy)
    assert busy.closed
    assert await pool.borrow() is server.made[1]


async def test_idle_session_that_the_server_ended_is_not_lent(pool: Pool, server: Server) -> None:
    ended: Any = await pool.borrow()
    pool.give_back(ended)
    ended.theirs.close()
    assert await pool.borrow() is server.made[1]
    assert ended.closed


async def test_old_session_is_closed_when_it_comes_back(pool: Pool, server: Server, autojump_clock: Any) -> None:
    old = await pool.borrow()
    await trio.sleep(MAX_AGE_S + 1)
    pool.give_back(old)
    assert old.closed
    assert await pool.borrow() is server.made[1]


async def test_closed_pool_lends_nothing_and_closes_what_comes_back(pool: Pool, server: Server) -> None:
    idle, lent = await pool.borrow(), await pool.borrow()
    pool.give_back(idle)
    pool.close()
    assert idle.closed
    assert not lent.closed
    pool.give_back(lent)
    assert lent.closed
    with pytest.raises(StoreUnavailable) as caught:
        await pool.borrow()
    assert caught.value.kind == "connection"
