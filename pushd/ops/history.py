"""The last 15 minutes of this instance, from its own counters read every ten seconds.

Counters only grow, so a reading kept is a reading that any later one can be subtracted from; nothing is summed up, and
the page and `/metrics` cannot disagree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from attrs import frozen
from prometheus_client import Counter, Gauge, Histogram

from pushd.telemetry import CHANNELS, Metrics

STEP_S = 10.0
STEPS = 90
SPAN_S = STEP_S * STEPS

Totals = Mapping[tuple[str, ...], float]
"""Values of a counter since the start of the process, by label values."""


@frozen
class Reading:
    """Counters at one moment of the monotonic clock."""

    at: float
    deliveries: Totals
    """By channel and outcome."""
    failures: Totals
    """By channel, kind and reason."""
    attempts: Mapping[str, tuple[tuple[float, float], ...]]
    """By channel: upper edge in seconds and attempts up to it, with rising edges."""


def totals(family: Counter | Gauge) -> dict[tuple[str, ...], float]:
    """The values of one metric by label values."""
    return {
        tuple(sample.labels.values()): sample.value
        for metric in family.collect()
        for sample in metric.samples
        if sample.name == metric.name or sample.name == f"{metric.name}_total"
    }


def value(family: Counter | Gauge) -> float:
    """The sum of one metric over all its labels."""
    return sum(totals(family).values())


def _buckets(family: Histogram) -> dict[str, tuple[tuple[float, float], ...]]:
    edges: dict[str, list[tuple[float, float]]] = {channel: [] for channel in CHANNELS}
    for metric in family.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                edges[sample.labels["channel"]].append((float(sample.labels["le"]), sample.value))
    return {channel: tuple(sorted(pairs)) for channel, pairs in edges.items()}


def read(metrics: Metrics, now: float) -> Reading:
    """The counters as they are."""
    return Reading(
        now,
        totals(metrics.push_deliveries),
        totals(metrics.push_attempt_failures),
        _buckets(metrics.push_attempt_seconds),
    )


class History:
    """Readings of the last 15 minutes, oldest first."""

    def __init__(self, first: Reading) -> None:
        self._readings = deque([first], maxlen=STEPS + 1)

    def add(self, reading: Reading) -> None:
        """Keep `reading`, which is later than all before it."""
        self._readings.append(reading)

    def until(self, current: Reading) -> Recent:
        """The last 15 minutes up to `current`, which is not kept."""
        readings = [reading for reading in self._readings if reading.at < current.at]
        readings = [reading for reading in readings if current.at - reading.at <= SPAN_S] or readings[-1:]
        return Recent((*readings, current))


@frozen
class Recent:
    """Readings one after the other, at least one."""

    readings: tuple[Reading, ...]

    @property
    def span_s(self) -> float:
        """How long a time they cover."""
        return self.readings[-1].at - self.readings[0].at

    def ended(self, channel: str, outcome: str) -> list[int]:
        """How many deliveries ended so between each reading and the next."""
        counts = [reading.deliveries.get((channel, outcome), 0.0) for reading in self.readings]
        return [int(after - before) for before, after in pairwise(counts)]

    def rate(self, channel: str, over_s: float = 60.0) -> float:
        """Deliveries with any outcome a second, over the last minute or as much of it as there is."""
        last = self.readings[-1]
        first = next((r for r in self.readings if last.at - r.at <= over_s), last)
        if last.at <= first.at:
            return 0.0
        ended = sum(
            count - first.deliveries.get(labels, 0.0)
            for labels, count in last.deliveries.items()
            if labels[0] == channel
        )
        return ended / (last.at - first.at)

    def failures(self) -> list[tuple[tuple[str, ...], int, float]]:
        """Failures seen in this time: labels, how many, and seconds since the last one; most frequent first."""
        first, last = self.readings[0], self.readings[-1]
        found = []
        for labels, count in last.failures.items():
            new = int(count - first.failures.get(labels, 0.0))
            if new:
                seen_at = next(r.at for r in self.readings if r.failures.get(labels, 0.0) == count)
                found.append((labels, new, last.at - seen_at))
        return sorted(found, key=lambda failure: (-failure[1], failure[0]))

    def answered_within_s(self, channel: str, share: float = 0.95) -> float | None:
        """The histogram's edge below which at least `share` of the attempts lay; infinite above all of them.

        None when no attempt was made.
        """
        before = dict(self.readings[0].attempts.get(channel, ()))
        grown = [(edge, count - before.get(edge, 0.0)) for edge, count in self.readings[-1].attempts.get(channel, ())]
        if not grown or not grown[-1][1]:
            return None
        return next((edge for edge, count in grown if count >= share * grown[-1][1]), math.inf)
