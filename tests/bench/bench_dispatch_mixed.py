"""Does one stalled webhook host slow the phones? APNs and FCM together, without and then with 2,000 deliveries for it.

`kept_min` is what the slower of the two keeps of the rate it reaches without the stalled host, in the same run. More
deliveries than these fill the retained bound, and then loading pauses for every channel by design.

Both phones together keep a core busy, so what the stalled host costs them is processor time: 256 TLS handshakes at the
start and again every ten seconds. The run is long enough for more than one such burst.
"""

from __future__ import annotations

import trio

from pushd.model import Channel
from tests.bench.dispatching import LATENCY_MS, SUBSCRIBERS, dispatch, fill, installation
from tests.bench.measuring import PERMITS_BOUND, line, permits_bound

ROWS = {Channel.APNS: 45, Channel.FCM: 45}
STALLED = 2_000


def main() -> None:
    expected = {channel: rows * SUBSCRIBERS for channel, rows in ROWS.items()}
    with installation([*ROWS, Channel.HTTP]) as (url, fakes):
        phones = {channel: fakes[channel] for channel in ROWS}
        fill(url, phones, ROWS)
        alone = trio.run(dispatch, url, phones, expected)
        fill(url, fakes, ROWS, stalled=STALLED)
        beside = trio.run(dispatch, url, fakes, expected)
    kept = {channel.label: round(beside.rates[channel] / alone.rates[channel], 2) for channel in ROWS}
    bound = permits_bound(LATENCY_MS)
    print(
        line(
            "dispatch-mixed",
            rate=sum(beside.rates.values()),
            bound=bound and bound * len(ROWS),
            bound_is=f"{PERMITS_BOUND}, two channels",
            cpu_us_per_item=beside.cpu_us,
            rss_mib=beside.rss_mib,
            target={"kept_min": 0.90},
            kept_min=min(kept.values()),
            kept=kept,
            alone_rate=round(sum(alone.rates.values())),
            alone_cpu_us_per_item=round(alone.cpu_us, 1),
        )
    )


if __name__ == "__main__":
    main()
