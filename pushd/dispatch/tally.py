"""Counts final outcomes of deliveries; every delivery ends in one of them at most (PUSH-095)."""

from __future__ import annotations

from collections.abc import Mapping

from pushd.core.retry import Result
from pushd.model import Channel
from pushd.telemetry import Metrics


class Tally:
    """`xmtp_push_deliveries_total`, with its label children looked up once instead of once a delivery."""

    def __init__(self, metrics: Metrics) -> None:
        self._children = {
            (channel, result): metrics.push_deliveries.labels(channel.label, result.value)
            for channel in Channel
            for result in Result
        }

    def count(self, channel: Channel, result: Result, amount: int = 1) -> None:
        """Add `amount` deliveries of `channel` that ended so."""
        self._children[channel, result].inc(amount)

    def count_all(self, amounts: Mapping[Channel, int], result: Result) -> None:
        """Add deliveries of several channels that ended alike."""
        for channel, amount in amounts.items():
            self.count(channel, result, amount)
