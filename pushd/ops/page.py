"""The status page: one HTML text, readable without script, style or network.

Every number that `/metrics` also has stands in a `<data value>` with an id, so that a program can read it too.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from html import escape

from attrs import frozen

from pushd.model import IN_FLIGHT_PER_CHANNEL, RETAINED_DELIVERIES
from pushd.ops.history import STEPS, Recent
from pushd.ops.page_style import CSS
from pushd.ops.plot import bars
from pushd.ops.progress import lag_s
from pushd.store.operations import COUNTED_ROWS, DispatchStatus
from pushd.telemetry import CHANNELS, DELIVERY_OUTCOMES

REFRESH_S = 10
FOLLOWS = {
    "transient": "tried again",
    "gone": "tried again; deleted if it answers so each time",
    "rejected": "given up, recipient kept",
    "mismatch": "given up, recipient kept: the token is another app's or environment's",
    "terminal": "recipient deleted",
}
NAMES = {"apns": "APNs", "fcm": "FCM", "http": "HTTPS webhooks"}
SENT = ("delivered", "suppressed")
LOST = tuple(outcome for outcome in DELIVERY_OUTCOMES if outcome not in SENT)
CALM_LAG_S = 10.0  # a first attempt may take as long, and holds the cursor meanwhile


@frozen
class View:
    """What the page shows.

    Attributes:
        name: this instance, `host:pid`.
        is_ready: whether it takes calls.
        holds: whether it has the dispatcher lock.
        progress: None while the database does not answer.
        recent: its counters over the last 15 minutes.
        channels: labels of the channels that are configured.
        in_flight: attempts being made, by channel label.
        connections, streams: of gRPC clients.
        wall_s: now, in seconds since 1970.
    """

    name: str
    version: str
    uptime_s: float
    is_ready: bool
    holds: bool
    progress: DispatchStatus | None
    recent: Recent
    channels: frozenset[str]
    in_flight: dict[str, int]
    retained: int
    connections: int
    streams: int
    wall_s: float


def render(view: View, *, refreshes: bool) -> str:
    """The page; it reloads itself if `refreshes`."""
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if refreshes else ""
    pause = '<a href="/still">stop reloading</a>' if refreshes else f'<a href="/">reload every {REFRESH_S} s</a>'
    drawn_at = datetime.fromtimestamp(view.wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}
<title>pushd – {escape(view.name)}</title>
<style>{CSS}</style>
</head>
<body>
<main>
{_header(view)}
<section class="tiles">{_holder(view)}{_lag(view)}{_work(view)}{_edge(view)}</section>
<h2>Deliveries of this instance in the last {_duration(max(view.recent.span_s, 1.0))}</h2>
{_channels(view)}
<h2>Attempts that did not deliver</h2>
{_failures(view)}
<footer class="soft"><span>{drawn_at}</span>{pause}<a href="/metrics">metrics</a><a href="/healthz">alive?</a>\
<a href="/readyz">ready?</a></footer>
</main>
</body>
</html>
"""


def _header(view: View) -> str:
    ready = '<span class="pill good">ready</span>' if view.is_ready else '<span class="pill bad">not ready</span>'
    role = "dispatches" if view.holds else "stands by"
    facts = f"{escape(view.name)} · version {escape(view.version)} · up {_duration(view.uptime_s)}"
    return f'<header><h1>pushd</h1>{ready}<span class="pill">{role}</span><span class="soft">{facts}</span></header>'


def _tile(title: str, big: str, small: str, look: str = "") -> str:
    return f'<div class="tile"><h3 class="soft">{title}</h3><p class="big {look}">{big}</p><small>{small}</small></div>'


def _holder(view: View) -> str:
    if view.progress is None:
        return _tile("Holder of the dispatcher lock", "not known", "the database does not answer", "bad")
    if view.progress.holder is None:
        return _tile("Holder of the dispatcher lock", "nobody", "nothing is being pushed", "bad")
    who = "this instance" if view.holds else "another instance; its own page shows the deliveries"
    return _tile("Holder of the dispatcher lock", f'<span id="holder">{escape(view.progress.holder)}</span>', who)


def _lag(view: View) -> str:
    status = view.progress
    if status is None:
        return _tile("Lag of the cursor", "not known", "the database does not answer", "bad")
    seconds = lag_s(status)
    many = "at least " if status.waiting_rows >= COUNTED_ROWS else ""
    rows = f"{many}{_data('lag-rows', status.waiting_rows)} eligible envelopes above the cursor"
    skipped = f"; {_count(status.skipped_rows)} ever skipped by an operator" if status.skipped_rows else ""
    place = f"<br>cursor {_count(status.cursor)}, boundary {_count(status.closed_sequence_id)}"
    return _tile(
        "Lag of the cursor",
        f'<data id="lag-seconds" value="{seconds:.3f}">{_duration(seconds)}</data>',
        rows + skipped + place,
        "warn" if seconds > CALM_LAG_S else "",
    )


