"""The files for operators name metrics and labels that exist, and are what their tools accept."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pushd.config.finding import Severity
from pushd.config.load import examine
from pushd.core.providers import apns, fcm
from pushd.core.providers.answers import FAILURES
from pushd.telemetry import DELIVERY_OUTCOMES, FAILURE_KINDS, Metrics

ROOT = Path(__file__).parents[2]
KIT = ROOT / "docs" / "kit"
RULES = (KIT / "prometheus-rules.yaml").read_text()
DASHBOARD = json.loads((KIT / "grafana-dashboard.json").read_text())
OF_PROMETHEUS = {"instance", "job", "le"}
PROMTOOL = shutil.which("promtool")


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def rule_queries() -> list[str]:
    """The `expr` of each rule, on its line or in the block that follows; a YAML parser is not at hand."""
    found = re.findall(r"^ +expr: (?!\|)(.+)$", RULES, re.M)
    found += [re.sub(r"\s+", " ", block) for block in re.findall(r"^ +expr: \|\n((?: {10}.*\n)+)", RULES, re.M)]
    assert len(found) == RULES.count("expr:")
    return found


def series(metrics: Metrics) -> dict[str, tuple[str, ...]]:
    """Every series that /metrics may show, with its labels."""
    found = {}
    for family in metrics.catalogue:
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found.update({family.name + suffix: family.labels for suffix in suffixes})
    for metric in metrics.registry.collect():
        if metric.name.startswith("process_"):
            found.update({sample.name: () for sample in metric.samples})
    return found


def test_every_query_names_a_metric_that_exists_and_labels_that_it_has(metrics: Metrics) -> None:
    known = series(metrics)
    all_labels = {label for labels in known.values() for label in labels}
    used = set()
    for query in (*rule_queries(), *dashboard_queries()):
        found = re.findall(r"\b((?:xmtp|pushd|grpc|process)_\w+)(\{[^}]*\})?", query)
        selectors = {name: selector for name, selector in found if name not in all_labels}
        assert selectors, query
        assert selectors.keys() <= known.keys(), query
        used |= selectors.keys()
        grouped = set(OF_PROMETHEUS)
        for name, selector in selectors.items():
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", selector)) <= {*known[name], *OF_PROMETHEUS}, query
            grouped |= set(known[name])
        for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query):
            assert set(re.split(r",\s*", labels)) <= grouped, query
    assert {"xmtp_push_deliveries_total", "xmtp_push_dispatcher", "pushd_push_cursor_lag_seconds"} <= used


def test_label_values_in_queries_are_ones_that_are_counted() -> None:
    values = {"outcome": set(DELIVERY_OUTCOMES), "kind": set(FAILURE_KINDS), "result": {"ok", "error", "lock_timeout"}}
    for query in (*rule_queries(), *dashboard_queries()):
        for label, text in re.findall(r"\b(outcome|kind|result)\s*(?:=~|!=|=)\s*\"([^\"]*)\"", query):
            assert set(text.split("|")) <= values[label], query


def test_reasons_that_an_alert_waits_for_are_ones_that_a_sender_gives() -> None:
    found = [reason for text in re.findall(r'reason=~"([^"]*)"', RULES) for reason in text.split("|")]
    assert set(found) <= {*FAILURES, *apns.LOOK_AT, *fcm.LOOK_AT}
    assert len(found) > 3


def test_panels_have_a_title_a_place_and_a_number_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def headings(document: Path) -> set[str]:
    """The anchors of a Markdown file, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_alert_leads_to_a_heading() -> None:
    runbooks = re.findall(r"runbook: (\S+)#(\S+)", RULES)
    assert len(runbooks) == RULES.count("- alert:")
    for document, anchor in runbooks:
        assert anchor in headings(ROOT / document), anchor


def promtool(*arguments: str | Path) -> None:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_configuration_and_rules() -> None:
    promtool("check", "config", KIT / "prometheus.yaml")


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    test = tmp_path / "test.yaml"
    scenarios = (ROOT / "tests" / "ops" / "prometheus-rules.test.yaml").read_text()
    test.write_text(f"rule_files: [{KIT / 'prometheus-rules.yaml'}]\n{scenarios}")
    promtool("test", "rules", test)


