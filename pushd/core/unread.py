"""Which ids a reader of the whole sequence has not seen yet, and may still see.

Ids are handed out before their transactions commit, so a reader meets gaps: an id whose transaction is still open, or
came to nothing. Every gap is asked for again until it fills up, or until the closed allocation boundary covers it,
which proves that it never will. Within one topic no gap can ever fill behind a later envelope, because publishers of a
topic take turns; reading gaps first and in ascending order therefore keeps every topic ascending.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from pushd.model import MAX_SEQUENCE_ID


@frozen
class Unread:
    """Ids still to be seen: the `gaps`, ascending and apart, and everything above `passed`.

    Bounds of gaps are inclusive. All gaps lie at or below `passed`.
    """

    passed: int
    gaps: tuple[tuple[int, int], ...] = ()

    def __repr__(self) -> str:
        return f"<Unread passed={self.passed} gaps={len(self.gaps)}>"

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """What to ask for, ascending; the last range is the open end."""
        return (*self.gaps, (self.passed + 1, MAX_SEQUENCE_ID))

    def after(self, seen: Sequence[int], boundary: int, *, is_complete: bool) -> Unread:
        """What is left once `seen` was read from `ranges`.

        Args:
            seen: ids found, ascending.
            boundary: the closed boundary as the same snapshot showed it.
            is_complete: whether the ranges were read to their end; else nothing is known above the last id of `seen`.
        """
        if not is_complete and not seen:
            return self
        probed = MAX_SEQUENCE_ID if is_complete else seen[-1]
        passed = max(self.passed, seen[-1] if seen else 0, boundary if is_complete else 0)
        gaps: list[tuple[int, int]] = []
        at = 0
        for low, high in (*self.gaps, *_range(self.passed + 1, passed)):
            last = min(high, probed)
            start = max(low, boundary + 1)
            while at < len(seen) and seen[at] <= last:
                gaps += _range(start, seen[at] - 1)
                start = max(start, seen[at] + 1)
                at += 1
            gaps += _range(start, last)
            gaps += _range(max(low, last + 1), high)
        return Unread(passed, tuple(gaps))


def _range(low: int, high: int) -> list[tuple[int, int]]:
    return [(low, high)] if low <= high else []


def rows_within(sizes: Sequence[tuple[int, int]], wanted: Collection[int], max_bytes: int) -> int:
    """How many of the rows, from the first on, can be taken without loading more than `max_bytes` of payload.

    At least one, so that a large envelope does not stop everything.

    Args:
        sizes: (id, payload bytes) of the rows, ascending.
        wanted: ids whose payloads are going to be loaded; the others cost nothing.
    """
    total = 0
    for count, (sequence_id, size) in enumerate(sizes):
        total += size if sequence_id in wanted else 0
        if total > max_bytes and count:
            return count
    return len(sizes)
