"""Does one stalled webhook host slow the phones? APNs and FCM together, without and then with 2,000 deliveries for it.

`ratio_to_bound` is what the slower of the two keeps of the rate both reach without the stalled host; the target: 0.90.
More deliveries than these fill the retained bound, and then loading pauses for every channel by design.

Both phones together keep a core busy, so what the stalled host costs them is processor time: 256 TLS handshakes at the
start and again every ten seconds. The run is long enough for more than one such burst.
"""

from __future__ import annotations

import json

import trio

from pushd.model import Channel
from tests.bench.dispatching import SUBSCRIBERS, dispatch, fill, installation

ROWS = {Channel.APNS: 45, Channel.FCM: 45}
STALLED = 2_000


def main() -> None:
    expected = {channel: rows * SUBSCRIBERS for channel, rows in ROWS.items()}
    with installation({**ROWS, Channel.HTTP: 0}) as (url, fakes):
        phones = {channel: fakes[channel] for channel in ROWS}
        fill(url, phones, ROWS)
        alone = trio.run(dispatch, url, phones, expected)
        fill(url, fakes, ROWS, stalled=STALLED)
        beside = trio.run(dispatch, url, fakes, expected)
    kept = {channel.label: round(beside.rates[channel] / alone.rates[channel], 2) for channel in ROWS}
    print(
        json.dumps(
            {
                "name": "dispatch-mixed",
                "rate": round(sum(beside.rates.values())),
                "bound": round(sum(alone.rates.values())),
                "ratio_to_bound": min(kept.values()),
                "kept": kept,
                "cpu_us_per_item": round(beside.cpu_us, 1),
                "rss_mib": round(beside.rss_mib),
            }
        )
    )


if __name__ == "__main__":
    main()
