"""pushd and npm's @parse/node-apn against one fake APNs in one run, taking turns.

pushd twice: the whole dispatcher with its rows in PostgreSQL, which is the line's `rate`, and the bare sender without
either, which does what node-apn does. Processor time of the dispatcher includes starting and connecting; the other two
are warm.

Needs Node and npm; the package is installed into a temporary folder outside the repository once. Where that is not
possible the benchmark says so and ends well. Run with `python -m tests.bench.bench_peers`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from fakes.launch import RunningFake
from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel
from tests.bench.bench_providers import measure
from tests.bench.dispatching import SUBSCRIBERS, dispatch, fill, installation
from tests.bench.measuring import PERMITS_BOUND, cpu_s, line, peak_rss_mib, permits_bound

PACKAGE = "@parse/node-apn@8.1.0"
SENDER = Path(__file__).with_name("node_apn_sender.js")


def install() -> Path | str:
    """The folder of the package, or why there is none."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        return "Node is not installed"
    folder = Path(tempfile.gettempdir()) / "pushd-bench-node-apn"
    package = folder / "node_modules" / "@parse" / "node-apn"
    if not package.exists():
        folder.mkdir(exist_ok=True)
        command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE]
        done = subprocess.run(command, capture_output=True, cwd=folder, timeout=300)
        if done.returncode != 0:
            return f"{PACKAGE} cannot be installed"
    return package


def node_run(package: Path, fake: RunningFake, count: int) -> tuple[float, float]:
    """Seconds and CPU seconds of node-apn for `count` sends."""
    options: dict[str, Any] = {
        "package": str(package),
        "key": fake.facts["key"],
        "key_id": fake.facts["key_id"],
        "team_id": fake.facts["team_id"],
        "ca": fake.facts["ca"],
        "port": fake.port,
        "sends": count,
        "in_flight": IN_FLIGHT_PER_CHANNEL,
    }
    done = subprocess.run(["node", str(SENDER), json.dumps(options)], capture_output=True, check=True, timeout=300)
    result = json.loads(done.stdout)
    return result["seconds"], result["cpu_s"]


def dispatcher_run(url: str, fake: RunningFake, count: int) -> tuple[float, float]:
    """Seconds and CPU seconds of the whole dispatcher for `count` deliveries, which lie in PostgreSQL beforehand."""
    fakes, rows = {Channel.APNS: fake}, {Channel.APNS: count // SUBSCRIBERS}
    fill(url, fakes, rows)
    measured = trio.run(dispatch, url, fakes, {Channel.APNS: count})
    return count / measured.rates[Channel.APNS], measured.cpu_us * count / 1e6


@frozen
class Median:
    """Of all rounds: sends a second, and microseconds of processor time a send, of the sender and of the fake.

    What the fake spends tells whether a client's headers are costly to read: then the fake slows it, not the client.
    """

    rate: float
    cpu_us: float
    fake_cpu_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sends", type=int, default=10_000, help="a round, in thousands")
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    package = install()
    if isinstance(package, str):
        print(json.dumps({"name": "peers", "skipped": package}))
        return
    runs: dict[str, list[tuple[float, float, float]]] = {"dispatcher": [], "sender": [], "node": []}
    with installation([Channel.APNS], options.latency_ms) as (url, fakes):
        fake = fakes[Channel.APNS]
        senders: dict[str, Callable[[], tuple[float, float]]] = {
            "dispatcher": lambda: dispatcher_run(url, fake, options.sends),
            "sender": lambda: trio.run(measure, fake, Channel.APNS, options.sends),
            "node": lambda: node_run(package, fake, options.sends),
        }
        for _ in range(options.rounds):
            for name, send in senders.items():
                before_s = cpu_s(fake.facts["pid"])
                took_s, spent_s = send()
                runs[name].append((took_s, spent_s, cpu_s(fake.facts["pid"]) - before_s))
    medians: dict[str, Median] = {}
    for name, results in runs.items():
        took_s, spent_s, fake_s = (statistics.median(figures) for figures in zip(*results, strict=True))
        medians[name] = Median(options.sends / took_s, spent_s / options.sends * 1e6, fake_s / options.sends * 1e6)
    dispatcher, sender, node = medians["dispatcher"], medians["sender"], medians["node"]
    print(
        line(
            "peers",
            rate=dispatcher.rate,
            bound=permits_bound(options.latency_ms),
            bound_is=PERMITS_BOUND,
            cpu_us_per_item=dispatcher.cpu_us,
            rss_mib=peak_rss_mib(),
            target={"ratio_to_node": 1.0},
            ratio_to_node=round(dispatcher.rate / node.rate, 3),
            sender_rate=round(sender.rate),
            sender_cpu_us=round(sender.cpu_us, 1),
            node_rate=round(node.rate),
            node_cpu_us=round(node.cpu_us, 1),
            fake_cpu_us={name: round(each.fake_cpu_us, 1) for name, each in medians.items()},
        )
    )


if __name__ == "__main__":
    main()
