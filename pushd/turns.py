"""Long computations that let other tasks run in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import trio

TURN_S = 0.005  # others get a turn after this long

_T = TypeVar("_T")


async def in_turns(items: Iterable[_T]) -> list[_T]:
    """All of `items`, which do their work as they are asked for.

    A request of the largest size holds enough small parts to keep a processor busy for many seconds, which must not
    stall everybody else.
    """
    done = []
    turn_ends = trio.current_time() + TURN_S
    for item in items:
        done.append(item)
        if trio.current_time() >= turn_ends:
            await trio.lowlevel.checkpoint()
            turn_ends = trio.current_time() + TURN_S
    return done
