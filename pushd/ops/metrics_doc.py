"""Prints `docs/metrics.md` from the metrics themselves: `python -m pushd.ops.metrics_doc`."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from pushd.telemetry import CHANNELS, FAILURE_KINDS, Family, Metrics

_INTRODUCTION = """\
# Metrics

<!-- Made by `python -m pushd.ops.metrics_doc` from pushd/telemetry.py; edit the descriptions there. -->

`GET /metrics` on the operators' listener (`telemetry.metrics_listen`, by default 127.0.0.1:9464) answers in
Prometheus' text format. Every instance answers for itself; only the ones below *From the database* are the same on all
of them. Times are in seconds, sizes in bytes. A histogram has the series `_bucket`, `_sum` and `_count`.

Labels take values from closed lists, which are given here as far as they are known at the start. None is a recipient
id, secret, token, URL, key or topic, nor derived from one.

The page at `/` shows the push metrics as plots; [kit/](kit/) has a Grafana dashboard and Prometheus rules for them.
"""

_SECTIONS = (
    ("Push", ("xmtp_push_", "pushd_push_")),
    ("Publishing and the boundary", ("xmtp_publish_", "xmtp_boundary_")),
    ("Streams", ("xmtp_stream_", "xmtp_tailer_")),
    ("Calls", ("grpc_", "xmtp_auth_")),
    ("The instance", ("xmtp_", "pushd_tasks", "pushd_tls_")),
)
_FROM_DATABASE = ("pushd_database_up", "pushd_push_cursor_lag_", "pushd_push_skipped_rows")
_NOTES = {
    "pushd_push_attempt_failures_total": f"channel: {', '.join(CHANNELS)}; kind: {', '.join(FAILURE_KINDS)};"
    " reason: see [providers](providers.md) and [operations](operations.md#reasons-of-webhook-attempts)",
    "pushd_push_credential_age_seconds": "channel: apns, fcm, once configured",
    "xmtp_backend_info": "version: this program's",
}
_CALL_LABELS = "service, method and type of the call, from a closed list"

_AFTERWORD = """\
## The process

`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`, `process_open_fds`,
`process_max_fds` and `process_start_time_seconds`, as every Prometheus client has them. The embedded PostgreSQL is
another process and not in them.
"""


def metrics_markdown() -> str:
    """`docs/metrics.md`."""
    metrics = Metrics()
    values = _label_values(metrics.registry)
    left = list(metrics.catalogue)
    database = _taken(left, _FROM_DATABASE)
    parts = [_INTRODUCTION]
    for title, prefixes in _SECTIONS:
        parts.append(_section(title, _taken(left, prefixes), values))
        if title == "Push":
            parts.append(_section("From the database", database, values))
    assert not left, "a metric without a section"
    return "\n".join([*parts, _AFTERWORD])


def _taken(families: list[Family], prefixes: tuple[str, ...]) -> list[Family]:
    found = [family for family in families if family.name.startswith(prefixes)]
    families[:] = [family for family in families if family not in found]
    return found


def _section(title: str, families: list[Family], values: dict[str, dict[str, list[str]]]) -> str:
    rows = [
        f"| `{family.name}` | {family.kind} | {_labels(family, values.get(family.name, {}))} | {family.text} |"
        for family in families
    ]
    return "\n".join(
        [f"## {title}", "", "| Metric | Kind | Labels | Meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )


def _labels(family: Family, values: dict[str, list[str]]) -> str:
    if family.name in _NOTES:
        return _NOTES[family.name]
    if "grpc_service" in family.labels:
        return f"{', '.join(family.labels)}: {_CALL_LABELS}"
    return "; ".join(f"{label}: {', '.join(values[label])}" for label in family.labels)


def _label_values(registry: CollectorRegistry) -> dict[str, dict[str, list[str]]]:
    """By metric and label, the values that exist before anything has happened."""
    found: dict[str, dict[str, list[str]]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            for label, value in sample.labels.items():
                values = found.setdefault(name, {}).setdefault(label, [])
                if value not in values:
                    values.append(value)
    return found


def main() -> None:
    """Write the page into the docs folder of the checkout this module lies in."""
    (Path(__file__).parents[2] / "docs" / "metrics.md").write_text(metrics_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
