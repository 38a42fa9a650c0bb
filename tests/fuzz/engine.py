"""Runs a target on inputs for a while, in a process of its own, and watches what stays behind.

The process is what makes every ending an answer: an input that raises, one that never returns, one that takes the
memory and one that kills the interpreter all leave the same trace, namely the inputs that lie in memory shared with
the parent. The parent keeps them and then makes them as few and short as it can.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import frozen
from hypothesis import strategies as st

from tests.fuzz.inputs import inputs, packed, unpacked
from tests.fuzz.shorten import shortest

CORPUS = Path(__file__).parent / "corpus"
# For one input. The slowest fair one takes a tenth of a second of the processor; waiting costs a busy machine nothing.
CPU_S, LIMIT_S = 5.0, 30.0
SHORTEN_S, SHORTEN_SERIES_S = 90.0, 300.0
WARM, WARM_SERIES = 0.15, 5  # of the time, and so many series if half the time allows, before memory is first measured
WARM_INPUTS = 300  # where a series is one input: hypothesis has filled its caches then
# What may have come to stay: a little for caches and for freed memory that is given back late, 1 KiB an input at first.
GROWTH_MIB, GROWTH_OF_INPUTS_MIB = 8.0, 16.0
PEAK_MIB = 32.0  # what one input, or one series of them, may take for the moment
SPACE_BYTES = 2**32
_FORK = multiprocessing.get_context("fork")
HISTORY = 10  # series that are tried together when the last alone does not fail again
_SHARED_BYTES = 2**25


class Found(Exception):
    """An input broke a promise of its target; the text says which, and where the input is kept."""


class Target:
    """One reader of foreign bytes."""

    name = ""
    share = 1.0
    """Its part of the time, beside the others'."""
    series = 1
    """How many inputs may share a guilt: 1 where an input alone decides, more where a server remembers."""
    mutations = 3
    """Mutations for each input that was made with a structure."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Whatever has to run meanwhile."""
        if self.series == 1:
            # Everything happens in this process: what takes more than its share gets a MemoryError.
            resource.setrlimit(resource.RLIMIT_AS, (SPACE_BYTES, SPACE_BYTES))
        yield

    def made(self) -> st.SearchStrategy[bytes]:
        """Inputs with a structure."""
        return st.binary(max_size=400)

    def check(self, data: bytes) -> str:
        """Read `data`; raise anything when a promise is broken.

        Returns:
            How far it got: empty when no further than the first check.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """After each series: what it began has ended; raise when a promise is broken."""

    def pieces(self, data: bytes) -> list[bytes]:
        """An input in the parts that should be left out first when it is made shorter."""
        return [data]

    def vitals(self) -> dict[str, float]:
        """What must not grow, each by a name that ends in its unit; read before and after."""
        gc.collect()
        # Freed memory counts as well until the C library gives it back: 12 MiB after some thousand answers of 16 KiB,
        # with as many Python objects as before.
        with suppress(AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)
        return {"rss_mib": memory_mib("self", "VmRSS"), "peak_mib": memory_mib("self", "VmHWM")}

    def allowed(self, name: str, tried: int) -> float:
        """How much the vital `name` may have grown after so many inputs."""
        if name.endswith("peak_mib"):
            return PEAK_MIB
        return GROWTH_MIB + min(tried / 1_024, GROWTH_OF_INPUTS_MIB) if name.endswith("rss_mib") else 0.0

    def seeds(self) -> list[bytes]:
        """The committed inputs that others are made of. Found ones are no part, so a seed means the same for ever."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir()) if not _is_found(path)]

    def found(self) -> list[list[bytes]]:
        """The series that were found to be bad once."""
        paths = [path for path in sorted((CORPUS / self.name).iterdir()) if _is_found(path)]
        return [unpacked(path.read_bytes()) if self.series > 1 else [path.read_bytes()] for path in paths]

    def run(self, series: list[bytes]) -> list[str]:
        """Check inputs one after the other; how far each got."""
        reached = []
        for data in series:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                reached.append(self.check(data))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.setitimer(signal.ITIMER_PROF, 0)
            taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1_024
            assert taken < PEAK_MIB, f"one input took {taken:.0f} MiB"
        self.settle()
        return reached


@frozen
class Failure:
    kind: str
    """The same for two failures that are one and the same."""
    text: str


def _is_found(path: Path) -> bool:
    return path.name.startswith("found-")


