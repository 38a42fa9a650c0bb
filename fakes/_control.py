"""The control side of a fake: JSON over plain HTTP/1.1 on a loopback port of its own.

A provider fake obeys these commands:

POST /script    {"token": …, "answers": [answer, …]}   used in order, then the default again
POST /default   answer or null                          for every token without a script
POST /latency   {"ms": …}
POST /settings  {"max_concurrent_streams": …, "initial_window_size": …}   announced on every connection
POST /goaway    {"code": 0, "last_stream_id": …, "debug": ""}             on every connection
POST /close                                             cuts every connection
POST /reset                                             forgets scripts, records and counters
GET  /stats  ·  GET /requests
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any

from ._provider import INITIAL_WINDOW_SIZE, MAX_CONCURRENT_STREAMS, Provider

_SETTINGS = {"max_concurrent_streams": MAX_CONCURRENT_STREAMS, "initial_window_size": INITIAL_WINDOW_SIZE}


async def serve_control(obey: Callable[[str, str, Any], Any], port: int) -> asyncio.Server:
    """Listen for commands on 127.0.0.1.

    Args:
        obey: gets method, path and the body's JSON value; returns the answer's. A KeyError, TypeError or ValueError is
            answered with status 400.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read_request(reader):
                method, path, body = request
                try:
                    reply, status = obey(method, path, json.loads(body) if body else None), 200
                except (KeyError, TypeError, ValueError) as error:
                    reply, status = {"error": f"{type(error).__name__}: {error}"}, 400
                writer.write(http_reply(status, json.dumps(reply).encode()))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", port)


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes] | None:
    """Method, path and body of the next HTTP/1.1 request, None at the end of the connection."""
    line = await reader.readline()
    if not line:
        return None
    method, path, _ = line.decode("latin-1").split(" ", 2)
    length = 0
    while (header := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = header.decode("latin-1").partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return method, path, await reader.readexactly(length)


def http_reply(status: int, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """An HTTP/1.1 answer."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode("latin-1") + body


def obey_provider(provider: Provider, method: str, path: str, order: Any) -> Any:
    """Do what a command asks of a provider fake."""
    match method, path:
        case "GET", "/stats":
            return provider.statistics()
        case "GET", "/requests":
            return [request.as_json() for request in provider.recorded]
        case "POST", "/script":
            provider.scripts[order["token"]] = deque(provider.shorthand(answer) for answer in order["answers"])
        case "POST", "/default":
            provider.default = None if order is None else provider.shorthand(order)
        case "POST", "/latency":
            provider.latency_s = order["ms"] / 1_000
        case "POST", "/settings":
            changed = {_SETTINGS[name]: int(value) for name, value in order.items()}
            provider.settings.update(changed)
            for connection in list(provider.connections):
                connection.announce(changed)
        case "POST", "/goaway":
            for connection in list(provider.connections):
                connection.leave(
                    order.get("code", 0),
                    last_stream_id=order.get("last_stream_id"),
                    debug=order.get("debug", "").encode(),
                )
        case "POST", "/close":
            for connection in list(provider.connections):
                connection.transport.abort()
        case "POST", "/reset":
            provider.forget()
        case _:
            raise ValueError("no such command")
    return {}
