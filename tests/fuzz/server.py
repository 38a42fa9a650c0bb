"""A real `pushd serve` to shoot at: its log is watched, and so is what it holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.config.support import pem, service_account
from tests.support.server import START_S, base_config, toml

QUIET_S = 30.0  # for connections to be seen as gone


class Server:
    """A running server with all channels, none of which leads anywhere."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ready = threading.Event()
        self.port = 0
        self.complaints: list[str] = []
        """Log lines that no request may cause."""
        self._metrics = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        assert self._ready.wait(START_S), "the server did not start"
        assert self.port, "the server ended"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """It lives and has nothing to complain about."""
        assert self.is_alive, "the server ended"
        assert not self.complaints, self.complaints[:3]

    def measures(self) -> dict[str, float]:
        """Its metrics by their whole names."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def vitals(self, connections: int) -> dict[str, float]:
        """What must not grow, once no more than so many connections are open."""
        deadline = time.monotonic() + QUIET_S
        while True:
            measures = self.measures()
            if measures["grpc_server_connections"] <= connections or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        time.sleep(0.5)
        measures = self.measures()
        running = sum(value for name, value in measures.items() if name.startswith("grpc_server_in_flight"))
        return {
            "server_rss_mib": round(measures["process_resident_memory_bytes"] / 2**20, 1),
            "tasks": measures["pushd_tasks"],
            "descriptors": measures["process_open_fds"],
            "connections": measures["grpc_server_connections"],
            "calls": running,
        }

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"level": "critical"}
            if event.get("event") == "ready":
                self.port, self._metrics = int(event["grpc"].rpartition(":")[2]), event["metrics"]
                self._ready.set()
            if event.get("level") not in ("debug", "info", "warning"):
                self.complaints.append(line.decode(errors="replace"))
        self._ready.set()


def _configuration() -> dict[str, Any]:
    nowhere = "https://127.0.0.1:9"  # the discard port: nobody answers, and nothing leaves this machine
    return base_config(
        server={"request_logger": False},
        push={
            "max_attempts": 1,
            "apns": {
                "key": pem(),
                "key_id": "ABC123DEFG",
                "team_id": "TEAM123456",
                "bundle_id": "org.example.fuzz",
                "environment": "sandbox",
                "endpoint": nowhere,
            },
            "fcm": {"service_account": service_account(token_uri=f"{nowhere}/token"), "endpoint": nowhere},
            "http": {"allowed_domains": ["hooks.invalid", "*.invalid"]},
        },
    )


@contextmanager
def running_server() -> Iterator[Server]:
    """A server on a database of its own; both are gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="pushd-"))
    path = folder / "pushd.toml"
    path.write_text(toml(_configuration()))
    argv = [sys.executable, "-m", "pushd", "serve", "--config", str(path), "--data-dir", str(folder / "data")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=dict(os.environ))
    server = Server(process)
    try:
        server.wait_ready()
        yield server
        server.check()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            server._reader.join(10)
            process.stderr.close()
        shutil.rmtree(folder, ignore_errors=True)
