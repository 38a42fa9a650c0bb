"""Fifteen minutes of counters, and what the page makes of them."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from attrs import evolve

from pushd.ops.history import SPAN_S, STEP_S, STEPS, History, Reading, Recent, read, totals
from pushd.ops.page import View, render
from pushd.ops.plot import BAR, bars
from pushd.store.operations import COUNTED_ROWS, DispatchStatus
from pushd.telemetry import Metrics


def reading(at: float, delivered: float = 0, failures: dict[tuple[str, ...], float] | None = None) -> Reading:
    return Reading(at, {("apns", "delivered"): delivered, ("fcm", "delivered"): 1_000}, failures or {}, {})


def test_counts_between_readings_are_differences_and_the_current_one_is_not_kept() -> None:
    history = History(reading(0, 5))
    history.add(reading(10, 7))
    for _ in range(2):
        recent = history.until(reading(13, 10))
        assert recent.ended("apns", "delivered") == [2, 3]
        assert recent.ended("fcm", "delivered") == [0, 0]
        assert recent.ended("http", "dead") == [0, 0]
        assert recent.span_s == 13


def test_only_a_quarter_of_an_hour_is_kept() -> None:
    history = History(reading(0, 0))
    for step in range(1, 1_000):
        history.add(reading(step * STEP_S, step))
    recent = history.until(reading(9_993, 999))
    assert recent.span_s <= SPAN_S
    assert len(recent.readings) == STEPS + 1
    assert sum(recent.ended("apns", "delivered")) == 999 - recent.readings[0].deliveries["apns", "delivered"]


def test_after_a_long_stall_the_last_reading_is_the_base() -> None:
    history = History(reading(0, 1))
    history.add(reading(10, 2))
    assert history.until(reading(5_000, 9)).ended("apns", "delivered") == [7]


@pytest.mark.parametrize(
    ("times", "rate"),
    [
        ([(0, 0)], 0.0),
        ([(0, 0), (10, 50)], 5.0),
        ([(0, 0), (100, 50), (160, 170)], 2.0),  # the last minute alone
        ([(0, 100), (60, 100)], 0.0),
    ],
)
def test_rate_is_over_the_last_minute_or_what_there_is_of_it(times: list[tuple[float, float]], rate: float) -> None:
    assert Recent(tuple(reading(at, count) for at, count in times)).rate("apns") == rate


def test_failures_are_those_of_this_time_with_the_moment_of_the_last() -> None:
    old, new, newest = ("apns", "rejected", "BadTopic"), ("http", "transient", "timeout"), ("fcm", "transient", "quota")
    recent = Recent(
        (
            reading(0, failures={old: 9}),
            reading(10, failures={old: 9, new: 2}),
            reading(20, failures={old: 9, new: 7}),
            reading(30, failures={old: 9, new: 7, newest: 7}),
        )
    )
    assert recent.failures() == [(newest, 7, 0), (new, 7, 10)]


@pytest.mark.parametrize(
    ("before", "after", "within_s"),
    [
        ([0, 0, 0], [0, 0, 0], None),
        ([5, 5, 5], [5, 5, 5], None),
        ([0, 0, 0], [95, 100, 100], 0.1),
        ([0, 0, 0], [94, 100, 100], 1.0),
        ([0, 0, 0], [0, 94, 100], math.inf),
        ([50, 50, 50], [50, 150, 150], 1.0),  # what was before does not count
    ],
)
def test_time_of_most_attempts_is_an_edge_of_the_histogram(
    before: list[float], after: list[float], within_s: float | None
) -> None:
    edges = (0.1, 1.0, math.inf)
    first, last = (
        Reading(at, {}, {}, {"apns": tuple(zip(edges, counts, strict=True))})
        for at, counts in ((0, before), (9, after))
    )
    assert Recent((first, last)).answered_within_s("apns") == within_s


def test_a_reading_holds_what_the_metrics_show(metrics: Metrics) -> None:
    metrics.push_deliveries.labels("http", "dead").inc(3)
    metrics.push_attempt_failures.labels("http", "gone", "status_404").inc(4)
    metrics.push_attempt_seconds.labels("http").observe(0.2)
    found = read(metrics, 1.0)
    assert found.deliveries["http", "dead"] == 3
    assert found.failures == {("http", "gone", "status_404"): 4}
    assert [edge for edge, count in found.attempts["http"] if count] == [0.25, 0.5, 1, 2.5, 5, 10, math.inf]
    assert totals(metrics.push_dispatcher) == {(): 0}


def rectangles(svg: str) -> dict[str, list[tuple[float, ...]]]:
    """(left, top, height) of each bar by class."""
    found = {}
    for path in ElementTree.fromstring(svg):
        steps = re.findall(r"M([\d.]+) ([\d.]+)h[\d.]+v([\d.]+)h", path.get("d", ""))
        if steps:
            found[path.get("class", "")] = [tuple(map(float, step)) for step in steps]
    return found


def test_bars_are_stacked_from_the_ground_and_end_at_the_right() -> None:
    svg = bars({"good": [0, 6, 2], "bad": [0, 4, 0]}, slots=5, height=100, label="a & b")
    assert rectangles(svg) == {"good": [(3 * BAR, 40, 60), (4 * BAR, 80, 20)], "bad": [(3 * BAR, 0, 40)]}
    assert ElementTree.fromstring(svg).get("aria-label") == "a & b"


def test_one_among_very_many_is_still_drawn_and_nothing_leaves_the_drawing() -> None:
    drawn = rectangles(bars({"good": [100_000, 1], "bad": [1, 0]}, slots=2, height=30, label=""))
    assert all(tall >= 1 and top >= 0 for steps in drawn.values() for _, top, tall in steps)
    assert len(drawn["bad"]) == 1


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_nothing_is_an_empty_drawing(counts: list[int]) -> None:
    assert rectangles(bars({"good": counts}, slots=3, height=30, label="")) == {}


def test_older_counts_than_there_are_places_are_left_out() -> None:
    assert rectangles(bars({"good": [9, 1, 1]}, slots=2, height=10, label="")) == {"good": [(0, 0, 10), (BAR, 0, 10)]}


STATUS = DispatchStatus(1_200, 1_300, 1_310, "push-1:77", 60, 10_000_000_000, 12_500_000_000, None, 0)
VIEW = View(
    name="push-1:77",
    version="0.1.0",
    uptime_s=4_000.0,
    is_ready=True,
    holds=True,
    progress=STATUS,
    recent=Recent((reading(0), reading(10, 1_234))),
    channels=frozenset({"apns"}),
    in_flight={"apns": 7},
    retained=9,
    connections=3,
    streams=2,
    wall_s=1_800_000_000.0,
)


def numbers(page: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r'<data id="([^"]+)" value="([^"]+)"', page)}


def words(page: str) -> str:
    """What is left of a page without its tags."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_the_page_needs_nothing_but_itself() -> None:
    page = render(VIEW, refreshes=True)
    assert not re.search(r"<(script|link|img|iframe|object|embed|form)\b|url\(|@import|https?://", page)
    assert re.findall(r'href="([^"]*)"', page) == ["/still", "/metrics", "/healthz", "/readyz"]


