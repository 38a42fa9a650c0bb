"""One `pushd serve` of a fault run: its signals, what it logged about its terms, what it counted."""

from __future__ import annotations

import http.client
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

from pushd.model import Channel
from pushd.rpc.client import Channel as RpcChannel
from tests.faults.ledger import Term
from tests.support.server import ServerProcess

Outcome = tuple[Channel, str]
"""A channel and how a delivery over it ended."""


class Instance:
    """One `pushd serve` and a channel to it."""

    def __init__(
        self, server: ServerProcess, channel: RpcChannel, database_url: str, config: Path, bundle_id: str = ""
    ) -> None:
        self.server = server
        self.config = config
        self.bundle_id = bundle_id
        self.database_url = database_url
        self.channel = channel
        self.is_up = True

    @property
    def pid(self) -> int:
        return self.server.process.pid

    @property
    def terms(self) -> list[dict[str, Any]]:
        """Its `term_started` and `term_ended` events so far."""
        return [event for event in self.server.events if event.get("event") in ("term_started", "term_ended")]

    @property
    def held(self) -> list[Term]:
        """Its holds of the lock so far."""
        found: list[Term] = []
        drained_by_s: float | None = None
        for event in self.server.events:
            at_s = _seconds(event)
            match event.get("event"):
                case "stopping" | "stepping_down":
                    drained_by_s = min(at_s + event["drain_s"], drained_by_s or at_s + event["drain_s"])
                case "term_started":
                    found.append(Term(self.bundle_id, event["cursor"], at_s))
                case "term_ended":
                    reason = event["reason"]
                    was_asked = reason in ("stopped", "stepped_down")
                    is_drained = was_asked and drained_by_s is not None and at_s < drained_by_s
                    found[-1] = evolve(
                        found[-1], end=event["cursor"], ended_s=at_s, reason=reason, is_drained=is_drained
                    )
                    if reason == "stepped_down":
                        drained_by_s = None
        return found

    @property
    def holds(self) -> bool:
        """Whether its last word about the lock was that it has it."""
        return bool(self.terms) and self.terms[-1]["event"] == "term_started"

    async def end(self, signum: signal.Signals) -> int:
        """Send a signal that ends it; the exit code."""
        self.is_up = False
        self.server.send_signal(signum)
        with trio.fail_after(120):
            code = await self.server.wait_exit()
            await self.server.wait_ended()
        return code

    async def command(self, *argv: str) -> None:
        """Run one of the operator's commands with its configuration; it has to succeed."""
        await trio.run_process(
            [sys.executable, "-m", "pushd", *argv, "--config", str(self.config)], capture_stdout=True
        )

    async def metrics(self) -> dict[str, float]:
        """Every sample of its metrics page by its whole name."""
        assert self.server.metrics is not None
        text = await trio.to_thread.run_sync(partial(_get, self.server.metrics, "/metrics"), abandon_on_cancel=True)
        samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def counters(self) -> Counter[Outcome]:
        """What it counted, by channel and outcome."""
        found: Counter[Outcome] = Counter()
        for name, value in (await self.metrics()).items():
            if name.startswith("xmtp_push_deliveries_total{"):
                found[Channel[_label(name, "channel").upper()], _label(name, "outcome")] = int(value)
        assert found, "there is no such metric"
        return found

    async def failures(self) -> int:
        """How many of its attempts did not deliver."""
        measured = await self.metrics()
        return int(sum(n for name, n in measured.items() if name.startswith("pushd_push_attempt_failures_total{")))

    async def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        busy = [n for name, n in (await self.metrics()).items() if re.match("pushd_push_(retained|in_flight)", name)]
        assert len(busy) == 1 + len(Channel), "there are no such metrics"
        return not any(busy)


def _seconds(event: Mapping[str, Any]) -> float:
    """When an event was told, in seconds since 1970."""
    stamp = event.get("timestamp")
    return datetime.fromisoformat(stamp).timestamp() if isinstance(stamp, str) else 0.0


def _get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _label(sample: str, label: str) -> str:
    found = re.search(f'{label}="([^"]*)"', sample)
    assert found
    return found[1]