def _work(view: View) -> str:
    full = view.retained >= RETAINED_DELIVERIES * 0.9
    rate = sum(view.recent.rate(label) for label in CHANNELS)
    return _tile(
        "Throughput here",
        f"{_rate(rate)}/s",
        f"{_data('retained', view.retained)} of {_count(RETAINED_DELIVERIES)} deliveries wait for an attempt",
        "warn" if full else "",
    )


def _edge(view: View) -> str:
    return _tile(
        "Clients of this instance",
        f"{_data('connections', view.connections)} connected",
        f"{_data('streams', view.streams)} streams",
    )


def _channels(view: View) -> str:
    """A card for each channel that is configured, or that counted something all the same."""
    counted = {channel for (channel, _), count in view.recent.readings[-1].deliveries.items() if count}
    shown = [label for label in CHANNELS if label in view.channels or label in counted]
    others = ", ".join(NAMES[label] for label in CHANNELS if label not in view.channels)
    cards = "".join(_channel(view, label) for label in shown)
    return f'<section class="cards">{cards}</section>' + (
        f'<p class="soft">Not configured: {others}.</p>' if others else ""
    )


def _channel(view: View, label: str) -> str:
    recent, name = view.recent, NAMES[label]
    since_start = recent.readings[-1].deliveries
    lately = {outcome: recent.ended(label, outcome) for outcome in DELIVERY_OUTCOMES}
    sent, lost = ({outcome: lately[outcome] for outcome in group} for group in (SENT, LOST))
    most_sent, most_lost = (max(map(sum, zip(*group.values(), strict=True)), default=0) for group in (sent, lost))
    rows = "".join(
        f'<tr><th scope="row"><span class="key {outcome}">{outcome}</span></th>'
        f'<td class="number">{_nil(sum(lately[outcome]))}</td>'
        f'<td class="number">{_data(f"{label}-{outcome}", int(since_start.get((label, outcome), 0)))}</td></tr>'
        for outcome in DELIVERY_OUTCOMES
    )
    return f"""
<div class="card">
<div class="row"><h3>{name}</h3><small>{_data(f"{label}-in-flight", view.in_flight.get(label, 0))} of \
{IN_FLIGHT_PER_CHANNEL} in flight</small></div>
<div class="row"><p class="big">{_rate(recent.rate(label))}/s</p><small>{_answers(view, label)}</small></div>
<div class="sent">{bars(sent, slots=STEPS, height=68, label=f"{name}: delivered and suppressed, each 10 seconds")}</div>
<div class="axis"><span>delivered or suppressed, at most {_count(most_sent)} in 10 s</span><span>now</span></div>
<div class="lost">{bars(lost, slots=STEPS, height=30, label=f"{name}: not delivered, each 10 seconds")}</div>
<div class="axis"><span>not delivered, at most {_count(most_lost)} in 10 s</span><span>now</span></div>
<table class="outcomes">
<thead><tr><th>outcome</th><th class="number">lately</th><th class="number">since the start</th></tr></thead>
<tbody>{rows}</tbody></table>
</div>"""


def _answers(view: View, label: str) -> str:
    within_s = view.recent.answered_within_s(label)
    if within_s is None:
        return "no attempts"
    if math.isinf(within_s):
        return "over 5 % of attempts out of time"
    return f"95 % of attempts within {_duration(within_s)}"


def _failures(view: View) -> str:
    failures = view.recent.failures()
    if not failures:
        return '<div class="card"><p class="soft">None in this time.</p></div>'
    rows = "".join(
        f"<tr><td>{NAMES[channel]}</td><td>{escape(reason)}</td><td>{kind}: {FOLLOWS[kind]}</td>"
        f'<td class="number">{_count(count)}</td><td class="number">{_ago(ago_s)}</td></tr>'
        for (channel, kind, reason), count, ago_s in failures
    )
    return (
        '<div class="card wide"><table id="failures"><thead><tr><th>channel</th><th>reason</th><th>what follows</th>'
        f'<th class="number">attempts</th><th class="number">last</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _data(name: str, number: int) -> str:
    return f'<data id="{name}" value="{number}">{_nil(number)}</data>'


def _nil(number: int) -> str:
    return _count(number) if number else '<span class="nil">0</span>'


def _count(number: int) -> str:
    return f"{number:,}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 or not per_s else f"{per_s:.1f}"


def _ago(seconds: float) -> str:
    return "just now" if seconds < 20 else f"{_duration(seconds)} ago"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1_000:.0f} ms" if seconds else "0 s"
    if seconds < 120:
        return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