def test_every_alert_has_a_moment_to_fire_and_one_to_be_silent() -> None:
    scenarios = (ROOT / "tests" / "ops" / "prometheus-rules.test.yaml").read_text()
    found = re.findall(r"alertname: (\w+)(?:, |\n +)exp_alerts:( \[\]|\n +- exp_labels:)", scenarios)
    assert len(found) == scenarios.count("alertname:")
    alerts = set(re.findall(r"- alert: (\w+)", RULES))
    assert {name for name, expected in found if "exp_labels" in expected} == alerts
    assert {name for name, expected in found if "[]" in expected} == alerts


def test_prometheus_understands_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    def plain(query: str) -> str:
        return query.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$job", "pushd")

    rules = [{"record": f"panel:{number}", "expr": plain(query)} for number, query in enumerate(dashboard_queries())]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", file)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_and_finds_little_exposed(tmp_path: Path) -> None:
    unit = tmp_path / "pushd.service"
    text = (KIT / "pushd.service").read_text()
    assert "/opt/pushd/bin/pushd" in text
    unit.write_text(text.replace("/opt/pushd/bin/pushd", "/usr/bin/env"))  # it looks for the program
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout[-200:]


@pytest.mark.parametrize("name", ["pushd.toml", "kubernetes/pushd.toml"])
def test_configurations_have_no_mistake(name: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    environ = {"PUSHD_DATABASE_URL": "postgresql://pushd@db/pushd", "PUSHD_APNS_KEY": pem}
    findings = examine(KIT / name, environ).findings
    assert not [finding for finding in findings if finding.severity is Severity.ERROR]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_manifests_are_rendered_with_the_configuration() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", KIT / "kubernetes"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    kinds = re.findall(r"^kind: (\w+)$", done.stdout, re.M)
    assert sorted(kinds) == ["ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"]
    [name] = re.findall(r"^  name: (pushd-[a-z0-9]+)$", done.stdout, re.M)
    assert f"          name: {name}" in done.stdout, "a changed configuration makes a new rollout"


def test_ports_and_paths_are_the_same_everywhere() -> None:
    deployment = (KIT / "kubernetes" / "deployment.yaml").read_text()
    for path in re.findall(r"httpGet: \{path: (\S+),", deployment):
        assert path in {"/healthz", "/readyz"}
    for text in (deployment, (KIT / "Dockerfile").read_text(), (KIT / "compose.yaml").read_text()):
        assert "5050" in text
        assert "9464" in text


def test_the_image_is_made_of_hashed_packages_only() -> None:
    text = (KIT / "Dockerfile").read_text()
    commands = re.findall(r"/pip ([^&\n]+)", text)
    assert len(commands) == text.count("/bin/pip")
    for command in commands:
        assert "--require-hashes" in command or "--no-index" in command, command
    [chosen] = re.findall(r"\^\(([\w|-]+)\)==", text)
    needed: set[str] = set()
    waiting = ["hatchling"]
    while waiting:
        needed.add(name := waiting.pop())
        lines = importlib.metadata.requires(name) or []
        waiting += [re.split(r"[^\w-]", line)[0] for line in lines if ";" not in line]  # those are for old Pythons
    assert set(chosen.split("|")) == needed
    assert needed <= set(re.findall(r"^([\w-]+)==", (ROOT / "requirements-dev.lock").read_text(), re.M))


def test_the_image_checks_its_health_as_the_compose_file_does() -> None:
    [check] = re.findall(r"^HEALTHCHECK (.+?)\n\S", (KIT / "Dockerfile").read_text().replace("\\\n", ""), re.M)
    options, command = check.split("CMD ")
    compose = (KIT / "compose.yaml").read_text().partition("\n  healthcheck:\n")[2].partition("\n\n")[0]
    [asked] = re.findall(r"test: (.+)", compose)
    assert json.loads(asked) == ["CMD", *json.loads(command)]
    assert dict(re.findall(r"--([\w-]+)=(\w+)", options)) == {
        name.replace("_", "-"): value for name, value in re.findall(r"(interval|timeout|start_period): (\w+)", compose)
    }


@pytest.mark.parametrize(
    ("file", "key", "least_s"),
    [
        ("pushd.service", r"TimeoutStopSec=(\d+)", 20),
        ("compose.yaml", r"stop_grace_period: (\d+)s", 20),
        ("kubernetes/deployment.yaml", r"terminationGracePeriodSeconds: (\d+)", 25),
    ],
)
def test_whoever_stops_it_waits_longer_than_the_drain(file: str, key: str, least_s: int) -> None:
    [seconds] = re.findall(key, (KIT / file).read_text())
    assert int(seconds) > least_s
