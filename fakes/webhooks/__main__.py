"""`python -m fakes.webhooks`: serve until told to stop. The first line on standard output says where everything is.

The control port speaks JSON over plain HTTP/1.1, on 127.0.0.1:

    POST /script    {"token": "/path", "answers": [{"status": 503}, …]}   used in order, then the default again
    POST /default   {"delay_ms": 50}                                      for every path without script or query
    POST /keys      {"<recipient hex>": "<base64 key>", …}                verify requests of these recipients
    POST /close     cuts every connection
    POST /reset     forgets scripts, records and counters
    GET  /stats  ·  GET /requests  ·  GET /requests?after=<number>
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import os
import ssl
import sys
import tempfile
from collections import deque
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from .._control import serve_control
from .._tls import Authority, Leaf, server_context
from .behaviour import behaviour
from .receiver import Connection, Receiver

HOST_NAMES = ("push.invalid", "*.hooks.invalid")


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="fakes.webhooks", description="A webhook receiver that can misbehave.")
    parser.add_argument("--port", type=int, default=0, help="TLS port on 127.0.0.1; 0 picks one")
    parser.add_argument("--control-port", type=int, default=0, help="port for scripts and records; 0 picks one")
    parser.add_argument("--name", action="append", default=[], help="further host name of the certificate")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time before each answer")
    parser.add_argument("--key", type=base64.b64decode, help="base64 signing key of every recipient")
    parser.add_argument("--record", type=int, default=10_000, help="requests kept for GET /requests; 0 keeps none")
    parser.add_argument("--bad-tls", action="store_true", help="also listen with certificates no client may accept")
    parser.add_argument("--folder", type=Path, help="where certificates are put; a temporary one if not given")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input closes")
    asyncio.run(_serve(parser.parse_args()))


async def _serve(options: argparse.Namespace) -> None:
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fake-"))
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority()
    ca = folder / "ca.pem"
    ca.write_bytes(authority.pem)
    receiver = Receiver(latency_ms=options.latency_ms, record=options.record, key=options.key)
    names = (*HOST_NAMES, *options.name)
    servers = [await _listen(receiver, authority.issue(*names), folder, options.port)]
    bad: dict[str, Leaf] = {}
    if options.bad_tls:
        bad = {
            "wrong_name": authority.issue("elsewhere.invalid", local=False),
            "expired": authority.issue(*names, expired=True),
            "unknown_authority": Authority().issue(*names),
        }
    servers += [await _listen(receiver, leaf, folder, 0) for leaf in bad.values()]
    control = await serve_control(partial(_obey, receiver), options.control_port)
    port, *bad_ports = [server.sockets[0].getsockname()[1] for server in servers]
    line = {
        "port": port,
        "control_port": control.sockets[0].getsockname()[1],
        "ca": str(ca),
        "pid": os.getpid(),
        "endpoint": f"https://localhost:{port}",
        "names": ["localhost", *names],
        "bad_tls": dict(zip(bad, bad_ports, strict=True)),
    }
    gc.freeze()  # what exists now stays; the collector need not walk it under load
    print(json.dumps(line), flush=True)
    if options.exit_with_stdin:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    else:
        await asyncio.Event().wait()


async def _listen(receiver: Receiver, leaf: Leaf, folder: Path, port: int) -> asyncio.Server:
    context = server_context(leaf, folder, ("http/1.1",))
    context.sni_callback = _remember_name
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(receiver), "127.0.0.1", port, ssl=context, backlog=1_024)


def _remember_name(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
    tls.fakes_server_name = name  # type: ignore[attr-defined]


def _obey(receiver: Receiver, method: str, target: str, order: Any) -> Any:
    path, _, query = target.partition("?")
    match method, path:
        case "GET", "/stats":
            return receiver.statistics()
        case "GET", "/requests":
            after = int(query.removeprefix("after=") or 0)
            return [kept.as_json() for kept in dropwhile(lambda kept: kept.number <= after, receiver.records)]
        case "POST", "/script":
            receiver.scripts[order["token"]] = deque(map(behaviour, order["answers"]))
        case "POST", "/default":
            receiver.default = behaviour(order or {})
        case "POST", "/keys":
            receiver.keys |= {recipient: base64.b64decode(key) for recipient, key in order.items()}
        case "POST", "/close":
            for connection in list(receiver.open):
                connection.abort()
        case "POST", "/reset":
            receiver.forget()
        case _:
            raise ValueError("no such command")
    return {}


if __name__ == "__main__":
    main()
