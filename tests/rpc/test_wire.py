"""The writing half of a connection, on virtual time: a peer that takes little, and one that takes nothing."""

from __future__ import annotations

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from pushd.rpc.machine import INSTALMENT
from pushd.rpc.wire import Wire

STALL_S = 30.0


@define
class Output:
    """Stands in for the machine: some output, once."""

    waiting: bytes

    def data_to_send(self) -> bytes:
        data, self.waiting = self.waiting, b""
        return data


@define
class Line:
    """A peer that takes so many bytes a second."""

    rate: float
    taken: list[bytes] = field(factory=list)

    async def send_all(self, data: bytes) -> None:
        await trio.sleep(len(data) / self.rate)
        self.taken.append(data)


async def written(data: bytes, rate: float) -> bytes:
    line = Line(rate)
    await Wire(line, Output(data), STALL_S).write_until(lambda: True)  # type: ignore[arg-type]
    return b"".join(line.taken)


async def test_a_slow_line_gets_a_large_answer(autojump_clock: MockClock) -> None:
    data = bytes(range(256)) * 1_024
    assert await written(data, 1.01 * INSTALMENT / STALL_S) == data
    assert trio.current_time() > 7 * STALL_S


async def test_a_line_below_the_least_rate_is_given_up(autojump_clock: MockClock) -> None:
    with pytest.raises(trio.BrokenResourceError):
        await written(bytes(10 * INSTALMENT), 0.99 * INSTALMENT / STALL_S)


async def test_a_small_write_may_take_as_long_as_a_stall(autojump_clock: MockClock) -> None:
    assert await written(b"x" * 100, 100 / (STALL_S - 1)) == b"x" * 100
