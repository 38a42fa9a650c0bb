"""A real `pushd serve` to shoot at: its log is watched, and so is what it holds."""

from __future__ import annotations

import ctypes
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

import trustme

from tests.config.support import pem, service_account
from tests.fuzz.engine import memory_mib
from tests.fuzz.messages import tells_private
from tests.support.server import START_S, base_config, toml

QUIET_S = 20.0  # for what an input began to be over


class Server:
    """A running server with all channels, none of which leads anywhere."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self.folder = folder
        self._ready = threading.Event()
        self.port = 0
        self.complaints: list[str] = []
        """Log lines that no request may cause, and those with something private in them."""
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

    def vitals(self) -> dict[str, float]:
        """What must not grow."""
        measures = self.measures()
        running = sum(value for name, value in measures.items() if name.startswith("grpc_server_in_flight"))
        return {
            "server_rss_mib": memory_mib(self._process.pid, "VmRSS"),
            "server_peak_mib": memory_mib(self._process.pid, "VmHWM"),
            "tasks": measures["pushd_tasks"],
            "descriptors": measures["process_open_fds"],
            "connections": measures["grpc_server_connections"],
            "calls": running,
        }

    def settled(self, level: dict[str, float]) -> dict[str, float]:
        """The vitals once all of them are down to `level`, or those that are not after QUIET_S."""
        deadline = time.monotonic() + QUIET_S
        while True:
            vitals = self.vitals()
            if all(vitals[name] <= value for name, value in level.items()) or time.monotonic() > deadline:
                return vitals
            time.sleep(0.05)

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
            if event.get("level") not in ("debug", "info", "warning") or tells_private(line):
                self.complaints.append(line.decode(errors="replace"))
        self._ready.set()


def _configuration(**server: Any) -> dict[str, Any]:
    nowhere = "https://127.0.0.1:9"  # the discard port: nobody answers, and nothing leaves this machine
    return base_config(
        server={"log_level": "debug", **server},
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
def running_server(*, tls: bool = False, extra_toml: str = "") -> Iterator[Server]:
    """A server on a database of its own; both are gone at the end.

    Args:
        tls: whether the gRPC port speaks TLS; the authority to trust is `ca.pem` in the server's folder.
        extra_toml: further tables of its configuration.
    """
    folder = Path(tempfile.mkdtemp(prefix="pushd-"))
    path = folder / "pushd.toml"
    files: dict[str, str] = {}
    if tls:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(folder / "ca.pem")
        issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        issued.private_key_pem.write_to_path(folder / "key.pem")
        files = {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
    path.write_text(toml(_configuration(**files)) + extra_toml)
    argv = [sys.executable, "-m", "pushd", "serve", "--config", str(path), "--data-dir", str(folder / "data")]
    process = subprocess.Popen(
        argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=dict(os.environ), preexec_fn=_end_with_parent
    )
    server = Server(process, folder)
    try:
        server.wait_ready()
        yield server
        server.check()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        server._reader.join(10)
        assert not server.complaints, server.complaints[:3]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            server._reader.join(10)
            process.stderr.close()
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    """Let the server drain when whoever throws things at it is gone (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
