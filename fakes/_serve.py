"""Start-up of a provider fake as a process: certificates, ports, one JSON line, the end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ._control import obey_provider, serve_control
from ._provider import Provider
from ._tls import Authority, server_context

Start = Callable[[argparse.Namespace, Path], Provider]


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every provider fake has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--port", type=int, default=0, help="TLS port on 127.0.0.1; 0 picks one")
    parser.add_argument("--control-port", type=int, default=0, help="port for scripts and records; 0 picks one")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time before each answer")
    parser.add_argument("--streams", type=int, default=1_000, help="MAX_CONCURRENT_STREAMS")
    parser.add_argument("--record", type=int, default=10_000, help="requests kept for GET /requests; 0 keeps none")
    parser.add_argument("--folder", type=Path, help="where certificates and keys are put; a temporary one if not given")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input closes")
    return parser


def run(
    options: argparse.Namespace,
    provider: Provider,
    protocol: Callable[[], asyncio.Protocol],
    alpn: tuple[str, ...],
    describe: Callable[[int, Path], dict[str, Any]],
) -> None:
    """Serve until told to stop. The first line on standard output says where everything is."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fake-"))
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_run(options, provider, protocol, alpn, describe, folder))


async def _run(
    options: argparse.Namespace,
    provider: Provider,
    protocol: Callable[[], asyncio.Protocol],
    alpn: tuple[str, ...],
    describe: Callable[[int, Path], dict[str, Any]],
    folder: Path,
) -> None:
    loop = asyncio.get_running_loop()
    authority = Authority()
    ca = folder / "ca.pem"
    ca.write_bytes(authority.pem)
    context = server_context(authority.issue(), folder, alpn)
    server = await loop.create_server(protocol, "127.0.0.1", options.port, ssl=context)
    control = await serve_control(partial(obey_provider, provider), options.control_port)
    port = server.sockets[0].getsockname()[1]
    line = {
        "port": port,
        "control_port": control.sockets[0].getsockname()[1],
        "ca": str(ca),
        "pid": os.getpid(),
        **describe(port, folder),
    }
    gc.freeze()  # what exists now stays; the collector need not walk it under load
    print(json.dumps(line), flush=True)
    if options.exit_with_stdin:
        await loop.run_in_executor(None, sys.stdin.buffer.read)
    else:
        await asyncio.Event().wait()
    server.close()
    control.close()
