"""Unary echo calls through the whole edge, 64 in flight on one connection.

The server is a process of its own, kept on one core; this process is the load. It writes prepared frames, as grpcio's
would look once its header table has settled, and only counts what comes back, so that the server is what is measured.
CPU a call is the server's, from the kernel's accounting; it is the figure to compare on a busy machine. A second run
writes the log line of every call, to nowhere.

`--grpcio` uses grpcio's asyncio client instead, as a check that the prepared frames flatter nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from typing import Any

import trio
from hpack import Encoder

from pushd.rpc.machine.framing import encode_message
from pushd.rpc.server import serve_rpc
from pushd.rpc.settings import RpcSettings
from pushd.stop import StopSignal
from pushd.telemetry import Metrics, configure_logging
from tests.bench.measuring import cpu_s, line, peak_rss_mib
from tests.rpc.harness import UNARY, Echo, message

CALLS = 20_000
IN_FLIGHT = 64
TARGET = 4_000
PAYLOAD = message(b"x" * 32)

_END_STREAM, _END_HEADERS = 1, 4
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def run_server(log_calls: bool, profile: str | None) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    configure_logging("info", "json")

    async def serve() -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        print(listeners[0].socket.getsockname()[1], flush=True)
        stop = StopSignal()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_at_end_of_input, stop)
            await serve_rpc([Echo()], listeners, RpcSettings(log_calls=log_calls), metrics=Metrics(), stop=stop)

    if profile is None:
        trio.run(serve)
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.runcall(trio.run, serve)
    profiler.dump_stats(profile)


async def _stop_at_end_of_input(stop: StopSignal) -> None:
    await trio.to_thread.run_sync(sys.stdin.read)
    stop.request(trio.current_time() + 1)


class Load:
    """A closed loop: as many new calls as have just ended."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = [
            (":scheme", "http"),
            (":method", "POST"),
            (":authority", f"127.0.0.1:{port}"),
            (":path", UNARY),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-python/1.85.3 grpc-c/52.0.0 (linux; chttp2)"),
            ("grpc-accept-encoding", "identity, deflate, gzip"),
            ("grpc-timeout", "10S"),
        ]
        encoder = Encoder()
        self._first, self._block = encoder.encode(headers), encoder.encode(headers)
        self._body = encode_message(PAYLOAD)
        self._next_id = 1
        self._input = b""
        window = frame(_WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4, "big"))
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, b"") + window)

    def start(self, count: int) -> None:
        out = bytearray()
        for _ in range(count):
            block, self._first = self._first or self._block, b""
            out += frame(_HEADERS, _END_HEADERS, self._next_id, block)
            out += frame(_DATA, _END_STREAM, self._next_id, self._body)
            self._next_id += 2
        self.socket.sendall(out)

    def finished(self) -> int:
        """Reads once; the number of calls that have ended OK."""
        data = self._input + self.socket.recv(262_144)
        start, ended = 0, 0
        while len(data) - start >= 9:
            end = start + 9 + int.from_bytes(data[start : start + 3], "big")
            if end > len(data):
                break
            kind, flags = data[start + 3], data[start + 4]
            if kind == _HEADERS and flags & _END_STREAM:
                assert data[start + 9 : end].endswith(b"grpc-status\x010")
                ended += 1
            elif kind == _SETTINGS and not flags:
                self.socket.sendall(frame(_SETTINGS, 1, 0, b""))
            assert kind != _GOAWAY
            start = end
        self._input = data[start:]
        return ended

    def run(self, calls: int) -> None:
        self.start(min(IN_FLIGHT, calls))
        started, done = min(IN_FLIGHT, calls), 0
        while done < calls:
            ended = self.finished()
            done += ended
            more = min(ended, calls - started)
            if more:
                self.start(more)
                started += more


async def run_grpcio(port: int, calls: int) -> None:
    import grpc.aio

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_unary(UNARY)
        turns = iter(range(calls))

        async def work() -> None:
            for _ in turns:
                await method(PAYLOAD, timeout=10)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


def measure(*, log_calls: bool, grpcio: bool, profile: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.bench_grpc_edge", "--server", *(["--log"] if log_calls else [])]
    command += ["--profile", profile] if profile else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())

        def run(calls: int) -> None:
            if grpcio:
                asyncio.run(run_grpcio(port, calls))
            else:
                load.run(calls)

        load = Load(port)
        run(2_000)  # warm
        cpu, began = cpu_s(server.pid), time.perf_counter()
        run(CALLS)
        elapsed, cpu = time.perf_counter() - began, cpu_s(server.pid) - cpu
        rss = peak_rss_mib(server.pid)
        server.communicate()
    return {"rate": CALLS / elapsed, "cpu_us": cpu / CALLS * 1e6, "rss_mib": rss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", action="store_true", help="be the server (used by the benchmark itself)")
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--grpcio", action="store_true", help="load from grpcio's client")
    parser.add_argument("--profile", help="write the server's cProfile data here")
    options = parser.parse_args()
    if options.server:
        run_server(options.log, options.profile)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    plain = measure(log_calls=False, grpcio=options.grpcio, profile=options.profile)
    logged = measure(log_calls=True, grpcio=options.grpcio, profile=None)
    print(
        line(
            "grpc-edge",
            rate=plain["rate"],
            cpu_us_per_item=plain["cpu_us"],
            rss_mib=plain["rss_mib"],
            target={"rate": TARGET},
            rate_of_one_core=round(1e6 / plain["cpu_us"]),
            rate_with_log_lines=round(logged["rate"]),
            cpu_us_per_item_with_log_lines=round(logged["cpu_us"], 1),
        )
    )


if __name__ == "__main__":
    main()
