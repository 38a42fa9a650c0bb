"""Measures gRPC calls from a client process to a `pushd serve` process with its own durable PostgreSQL.

On two cores one is pushd's; PostgreSQL and the client share the other. The rate is therefore that of the whole machine,
and the processor time of the pushd process is the steadier figure.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from tests.bench.measuring import cpu_s
from tests.support.server import ServerProcess, base_config, running_server

SERVICE = "/xmtp.backend.v1.NotificationService/"
LOAD_CLIENT = Path(__file__).with_name("load_client.py")


@frozen
class Load:
    """What one run of calls came to."""

    seconds: float
    server_cpu_s: float


@asynccontextmanager
async def bench_server(folder: Path) -> AsyncIterator[ServerProcess]:
    """A server that takes webhooks to addresses of this machine, so that no name has to be resolved."""
    config = base_config(push={"http": {"allow_private_addresses": True}}, server={"request_logger": False})
    async with running_server(folder, config) as server:
        yield server
        server.send_signal(signal.SIGTERM)  # so that it takes its PostgreSQL along
        await server.wait_exit()


async def run_load(
    server: ServerProcess, method: str, requests: Sequence[Any], in_flight: int, folder: Path, *, service: str = SERVICE
) -> Load:
    """Send every request, `in_flight` at a time; all must succeed."""
    path = folder / "bodies"
    bodies = [request.SerializeToString() for request in requests]
    path.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
    before = cpu_s(server.process.pid)
    done = await trio.run_process(
        [sys.executable, str(LOAD_CLIENT), str(server.grpc_port), service + method, str(path), str(in_flight)],
        capture_stdout=True,
        stdin=subprocess.DEVNULL,
    )
    result = json.loads(done.stdout)
    if result["failures"]:
        raise SystemExit(f"calls failed: {result['failures']}")
    return Load(result["seconds"], cpu_s(server.process.pid) - before)
