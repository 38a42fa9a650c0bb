"""Where inputs come from: the corpus, what a target's strategy makes, and mutations of both.

Hypothesis makes what has a structure (messages, frames, documents): strategies are short, shared with the ordinary
tests, and the same for the same seed. Everything else is `random.Random`: mutations work on bytes whatever made them,
and need no second description of a format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

_Made = TypeVar("_Made")
MADE = 50  # inputs a strategy is asked for at a time
MAX_BYTES = 65_536
_REUSED = 400  # made inputs that are still mutated
# Numbers that lengths, counts and flags are compared with.
_EDGES = [0, 1, 0x3F, 0x40, 0x7F, 0x80, 0xFF, 0x100, 0x3FFF, 0x4000, 0x7FFF, 0xFFFF, 2**24 - 1, 2**31 - 1, 2**32 - 1]


def inputs(seeds: list[bytes], strategy: st.SearchStrategy[bytes], number: int, mutations: int) -> Iterator[bytes]:
    """Endless inputs, the same for the same arguments: each one made is followed by so many mutations of any."""
    rng = random.Random(number)
    made: list[bytes] = []
    while True:
        fresh = _made(strategy, rng.getrandbits(32))
        made = (made + fresh)[-_REUSED:]
        for data in fresh:
            yield data[:MAX_BYTES]
            for _ in range(mutations):
                yield mutated(rng, seeds if rng.random() < 0.5 else made, seeds)


def mostly(fair: st.SearchStrategy[_Made], odd: st.SearchStrategy[_Made], times: int = 4) -> st.SearchStrategy[_Made]:
    """The one so many times as often as the other, whatever each is made of; `|` would take all parts alike."""
    return st.sampled_from([fair] * times + [odd]).flatmap(lambda chosen: chosen)


def documents(names: list[str], words: list[str]) -> st.SearchStrategy[Any]:
    """Whatever JSON can say, with these names and words here and there."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(words),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4),
        max_leaves=12,
    )


def as_json(value: Any) -> bytes:
    """A document; numbers near the largest become ones that are too large for any."""
    return json.dumps(value).replace("1e+308", "1e999").encode()


def _made(strategy: st.SearchStrategy[bytes], number: int) -> list[bytes]:
    """What a strategy makes of one seed, without running anything on it."""
    made: list[bytes] = []

    @seed(number)
    @settings(
        max_examples=MADE,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(data: bytes) -> None:
        made.append(data)

    collect()
    return made


def mutated(rng: random.Random, pool: list[bytes], others: list[bytes]) -> bytes:
    """One of the pool with a few changes; most of it stays as it was, or nothing would get past a first check."""
    data = rng.choice(pool)
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 2, 4))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 4, 12)))
        match rng.randrange(16):
            case 0:  # cut
                data = data[:start]
            case 1 | 2:  # take out
                data = data[:start] + data[end:]
            case 3 | 4:  # put in
                data = data[:start] + rng.randbytes(end - start) + data[start:]
            case 5 | 6:  # overwrite by a telling number
                width = rng.choice((1, 1, 1, 2, 4, 8))
                number = rng.choice(_EDGES) % 256**width
                data = data[:start] + number.to_bytes(width, "big") + data[start + width :]
            case 7 | 8 | 9:  # flip a bit
                if start < len(data):
                    flipped = data[start] ^ (1 << rng.randrange(8))
                    data = data[:start] + bytes([flipped]) + data[start + 1 :]
            case 10 | 11:  # overwrite by something that is there already, or in another one
                other = rng.choice((data, rng.choice(others))) or b"\0"
                at = rng.randrange(len(other))
                data = data[:start] + other[at : at + end - start] + data[end:]
            case 12 | 13:  # one digit, letter or mark for another
                data = data[:start] + bytes([rng.randrange(0x20, 0x7F)]) + data[start + 1 :]
            case 14:  # repeat
                data = data[:end] + data[start:end] * rng.choice((1, 2, 50)) + data[end:]
            case _:  # splice
                other = rng.choice(others)
                data = data[:start] + other[rng.randrange(len(other) + 1) :]
    return data[:MAX_BYTES]


def packed(parts: list[bytes]) -> bytes:
    """Several byte strings as one."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpacked(data: bytes) -> list[bytes]:
    """What `packed` put together; the last part may be cut short."""
    parts = []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        parts.append(data[4:end])
        data = data[end:]
    return parts
