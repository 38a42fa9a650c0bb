"""Runs `pushd serve` as a real process and waits for its `ready` event instead of for a duration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tests.support.lifeline import lifeline

START_S = 60  # generous: the machine may be busy with other work


def toml(document: Mapping[str, Any]) -> str:
    """A TOML text of tables holding strings, numbers, booleans and lists."""
    lines: list[str] = []

    def table(prefix: str, node: Mapping[str, Any]) -> None:
        if prefix:
            lines.append(f"[{prefix}]")
        for key, value in node.items():
            if not isinstance(value, Mapping):
                lines.append(f"{key} = {json.dumps(value)}")
        for key, value in node.items():
            if isinstance(value, Mapping):
                table(f"{prefix}.{key}" if prefix else key, value)

    table("", document)
    return "\n".join(lines) + "\n"


class ServerProcess:
    """A running server: its addresses, its log so far, and the process to signal or kill."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.grpc = ""
        self.metrics: str | None = ""
        self._changed = trio.Event()
        self._ended = False

    @property
    def grpc_port(self) -> int:
        return int(self.grpc.rpartition(":")[2])

    async def wait_event(self, name: str, *, after: int = 0) -> dict[str, Any]:
        """The first log event `name` at or after position `after` of `events`."""
        while True:
            for event in self.events[after:]:
                if event.get("event") == name:
                    return event
            if self._ended:
                raise AssertionError(f"the server ended without {name!r}:\n" + "\n".join(self.lines[-30:]))
            await self._changed.wait()

    async def wait_exit(self) -> int:
        """The exit code, once the process ended."""
        return await self.process.wait()

    async def wait_ended(self) -> None:
        """Return once the whole log was read, which is after the process ended."""
        while not self._ended:
            await self._changed.wait()

    def send_signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        buffer = b""
        async for chunk in self.process.stderr:
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))
        self._ended = True
        self._wake()

    def _take(self, line: str) -> None:
        self.lines.append(line)
        try:
            event = json.loads(line)
        except ValueError:
            return
        if isinstance(event, dict):
            self.events.append(event)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def base_config(**tables: Any) -> dict[str, Any]:
    """Free ports and JSON logs; `tables` are merged over it."""
    document: dict[str, Any] = {
        "server": {"listen": "127.0.0.1:0", "log_format": "json", "max_drain_duration_ms": 20_000},
        "telemetry": {"metrics_listen": "127.0.0.1:0"},
    }
    for name, table in tables.items():
        document[name] = {**document.get(name, {}), **table}
    return document


@asynccontextmanager
async def running_server(
    folder: Path,
    config: Mapping[str, Any],
    *,
    data_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
    wait_ready: bool = True,
    extra_toml: str = "",
    before: Sequence[str] = (),
) -> AsyncIterator[ServerProcess]:
    """Start a server with `config` and then `extra_toml`; at the end it is killed if it still runs.

    `before` is put in front of its command line: a program that becomes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pushd.toml"
    path.write_text(toml(config) + extra_toml)
    argv = [*before, sys.executable, "-m", "pushd", "serve", "--config", str(path)]
    argv += ["--data-dir", str(data_dir or folder / "data")]
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**os.environ, **(environ or {})}
        )
        lifeline().watch(process.pid)
        server = ServerProcess(process)
        nursery.start_soon(server._read)
        try:
            if wait_ready:
                with trio.fail_after(START_S):
                    ready = await server.wait_event("ready")
                server.grpc, server.metrics = ready["grpc"], ready["metrics"]
            yield server
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            lifeline().forget(process.pid)
            nursery.cancel_scope.cancel()
