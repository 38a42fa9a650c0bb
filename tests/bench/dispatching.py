"""The whole dispatcher, from rows in PostgreSQL to fakes in other processes: shared by the dispatch benches.

The dispatcher, its pools and its channels run in this process, so `cpu_us_per_item` is what pushd costs a delivery;
PostgreSQL and the fakes are processes of their own. A provider answers after LATENCY_MS; 256 permits over that latency
are the bound of a channel.
"""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path

import psycopg
import trio
from attrs import define, frozen
from psycopg.conninfo import make_conninfo

from fakes.launch import RunningFake, launch
from pushd.channels.resolver import ThreadResolver
from pushd.channels.setup import open_channels
from pushd.config import Apns, Fcm, Http, Push
from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.model import Channel
from pushd.secret import Secret
from pushd.stop import StopSignal
from pushd.store import embedded
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.store.migrations import apply_migrations
from pushd.telemetry import Metrics
from tests.bench.measuring import PERMITS_BOUND, line, peak_rss_mib, permits_bound
from tests.dispatch.holder import NoBoundary
from tests.dispatch.seed import Seed, recipient_id, topic

FAKES = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
SUBSCRIBERS = 1_000
LATENCY_MS = 50
HOSTS = 64
TOPICS = {Channel.APNS: 1, Channel.FCM: 2, Channel.HTTP: 3}
STALLED_TOPIC = 4
LOOPBACK = (ip_address("127.0.0.1"),)


@frozen
class Measured:
    """One run: deliveries a second by channel, CPU of this process a delivery, its memory."""

    rates: Mapping[Channel, float]
    cpu_us: float
    rss_mib: float


@define
class Progress:
    """When a channel's first and last delivery was counted."""

    first_s: float = math.nan
    first_count: float = 0
    last_s: float = math.nan


