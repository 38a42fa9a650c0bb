"""Measures gRPC calls from a client process to a `pushd serve` process with its own durable PostgreSQL.

On two cores one is pushd's; PostgreSQL and the client share the other. The rate is therefore that of the whole machine,
and the processor time of the pushd process is the steadier figure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from tests.support.server import ServerProcess, base_config, running_server

SERVICE = "/xmtp.backend.v1.NotificationService/"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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


def process_cpu_s(pid: int) -> float:
    """Processor seconds of one process so far, its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_mib(pid: int) -> int:
    """Resident memory of one process at its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024)
    raise ValueError("no VmHWM")


async def run_load(
    server: ServerProcess, method: str, requests: Sequence[Any], in_flight: int, folder: Path, *, service: str = SERVICE
) -> Load:
    """Send every request, `in_flight` at a time; all must succeed."""
    path = folder / "bodies"
    bodies = [request.SerializeToString() for request in requests]
    path.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
    before = process_cpu_s(server.process.pid)
    done = await trio.run_process(
        [sys.executable, str(LOAD_CLIENT), str(server.grpc_port), service + method, str(path), str(in_flight)],
        capture_stdout=True,
        stdin=subprocess.DEVNULL,
    )
    result = json.loads(done.stdout)
    if result["failures"]:
        raise SystemExit(f"calls failed: {result['failures']}")
    return Load(result["seconds"], process_cpu_s(server.process.pid) - before)
