"""A real server with a certificate of limited life."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
import trio
import trustme

from tests.support.server import base_config, running_server

GAUGE = "pushd_tls_certificate_expiry_timestamp_seconds"


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: its names are longer than a socket's path may be.
    place = Path(tempfile.mkdtemp(prefix="pushd-"))
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize(("days", "trouble"), [(-2, "expired"), (13, "expires_soon"), (15, None)])
async def test_the_end_of_the_certificate_is_logged_and_measured(folder: Path, days: int, trouble: str | None) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    ends = now + timedelta(days)
    issued = trustme.CA().issue_cert("localhost", not_before=now - timedelta(90), not_after=ends)
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    server_keys = {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
    async with running_server(folder, base_config(server=server_keys)) as server:
        told = [event for event in server.events if event["event"] == "certificate_trouble"]
        assert [(event["level"], event["trouble"], event["ends"]) for event in told] == (
            [("warning", trouble, ends.isoformat())] if trouble else []
        )
        with trio.fail_after(30):
            async with httpx2.AsyncClient() as client:
                reply = await client.get(f"http://{server.metrics}/metrics")
        [line] = [line for line in reply.text.splitlines() if line.startswith(GAUGE)]
        assert float(line.split()[1]) == ends.timestamp()
