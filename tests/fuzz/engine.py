"""Makes inputs from a corpus, runs a target on them for a while, and watches what stays behind."""

from __future__ import annotations

import gc
import hashlib
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
BATCH = 100  # inputs between two looks at the clock
GROWTH_MIB = 48.0  # what a process may keep: hypothesis keeps a little, and freed memory is given back late
# Numbers that lengths, counts and flags are compared with.
_EDGES = [0, 1, 0x3F, 0x40, 0x7F, 0x80, 0xFF, 0x100, 0x3FFF, 0x4000, 0x7FFF, 0xFFFF, 2**24 - 1, 2**31 - 1, 2**32 - 1]


class Found(Exception):
    """An input broke a promise of its target; the text says which and where it is kept."""


class Target:
    """One reader of foreign bytes."""

    name = ""
    share = 1.0
    """Its part of the time, beside the others'."""
    is_repeatable = True
    """Whether an input alone decides: false where a server remembers what came before."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Whatever has to run meanwhile."""
        yield

    def inputs(self) -> st.SearchStrategy[bytes]:
        """Further inputs, beside mutations of the corpus."""
        return st.binary(max_size=400)

    def check(self, data: bytes) -> None:
        """Read `data`; raise anything when a promise is broken."""
        raise NotImplementedError

    def vitals(self) -> dict[str, float]:
        """What must not grow, each by a name that ends in its unit; read before and after."""
        gc.collect()
        return {"rss_mib": rss_mib("self")}

    def allowed(self, name: str) -> float:
        """How much the vital `name` may have grown by the end."""
        return GROWTH_MIB if name.endswith("rss_mib") else 0.0

    def corpus(self) -> list[bytes]:
        """The committed inputs, those found to be bad once among them."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


def rss_mib(pid: int | str) -> float:
    """Resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return round(int(text.split("VmRSS:")[1].split()[0]) / 1_024, 1)


@st.composite
def mutated(draw: st.DrawFn, corpus: list[bytes]) -> bytes:
    """One of the corpus with a few mutations that keep most of it as it was."""
    data = draw(st.sampled_from(corpus))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        match draw(st.integers(0, 6)):
            case 0:  # cut
                data = data[:start]
            case 1:  # take out
                data = data[:start] + data[end:]
            case 2:  # put in
                data = data[:start] + draw(st.binary(max_size=12)) + data[start:]
            case 3:  # overwrite by a telling number
                width = draw(st.sampled_from([1, 2, 3, 4, 8]))
                number = draw(st.sampled_from(_EDGES)) % 256**width
                data = data[:start] + number.to_bytes(width, "big") + data[start + width :]
            case 4:  # flip a bit
                if start < len(data):
                    flipped = data[start] ^ (1 << draw(st.integers(0, 7)))
                    data = data[:start] + bytes([flipped]) + data[start + 1 :]
            case 5:  # repeat
                data = data[:end] + data[start:end] * draw(st.sampled_from([1, 2, 50])) + data[end:]
            case _:  # splice
                other = draw(st.sampled_from(corpus))
                data = data[:start] + other[draw(st.integers(0, len(other))) :]
    return data


def fuzz(target: Target, first_seed: int, seconds: float) -> dict[str, Any]:
    """Run a target for so long; what it came to.

    Raises:
        Found: a promise was broken.
    """
    corpus = target.corpus()
    strategy = st.one_of(mutated(corpus), mutated(corpus), target.inputs())
    inputs = 0
    with target.opened():
        for data in corpus * 2:  # twice, so that what is made at first use is there when we begin to watch
            target.check(data)
        _batch(target, strategy, first_seed)
        before = target.vitals()
        began = time.monotonic()
        number = first_seed + 1
        while time.monotonic() - began < seconds:
            inputs += _batch(target, strategy, number)
            number += 1
        after = target.vitals()
    for name, value in after.items():
        if value > before[name] + target.allowed(name):
            raise Found(f"{name} grew from {before[name]:g} to {value:g} in {inputs} inputs")
    return {"inputs": inputs, "seconds": round(time.monotonic() - began, 1), "before": before, "after": after}


def _batch(target: Target, strategy: st.SearchStrategy[bytes], number: int) -> int:
    """BATCH inputs; how many were tried."""
    tried = 0
    smallest = b""

    @seed(number)
    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(data: bytes) -> None:
        nonlocal tried, smallest
        tried += 1
        smallest = data
        target.check(data)

    try:
        run()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        place = keep(target, _shortened(target, smallest) if target.is_repeatable else smallest)
        raise Found(f"seed {number}, input kept as {place}\n{''.join(traceback.format_exception(error))}") from error
    return tried


def _shortened(target: Target, data: bytes) -> bytes:
    """The input without whatever can be left out; hypothesis shrinks the choices that made it, not its bytes."""
    size = len(data)
    while size:
        size //= 2
        start = 0
        while start < len(data) and size:
            shorter = data[:start] + data[start + size :]
            try:
                target.check(shorter)
                start += size
            except BaseException:
                data = shorter
    return data


def keep(target: Target, data: bytes) -> str:
    """Put an input into the corpus; its place, from the root of the repository."""
    path = CORPUS / target.name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return str(path.relative_to(CORPUS.parents[2]))
