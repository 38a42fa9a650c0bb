"""The page of a real server under load, next to its metrics, and as a browser shows it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from fakes.launch import RunningFake, launch
from pushd.model import Channel
from pushd.telemetry import CHANNELS, DELIVERY_OUTCOMES
from tests.dispatch.seed import Seed, target, topic
from tests.support.postgres import as_url
from tests.support.server import ServerProcess, base_config, running_server

pytestmark = pytest.mark.slow

RECIPIENTS = 100
ROWS = 60
STRANGER, LEAVER = 7, 8  # recipients whose tokens earn a mismatch, and a deletion
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@asynccontextmanager
async def loaded_server(
    folder: Path, database_url: str, rows: int = ROWS
) -> AsyncIterator[tuple[ServerProcess, RunningFake]]:
    """A server that has just been given `rows` times 100 deliveries to make over APNs."""
    with Seed(database_url) as seed:
        seed.recipients(range(RECIPIENTS))
        seed.subscribe(range(RECIPIENTS), topic(1))
        seed.envelopes([(number, topic(1)) for number in range(1, rows + 1)])
        seed.conn.execute("SELECT setval('envelope_sequence', %s)", (rows,))
        seed.conn.execute("UPDATE envelopes SET server_ns = %s", (time.time_ns(),))
    with launch("apns", "--latency-ms", "40") as fake:
        mismatch, gone = {"status": 400, "reason": "BadDeviceToken"}, {"status": 410, "reason": "Unregistered"}
        fake.script(target(STRANGER, Channel.APNS), *[mismatch] * rows)
        fake.script(target(LEAVER, Channel.APNS), *[gone] * rows)
        apns = {
            "key": Path(fake.facts["key"]).read_text(),
            "key_id": fake.facts["key_id"],
            "team_id": fake.facts["team_id"],
            "bundle_id": "org.example.app",
            "environment": "sandbox",
            "endpoint": fake.endpoint,
            "ca_file": str(fake.ca),
        }
        config = base_config(database={"url": as_url(database_url)}, push={"apns": apns})
        async with running_server(folder, config) as server:
            yield server, fake


def counted(text: str) -> dict[tuple[str, str], float]:
    """Deliveries by channel and outcome on /metrics."""
    return {
        (sample.labels["channel"], sample.labels["outcome"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "xmtp_push_deliveries_total"
    }


def shown(page: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r'<data id="([^"]+)" value="([^"]+)"', page)}


def shown_deliveries(page: str) -> dict[tuple[str, str], float]:
    found = shown(page)
    return {
        (channel, outcome): found.get(f"{channel}-{outcome}", 0.0)
        for channel in CHANNELS
        for outcome in DELIVERY_OUTCOMES
    }


async def get(client: httpx2.AsyncClient, server: ServerProcess, path: str) -> str:
    answer = await client.get(f"http://{server.metrics}{path}")
    assert answer.status_code == 200, answer.text
    return answer.text


def gauge(text: str, name: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


async def test_page_and_metrics_agree_while_pushes_are_sent_and_after(tmp_path: Path, database_url: str) -> None:
    seen = []
    with trio.fail_after(180):
        async with (
            loaded_server(tmp_path, database_url) as (server, fake),
            httpx2.AsyncClient(trust_env=False) as client,
        ):
            while True:
                text = await get(client, server, "/metrics")
                before = counted(text)
                page = await get(client, server, "/")
                after = counted(await get(client, server, "/metrics"))
                middle = shown_deliveries(page)
                assert all(before[labels] <= middle[labels] <= after[labels] for labels in before)
                seen.append(sum(middle.values()))
                if gauge(text, "pushd_push_cursor_lag_rows") == 0 and before == after:
                    break
            assert any(0 < total < sum(after.values()) for total in seen), "nothing was seen while it ran"
            assert middle == before
            assert middle["apns", "mismatch"] == ROWS
            assert 1 <= middle["apns", "dead"] <= ROWS  # a page loaded after the deletion has none of its rows
            assert middle["apns", "delivered"] == (RECIPIENTS - 2) * ROWS == fake.stats()["statuses"]["200"]
            assert "BadDeviceToken" in page
            assert "Unregistered" in page
            assert f'<span id="holder">{_holder(page)}</span>' in page
            assert "this instance" in page
            text = await get(client, server, "/metrics")
            assert gauge(text, "xmtp_push_dispatcher") == 1
            assert gauge(text, "pushd_push_terms_started_total") == 1
            assert gauge(text, "pushd_push_retained") == shown(page)["retained"] == 0
            assert gauge(text, 'pushd_push_in_flight{channel="apns"}') == 0
            assert gauge(text, 'pushd_push_attempt_seconds_count{channel="apns"}') > (RECIPIENTS - 1) * ROWS
            assert gauge(text, 'pushd_push_age_seconds_count{channel="apns"}') == middle["apns", "delivered"]
            assert 0 <= gauge(text, 'pushd_push_credential_age_seconds{channel="apns"}') < 180
            assert gauge(text, 'pushd_push_sweeps_total{result="ok"}') == 1
            assert gauge(text, "pushd_push_cursor_lag_seconds") == 0
            found = shown(await get(client, server, "/still"))
            assert (found["lag-rows"], found["lag-seconds"]) == (0, 0)


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed: the page is read, but not looked at")
async def test_a_browser_shows_the_same_numbers(tmp_path: Path, database_url: str) -> None:
    with trio.fail_after(180):
        async with (
            loaded_server(tmp_path, database_url, rows=5) as (server, _),
            httpx2.AsyncClient(trust_env=False) as client,
        ):
            while gauge(text := await get(client, server, "/metrics"), "pushd_push_cursor_lag_rows"):  # noqa: ASYNC110
                await trio.sleep(0.1)
            expected = counted(text)
            assert expected["apns", "delivered"] == (RECIPIENTS - 2) * 5
            address = f"http://{server.metrics}/still"
            document = await _chromium(tmp_path, "--dump-dom", address)
            assert shown_deliveries(document.stdout.decode()) == expected
            picture = tmp_path / "page.png"
            await _chromium(tmp_path, f"--screenshot={picture}", "--window-size=1240,1250", address)
            data = picture.read_bytes()
            assert struct.unpack(">II", data[16:24]) == (1_240, 1_250)
            assert len(data) > 30_000, "an empty page is a picture of a few thousand bytes"


def _holder(page: str) -> str:
    [name] = re.findall(r'class="soft">([^ ]+) · version', page)
    return str(name)


async def _chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    assert BROWSER is not None
    return await trio.run_process(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={folder / 'profile'}",
            *arguments,
        ],
        capture_stdout=True,
        capture_stderr=True,
    )