@contextmanager
def installation(
    channels: Iterable[Channel], latency_ms: float = LATENCY_MS
) -> Iterator[tuple[str, dict[Channel, RunningFake]]]:
    """An empty database and the fakes of these channels: yields its URL and the fakes."""
    folder = Path(tempfile.mkdtemp(prefix="pushd-bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        server = embedded.start(folder)
        stack.callback(server.stop)
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("CREATE DATABASE bench")
        url = make_conninfo(server.url, dbname="bench")
        trio.run(_migrate, url)
        options = ["--latency-ms", str(latency_ms), "--record", "0"]
        fakes = {channel: stack.enter_context(launch(FAKES[channel], *options)) for channel in channels}
        yield url, fakes


async def _migrate(url: str) -> None:
    async with open_database(DatabaseSettings(url), Metrics()) as database, database.dedicated("migrate") as connection:
        await apply_migrations(connection)


def fill(url: str, fakes: Mapping[Channel, RunningFake], rows: Mapping[Channel, int], *, stalled: int = 0) -> None:
    """SUBSCRIBERS recipients a channel on a topic of their own, and `rows` envelopes on it, all settled, from row 1.

    Args:
        stalled: this many recipients on one webhook host that accepts and never answers.
    """
    with Seed(url) as seed:
        seed.conn.execute("TRUNCATE push_subscription, push_recipient, envelopes")
        seed.conn.execute("UPDATE push_cursor SET sequence_id = 0")
        seed.conn.execute("UPDATE allocation_boundary SET closed_sequence_id = 0")
        for channel in fakes:
            numbers = range(int(channel) * 10_000, int(channel) * 10_000 + SUBSCRIBERS)
            seed.recipients(numbers, channel)
            if channel is Channel.HTTP:
                port = fakes[channel].port
                seed.conn.cursor().executemany(
                    "UPDATE push_recipient SET delivery = %s WHERE recipient_id = %s",
                    [(f"https://{n % HOSTS}.hooks.invalid:{port}/hook/{n}", recipient_id(n)) for n in numbers],
                )
            seed.subscribe(numbers, topic(TOPICS[channel]))
        if stalled:
            numbers = range(90_000, 90_000 + stalled)
            seed.recipients(numbers, Channel.HTTP)
            url_text = f"https://stalled.hooks.invalid:{fakes[Channel.HTTP].port}/hook?stall=1"
            seed.conn.execute(
                "UPDATE push_recipient SET delivery = %s WHERE topic_count = 0 AND channel = 3 AND recipient_id >= %s",
                (url_text, recipient_id(90_000)),
            )
            seed.subscribe(numbers, topic(STALLED_TOPIC))
        turns = [channel for count in range(max(rows.values())) for channel in rows if count < rows[channel]]
        topics = ([topic(STALLED_TOPIC)] if stalled else []) + [topic(TOPICS[channel]) for channel in turns]
        seed.envelopes(enumerate(topics, start=1))
        seed.settle(len(topics))
        seed.conn.execute("VACUUM ANALYZE")


def push_config(fakes: Mapping[Channel, RunningFake]) -> Push:
    """A `[push]` section that reaches the fakes."""
    apns, fcm, http = (fakes.get(channel) for channel in Channel)
    return Push(
        apns=apns
        and Apns(
            key=Secret(Path(apns.facts["key"]).read_text()),
            key_id=apns.facts["key_id"],
            team_id=apns.facts["team_id"],
            bundle_id="org.example.app",
            environment="production",
            endpoint=apns.endpoint,
            ca_file=apns.ca,
        ),
        fcm=fcm
        and Fcm(
            service_account=Secret(Path(fcm.facts["service_account"]).read_text()),
            endpoint=fcm.endpoint,
            ca_file=fcm.ca,
        ),
        http=http and Http(allow_private_addresses=True, ca_file=http.ca),
    )


async def dispatch(url: str, fakes: Mapping[Channel, RunningFake], expected: Mapping[Channel, int]) -> Measured:
    """Dispatch until every channel delivered what is `expected` of it."""
    stop, metrics = StopSignal(), Metrics()
    counters: dict[Channel, Callable[[], float]] = {
        channel: metrics.push_deliveries.labels(channel.label, "delivered")._value.get for channel in expected
    }
    async with open_database(DatabaseSettings(url), metrics) as database:
        async with open_channels(push_config(fakes), ThreadResolver(lambda _host: LOOPBACK)) as senders:
            async with trio.open_nursery() as nursery:
                gc.collect()
                cpu = time.process_time()

                async def run() -> None:
                    await run_dispatcher(
                        DispatchStore(database),
                        senders,
                        DispatchSettings(max_attempts=1),
                        metrics=metrics,
                        boundary=NoBoundary(),
                        stop=stop,
                    )

                nursery.start_soon(run)
                with trio.fail_after(300):
                    progress = await _follow(counters, expected)
                cpu = time.process_time() - cpu
                stop.request(trio.current_time())
    return Measured(
        {
            channel: (expected[channel] - seen.first_count) / (seen.last_s - seen.first_s)
            for channel, seen in progress.items()
        },
        cpu / sum(expected.values()) * 1e6,
        peak_rss_mib(),
    )


async def _follow(
    counters: Mapping[Channel, Callable[[], float]], expected: Mapping[Channel, int]
) -> dict[Channel, Progress]:
    """Watch the counters. The span begins with the first deliveries seen, so that connecting is not in it."""
    progress = {channel: Progress() for channel in expected}
    while any(math.isnan(seen.last_s) for seen in progress.values()):
        await trio.sleep(0.005)
        now = time.perf_counter()
        for channel, seen in progress.items():
            count = counters[channel]()
            if count and math.isnan(seen.first_s):
                seen.first_s, seen.first_count = now, count
            if count >= expected[channel] and math.isnan(seen.last_s):
                seen.last_s = now
    return progress


def one_channel(name: str, channel: Channel, target: Mapping[str, float], deliveries: int = 20_000) -> None:
    """Dispatch `deliveries` over one channel and report."""
    rows = {channel: deliveries // SUBSCRIBERS}
    with installation(rows) as (url, fakes):
        fill(url, fakes, rows)
        measured = trio.run(dispatch, url, fakes, {channel: deliveries})
        print(
            line(
                name,
                rate=measured.rates[channel],
                bound=permits_bound(LATENCY_MS),
                bound_is=PERMITS_BOUND,
                cpu_us_per_item=measured.cpu_us,
                rss_mib=measured.rss_mib,
                target=target,
                fake=fakes[channel].stats(),
            )
        )
