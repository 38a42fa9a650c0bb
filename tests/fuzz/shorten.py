"""Makes inputs that break a promise as few and as short as they can be, by leaving things out."""

from __future__ import annotations

import time
from collections.abc import Callable

Fails = Callable[[list[bytes]], bool]


def shortest(series: list[bytes], pieces: Callable[[bytes], list[bytes]], fails: Fails, deadline: float) -> list[bytes]:
    """A part of `series` that still fails; if that is one input, then a part of that one, first by its pieces.

    Args:
        series: inputs that fail together.
        pieces: cuts an input at the borders of whatever it is made of.
        fails: whether other inputs fail in the same way.
        deadline: when to be content with what there is, by the monotonic clock.
    """
    if len(series) > 1:
        series = series[-1:] if fails(series[-1:]) else _fewest(series, fails, deadline)
    if len(series) == 1:
        for parts in (pieces(series[0]), None):
            cut = [bytes([byte]) for byte in series[0]] if parts is None else parts
            series = [b"".join(_fewest(cut, lambda parts: fails([b"".join(parts)]), deadline))]
    return series


def _fewest(parts: list[bytes], fails: Fails, deadline: float) -> list[bytes]:
    size = max(1, len(parts) // 2)
    while size:
        start = 0
        while start < len(parts):
            if time.monotonic() > deadline:
                return parts
            fewer = [*parts[:start], *parts[start + size :]]
            if fails(fewer):
                parts = fewer
            else:
                start += size
        size //= 2
    return parts
