"""Tells, from inside an instance, what its interpreter holds: on SIGUSR1, into a file.

Python imports a module of this name by itself. `soak` puts this folder on PYTHONPATH of its instances, because seen
from outside memory is pages: a few hundred bytes kept for each recipient vanish among pages that are free in between.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import signal
import sys
import traceback
from collections import Counter
from typing import Any


class _Mallinfo(ctypes.Structure):
    """As malloc.h has it: ten sizes, of which two are read."""

    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


# Made once: each library object brings types of its own, and they would be counted.
_MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _MALLINFO is not None:
    _MALLINFO.restype = _Mallinfo


def forget_bounded() -> None:
    """Empty what holds up to a fixed number of things, so that what is left is not meant to be kept."""
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper):
            each.cache_clear()
        match _name(each):
            case "pushd.store.dispatch_pages.PageReader":
                each._configs.clear()
            case "pushd.ops.history.History":
                while len(each._readings) > 1:
                    each._readings.popleft()
            case "pushd.rpc.machine.http2.Http2":  # of a gRPC connection: the newest 4,096 streams
                each._closed_streams.clear()
            case (
                "pushd.channels.http2.engine.Wire"
            ):  # to a provider: the newest 128 requests, let go of at the next count
                each._until_count = 0
                each.open_outbound_streams  # noqa: B018
            case "trio._core._run.Deadlines":  # a thousand that were left long ago
                each._prune()


def measure() -> dict[str, Any]:
    """What is alive now that nothing forgotten is left.

    `blocks` counts pieces of memory that Python handed out, up to 512 bytes each; larger ones and what C libraries take
    is in `malloc_bytes`, 0 where the C library does not tell. `types` counts objects by type, of those which can hold
    others.
    """
    forget_bounded()
    gc.collect()
    blocks = sys.getallocatedblocks()
    types = Counter(map(_name, gc.get_objects()))
    return {"blocks": blocks, "malloc_bytes": _malloc_bytes(), "types": types}


def _name(each: object) -> str:
    return f"{type(each).__module__}.{type(each).__qualname__}"


def _malloc_bytes() -> int:
    if _MALLINFO is None:
        return 0
    told = _MALLINFO()
    return int(told.field7 + told.field4)  # in use: uordblks in arenas, hblkhd by pages


def install(folder: str) -> None:
    """Answer every SIGUSR1 with a file of this process's id, complete from the moment on at which it is there."""

    def asked(signum: int, frame: object) -> None:
        # Between two tasks where there are any: what is emptied may be in use anywhere else.
        trio = sys.modules.get("trio")
        try:
            assert trio is not None
            token = trio.lowlevel.current_trio_token()
        except (AssertionError, RuntimeError):
            answer()
        else:
            token.run_sync_soon(answer)

    def answer() -> None:
        path = os.path.join(folder, str(os.getpid()))
        try:
            told = measure()
        except Exception:  # raised here, it would end the instance
            told = {"error": traceback.format_exc()}
        with open(f"{path}.new", "w") as file:
            json.dump(told, file)
        os.replace(f"{path}.new", path)

    signal.signal(signal.SIGUSR1, asked)


if "PUSHD_SOAK_INSIDE" in os.environ:
    install(os.environ["PUSHD_SOAK_INSIDE"])
