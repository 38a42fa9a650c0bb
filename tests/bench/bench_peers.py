"""pushd's APNs sender and npm's @parse/node-apn against one fake in one run, taking turns.

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

from fakes.launch import RunningFake, launch
from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel
from tests.bench.bench_providers import measure, process_cpu_s

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sends", type=int, default=15_000)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    package = install()
    if isinstance(package, str):
        print(json.dumps({"name": "peers", "skipped": package}))
        return
    senders: dict[str, Callable[[RunningFake], tuple[float, float]]] = {
        "pushd": lambda fake: trio.run(measure, fake, Channel.APNS, options.sends),
        "node-apn": lambda fake: node_run(package, fake, options.sends),
    }
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in senders}
    with launch("apns", "--latency-ms", str(options.latency_ms), "--record", "0") as fake:
        for _ in range(options.rounds):
            for name, send in senders.items():
                before_s = process_cpu_s(fake)
                took_s, cpu_s = send(fake)
                runs[name].append((took_s, cpu_s, process_cpu_s(fake) - before_s))
    bound = IN_FLIGHT_PER_CHANNEL / (options.latency_ms / 1_000) if options.latency_ms else None
    lines = []
    for name, results in runs.items():
        rate = options.sends / statistics.median(took_s for took_s, _, _ in results)
        line = {
            "name": f"peers-{name}",
            "rate": round(rate),
            "bound": round(bound) if bound else None,
            "ratio_to_bound": round(rate / bound, 3) if bound else None,
            "cpu_us_per_item": round(statistics.median(cpu_s for _, cpu_s, _ in results) / options.sends * 1e6, 1),
            "rss_mib": None,
            # What the fake spent: a client whose headers are costly to read is slowed by the fake, not by itself.
            "fake_cpu_us": round(statistics.median(cpu_s for _, _, cpu_s in results) / options.sends * 1e6, 1),
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    pushd, node = lines
    print(json.dumps({**pushd, "name": "peers", "node_rate": node["rate"], "node_cpu_us": node["cpu_us_per_item"]}))


if __name__ == "__main__":
    main()
