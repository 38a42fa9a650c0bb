"""A stop has one deadline, and it only comes nearer."""

from __future__ import annotations

import math

import trio
import trio.testing

from pushd.stop import StopSignal


async def test_deadline_only_shrinks() -> None:
    stop = StopSignal()
    assert not stop.requested
    assert stop.deadline == math.inf
    stop.request(30)
    stop.request(40)
    assert stop.deadline == 30
    stop.request(10)
    assert stop.deadline == 10
    await stop.wait()


async def test_bound_scope_ends_at_a_deadline_set_or_shortened_later(autojump_clock: trio.testing.MockClock) -> None:
    stop = StopSignal()
    start = trio.current_time()

    async def shorten() -> None:
        await trio.sleep(1)
        stop.request(start + 30)
        await trio.sleep(1)
        stop.request(start + 5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shorten)
        with trio.CancelScope() as scope:
            stop.bound(scope)
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() - start == 5


async def test_released_scope_is_left_alone(autojump_clock: trio.testing.MockClock) -> None:
    stop = StopSignal()
    with trio.CancelScope() as scope:
        stop.bound(scope)
        stop.release(scope)
        stop.release(scope)
        stop.request(trio.current_time() + 1)
        await trio.sleep(2)
    assert not scope.cancelled_caught
