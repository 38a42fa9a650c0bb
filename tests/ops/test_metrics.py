"""The catalogue of metrics: the names that were promised, the page printed from it, what the dispatcher observes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry, generate_latest

from pushd.channels.apns_jwt import LIFETIME_S, ProviderJwt
from pushd.channels.setup import watch_credentials
from pushd.core.lanes import Work
from pushd.core.retained import Retained
from pushd.core.window import Windows
from pushd.dispatch.instruments import Instruments
from pushd.model import (
    Channel,
    Delivered,
    Delivery,
    DeliveryConfig,
    Gone,
    Mismatch,
    Outcome,
    Rejected,
    Terminal,
    Transient,
)
from pushd.ops.metrics_doc import metrics_markdown
from pushd.telemetry import FAILURE_KINDS, Metrics

DOCS = Path(__file__).parents[2] / "docs"


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_documentation_is_current() -> None:
    assert (DOCS / "metrics.md").read_text() == metrics_markdown(), "python -m pushd.ops.metrics_doc"


def test_push_095_names_labels_and_values_are_exactly_these(metrics: Metrics) -> None:
    text = generate_latest(metrics.registry).decode()
    found = {line.rpartition(" ")[0] for line in text.splitlines() if line.startswith("xmtp_push_")}
    outcomes = ("delivered", "failed", "rejected", "mismatch", "dead", "suppressed")
    assert found == {
        *(
            f'xmtp_push_deliveries_total{{channel="{channel}",outcome="{outcome}"}}'
            for channel in ("apns", "fcm", "http")
            for outcome in outcomes
        ),
        *(
            f'xmtp_push_recipients_total{{action="{action}"}}'
            for action in ("registered", "unregistered", "expired", "dead")
        ),
        *(f'xmtp_push_subscriptions_total{{action="{action}"}}' for action in ("added", "removed")),
        "xmtp_push_dispatcher",
    }


def test_every_metric_is_in_the_catalogue_and_named_by_a_known_family(metrics: Metrics) -> None:
    exposed = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in metrics.registry.collect()
    }
    names = [family.name for family in metrics.catalogue]
    assert len(names) == len(set(names))
    assert {name for name in exposed if not name.startswith("process_")} == set(names)
    assert all(name.startswith(("xmtp_", "pushd_", "grpc_server_")) for name in names)
    assert all(family.text.endswith(".") for family in metrics.catalogue)


def work(channel: Channel = Channel.APNS, server_ns: int = 0, ready_at: float = 0.0) -> Work:
    delivery = Delivery(1, b"\x00topic", b"r" * 32, DeliveryConfig(channel, "target"), b"h" * 32, server_ns)
    windows = Windows(0)
    return Work(delivery, windows.begin(1), "", ready_at)


def test_an_attempt_is_split_into_waiting_and_provider_time_and_dated_by_its_envelope(metrics: Metrics) -> None:
    instruments = Instruments(metrics, wall_clock_s=lambda: 1_000.0)
    instruments.attempted(work(server_ns=997_500_000_000, ready_at=10.0), Channel.APNS, Delivered(), 10.75, 11.0)
    for name, seconds in (("permit_wait", 0.75), ("attempt", 0.25), ("age", 2.5)):
        assert sample(metrics.registry, f"pushd_push_{name}_seconds_sum", channel="apns") == seconds, name
        assert sample(metrics.registry, f"pushd_push_{name}_seconds_count", channel="apns") == 1, name
        assert sample(metrics.registry, f"pushd_push_{name}_seconds_count", channel="fcm") == 0, name


def test_an_envelope_from_a_clock_that_is_ahead_has_no_age_and_a_push_without_a_row_is_not_dated(
    metrics: Metrics,
) -> None:
    instruments = Instruments(metrics, wall_clock_s=lambda: 1_000.0)
    instruments.attempted(work(server_ns=2_000_000_000_000), Channel.APNS, Delivered(), 0.0, 0.0)
    instruments.attempted(work(), Channel.APNS, Delivered(), 0.0, 0.0)
    assert sample(metrics.registry, "pushd_push_age_seconds_sum", channel="apns") == 0
    assert sample(metrics.registry, "pushd_push_age_seconds_count", channel="apns") == 1


@pytest.mark.parametrize(
    ("outcome", "kind", "reason"),
    [
        (Transient("timeout", 1.0), "transient", "timeout"),
        (Gone(410), "gone", "status_410"),
        (Rejected("PayloadTooLarge"), "rejected", "PayloadTooLarge"),
        (Mismatch("BadDeviceToken"), "mismatch", "BadDeviceToken"),
        (Terminal("Unregistered"), "terminal", "Unregistered"),
    ],
)
def test_a_failure_is_counted_by_kind_and_reason(metrics: Metrics, outcome: Outcome, kind: str, reason: str) -> None:
    instruments = Instruments(metrics)
    for _ in range(2):
        instruments.attempted(work(Channel.HTTP), Channel.HTTP, outcome, 0.0, 0.0)
    name = "pushd_push_attempt_failures_total"
    assert sample(metrics.registry, name, channel="http", kind=kind, reason=reason) == 2
    assert kind in FAILURE_KINDS
    assert sample(metrics.registry, "pushd_push_age_seconds_count", channel="http") == 0


def test_sizes_are_those_of_the_term_that_runs(metrics: Metrics) -> None:
    instruments = Instruments(metrics)
    first, second = Retained(3), Retained(3)
    for retained, count in ((first, 5), (second, 2)):
        windows = Windows(0)
        deliveries = [work().delivery for _ in range(count)]
        retained.admit(windows, windows.begin(1), deliveries)
    instruments.watch(first)
    assert sample(metrics.registry, "pushd_push_retained") == 5
    assert first.take(Channel.APNS) is not None
    assert sample(metrics.registry, "pushd_push_retained") == 4
    assert sample(metrics.registry, "pushd_push_in_flight", channel="apns") == 1
    instruments.watch(second)
    assert sample(metrics.registry, "pushd_push_retained") == 2
    assert sample(metrics.registry, "pushd_push_in_flight", channel="apns") == 0


def test_waiting_is_counted_from_admission_and_again_from_when_a_retry_is_due() -> None:
    retained, windows = Retained(3), Windows(0)
    retained.admit(windows, windows.begin(1), [work().delivery], 4.0)
    first = retained.take(Channel.APNS)
    assert first is not None
    assert first.ready_at == 4.0
    assert retained.settle(first, Transient("timeout", 1.0), 5.0, 0.0) is None
    retained.wake(7.5)
    assert retained.take(Channel.APNS) is first
    assert first.ready_at == 7.5


class _Sender:
    """A channel of which only the credential matters."""

    def __init__(self, credential_age_s: Callable[[], float]) -> None:
        self.credential_age_s = credential_age_s

    async def attempt(self, delivery: Delivery) -> Outcome:
        raise NotImplementedError


async def test_the_age_of_the_provider_token_is_read_when_asked_for(
    metrics: Metrics, autojump_clock: trio.testing.MockClock
) -> None:
    tokens = ProviderJwt(lambda claims, header: "jwt", "TEAM", "KEY")
    watch_credentials({Channel.APNS: _Sender(lambda: tokens.age_s), Channel.HTTP: _NoCredential()}, metrics)

    def age_s() -> float:
        found = sample(metrics.registry, "pushd_push_credential_age_seconds", channel="apns")
        assert found is not None
        return found

    assert math.isnan(age_s())
    used = tokens.current()
    await trio.sleep(100)
    assert age_s() == pytest.approx(100)
    await trio.sleep(LIFETIME_S)
    tokens.current()
    assert age_s() == pytest.approx(0)
    tokens.drop(used)
    assert math.isnan(age_s())
    assert sample(metrics.registry, "pushd_push_credential_age_seconds", channel="http") is None


class _NoCredential:
    async def attempt(self, delivery: Delivery) -> Outcome:
        raise NotImplementedError
