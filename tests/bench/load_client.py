"""Sends prepared request bodies to one method as fast as they are answered: grpcio in a process of its own.

`python tests/bench/load_client.py PORT METHOD FILE IN_FLIGHT`; the file holds bodies, each after its length in four
bytes. Prints one JSON line: seconds, and how many calls ended in which status other than OK. Imports nothing of pushd,
so that server and client can only agree about the wire.
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys
import time
from pathlib import Path

import grpc


def read_bodies(path: Path) -> list[bytes]:
    data, bodies, start = path.read_bytes(), [], 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "big")
        bodies.append(data[start + 4 : end])
        start = end
    return bodies


async def send_all(port: int, method: str, bodies: list[bytes], in_flight: int) -> dict[str, object]:
    failures: collections.Counter[str] = collections.Counter()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        call = channel.unary_unary(method)
        waiting = iter(bodies)

        async def worker() -> None:
            for body in waiting:
                try:
                    await call(body)
                except grpc.RpcError as error:
                    failures[error.code().name] += 1

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(in_flight)))
        return {"seconds": time.perf_counter() - started, "failures": dict(failures)}


def main() -> None:
    port, method, path, in_flight = sys.argv[1:]
    print(json.dumps(asyncio.run(send_all(int(port), method, read_bodies(Path(path)), int(in_flight)))))


if __name__ == "__main__":
    main()