def test_numbers_are_in_the_text_and_in_the_markup() -> None:
    page = render(VIEW, refreshes=True)
    found = numbers(page)
    assert found["apns-delivered"] == 1_234
    assert found["fcm-delivered"] == 1_000  # counted before its channel was taken out of the configuration
    assert (found["lag-seconds"], found["lag-rows"]) == (2.5, 60)
    assert (found["retained"], found["apns-in-flight"]) == (9, 7)
    assert (found["connections"], found["streams"]) == (3, 2)
    text = words(page)
    for part in ("push-1:77", "this instance", "2.5 s", "60 eligible", "1,234", "123/s", "Not configured: FCM, HTTPS"):
        assert part in text, part


def test_only_the_page_that_says_so_reloads() -> None:
    assert 'http-equiv="refresh" content="10"' in render(VIEW, refreshes=True)
    assert "http-equiv" not in render(VIEW, refreshes=False)


@pytest.mark.parametrize(
    ("changes", "expected", "look"),
    [
        ({"progress": None}, "not known the database does not answer", "bad"),
        ({"progress": evolve(STATUS, holder=None), "holds": False}, "nobody nothing is being pushed", "bad"),
        ({"holds": False}, "another instance; its own page shows the deliveries", None),
        ({"is_ready": False}, "not ready", "bad"),
        ({"progress": evolve(STATUS, now_ns=610_000_000_000)}, "10 min", "warn"),
        ({"progress": evolve(STATUS, waiting_rows=COUNTED_ROWS)}, "at least 100,000", None),
        ({"progress": evolve(STATUS, waiting_rows=0, oldest_waiting_ns=None)}, "0 s", None),
        ({"progress": evolve(STATUS, skipped_rows=5)}, "5 ever skipped by an operator", None),
        ({"retained": 10_000}, "10,000 of 10,000 deliveries wait", "warn"),
    ],
)
def test_trouble_is_said_and_marked(changes: dict[str, Any], expected: str, look: str | None) -> None:
    page = render(evolve(VIEW, **changes), refreshes=True)
    assert expected in words(page)
    marks = set(re.findall(r'class="(?:big|pill) (bad|warn)"', page))
    assert marks == ({look} if look else set())


def test_failures_say_what_follows() -> None:
    failures = {("apns", "mismatch", "BadDeviceToken"): 3.0, ("http", "gone", "status_410"): 1.0}
    recent = Recent((reading(0), reading(200, failures=failures), reading(500, failures=failures)))
    text = words(render(evolve(VIEW, recent=recent), refreshes=True))
    assert "APNs BadDeviceToken mismatch: given up, recipient kept" in text
    assert "3 5 min ago" in text
    assert text.index("BadDeviceToken") < text.index("status_410")


def test_a_name_from_elsewhere_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    page = render(evolve(VIEW, name=evil, progress=evolve(STATUS, holder=evil)), refreshes=True)
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 3