def memory_mib(pid: int | str, field: str) -> float:
    """A figure of /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return round(int(text.split(f"{field}:")[1].split()[0]) / 1_024, 1)


def fuzz(target: Target, number: int, seconds: float) -> dict[str, Any]:
    """Run a target for so long on the inputs of the seed `number`; what it came to.

    Raises:
        Found: a promise was broken.
    """
    shared = mmap.mmap(-1, _SHARED_BYTES)
    result = _in_child(lambda: _work(target, number, seconds, shared))
    if not isinstance(result, Failure):
        assert isinstance(result, dict)
        return result
    tried, size, last = (int.from_bytes(shared.read(8), "big") for _ in range(3))
    latest = unpacked(shared.read(size))
    earlier, series = latest[: len(latest) - last], latest[len(latest) - last :]
    raise Found(f"seed {number}, after {tried} inputs: {kept(target, series, result, earlier)}")


def _work(target: Target, number: int, seconds: float, shared: mmap.mmap) -> dict[str, Any]:
    tried = 0
    slowest_s = 0.0
    reached: Counter[str] = Counter()
    latest: deque[list[bytes]] = deque(maxlen=HISTORY if target.series > 1 else 1)

    def run(series: list[bytes]) -> None:
        nonlocal tried, slowest_s
        latest.append(series)
        text = packed([data for one in latest for data in one])
        head = b"".join(number.to_bytes(8, "big") for number in (tried, len(text), len(series)))
        shared[: len(head) + len(text)] = head + text
        began = time.perf_counter()
        reached.update(target.run(series))
        tried += len(series)
        slowest_s = max(slowest_s, (time.perf_counter() - began) / len(series))

    source = inputs(target.seeds(), target.made(), number, target.mutations)
    with target.opened():
        for found in target.found():
            run(found)
        for series in _in_series(target.seeds(), target.series):
            run(series)
        began = time.monotonic()
        warming = WARM_INPUTS if target.series == 1 else WARM_SERIES * target.series
        reached.clear()  # the share is one of made inputs
        while (spent_s := time.monotonic() - began) < seconds * WARM or (warming > 0 and spent_s < seconds / 2):
            warming -= target.series
            run(list(itertools.islice(source, target.series)))
        before, warm = target.vitals(), tried
        run(list(itertools.islice(source, target.series)))  # at least, however busy the machine is
        while time.monotonic() - began < seconds:
            run(list(itertools.islice(source, target.series)))
        shared[8:24] = bytes(16)  # what has grown has no one input
        after = target.vitals()
        spent_s = time.monotonic() - began
    for name, value in after.items():
        grown = value - before[name]
        assert grown <= target.allowed(name, tried - warm), f"{name}: {before[name]:g} to {value:g}, {tried} inputs"
    past = max(1, sum(reached.values()))
    return {
        "inputs": tried,
        "seconds": round(spent_s, 1),
        "past_first_check": round(1 - reached.pop("", 0) / past, 3),
        "reached": {name: round(count / past, 3) for name, count in reached.most_common()},
        "slowest_ms": round(slowest_s * 1_000, 1),
        "before": before,
        "after": after,
    }


def _in_series(data: list[bytes], size: int) -> list[list[bytes]]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def kept(target: Target, series: list[bytes], failure: Failure, earlier: list[bytes] | None = None) -> str:
    """Keep what broke a promise, first as it was and then as short as it can be.

    Args:
        target: whose promise.
        series: the inputs it was given since the last moment of rest.
        failure: how that ended.
        earlier: what it was given before, which a database may remember for longer.

    Returns:
        Where it is, and what happened.
    """
    if not series:
        return failure.text
    data = _as_file(target, series)
    known = next((path for path in (CORPUS / target.name).iterdir() if path.read_bytes() == data), None)
    if known is not None:
        return f"an input of the corpus, {_place(known)}\n{failure.text}"
    path = keep(target, series)

    def fails(shorter: list[bytes]) -> bool:
        again = attempt(target, shorter)
        return again is not None and again.kind == failure.kind

    whole = (earlier or []) + series
    series = next((one for one in (series, whole) if fails(one)), [])
    if not series:
        return f"kept as {_place(path)}, yet it does not happen again on a fresh start\n{failure.text}"
    short = shortest(
        series, target.pieces, fails, time.monotonic() + (SHORTEN_S if target.series == 1 else SHORTEN_SERIES_S)
    )
    path.unlink()
    return f"kept as {_place(keep(target, short))}\n{failure.text}"


def attempt(target: Target, series: list[bytes]) -> Failure | None:
    """A series on a fresh start, in a process of its own; what went wrong."""

    def work() -> None:
        with target.opened():
            target.run(series)

    result = _in_child(work)
    return result if isinstance(result, Failure) else None


def keep(target: Target, series: list[bytes]) -> Path:
    """Put inputs into the corpus."""
    data = _as_file(target, series)
    path = CORPUS / target.name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def _as_file(target: Target, series: list[bytes]) -> bytes:
    return packed(series) if target.series > 1 else series[0]


def _place(path: Path) -> str:
    return str(path.relative_to(CORPUS.parents[2]))


def _in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own, or the Failure it ended by."""
    receiver, sender = _FORK.Pipe(duplex=False)
    with tempfile.TemporaryFile() as trace:
        process = _FORK.Process(target=_child, args=(work, sender, trace.fileno()))
        process.start()
        sender.close()
        try:
            kind, text = receiver.recv()
        except EOFError:
            kind, text = "", ""
        finally:
            process.join()
        if kind:
            return Failure(kind, text)
        if text:
            return json.loads(text)
        trace.seek(0)
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return Failure(how, f"ended by {how}\n{trace.read().decode(errors='replace')}")


def _child(work: Callable[[], Any], sender: Any, trace: int) -> None:
    # An input that runs out of time ends the process, whatever it is doing, and shows where; so does a crash.
    faulthandler.enable(trace)
    for number in (signal.SIGALRM, signal.SIGPROF):
        faulthandler.register(number, trace, all_threads=False, chain=True)
    try:
        sender.send(("", json.dumps(work())))
    except KeyboardInterrupt:
        os._exit(1)
    except BaseException as error:
        sender.send((_kind(error), "".join(traceback.format_exception(error))))


def _kind(error: BaseException) -> str:
    """The type of an exception and the line it comes from, which stay the same while its input gets shorter."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}"
