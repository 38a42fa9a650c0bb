"""Streams of a whole `pushd serve` process: delivery times at a steady rate, and the memory of many idle streams.

    python -m tests.bench.bench_streams

First 1,000 static streams of 10 topics each are opened on a fresh server. Then 500 envelopes a second are published
over gRPC, in calls of ten to one topic: to topics of which each of 100 subscribers follows ten of its own (`own_*`),
and to ten topics that all of them follow, so that every envelope goes out a hundred times. A delivery takes from the
start of the publish call to the moment the subscriber has the decoded envelope; the subscribers and the publisher live
in this process.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from pushd.rpc.client import Channel, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishRequest, PublishResponse
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Cursor, Topic, TopicQuery
from tests.bench.measuring import OFFERED_BOUND, cpu_s, line, peak_rss_mib, rss_mib
from tests.support.envelopes import group_envelope
from tests.support.server import base_config, running_server

POLL_S = 0.1
PUBLISH = "/xmtp.backend.v1.PublishService/Publish"
STATIC = "/xmtp.backend.v1.SubscriptionService/SubscribeStatic"
BODY_BYTES = 512
TOPICS = 10  # of one subscriber
STREAMS_PER_CONNECTION = 100
TICK_S = 0.02  # between two publishes


def group(number: int) -> bytes:
    return number.to_bytes(16, "big")


def static_request(topics: Sequence[bytes], cursor: int) -> wire.SubscribeStaticRequest:
    return wire.SubscribeStaticRequest(
        topics=[TopicQuery(topic=Topic(topic=b"\x00" + one), cursor=Cursor(sequence_id=cursor)) for one in topics]
    )


@asynccontextmanager
async def channels(port: int, count: int) -> AsyncIterator[list[Channel]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_channel("127.0.0.1", port)) for _ in range(count)]


class Subscriber:
    """Keeps when each envelope came."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, list[int]]] = []
        self.count = 0

    async def run(
        self, channel: Channel, request: wire.SubscribeStaticRequest, *, task_status: trio.TaskStatus[None]
    ) -> None:
        async with channel.stream(STATIC, wire.SubscribeStaticResponse, deadline_s=math.inf) as call:
            await call.send(request)
            call.half_close()
            async for response in call:
                if response.HasField("started"):
                    task_status.started()
                elif response.HasField("messages"):
                    ids = [envelope.meta.cursor.sequence_id for envelope in response.messages.envelopes]
                    self.arrivals.append((time.perf_counter(), ids))
                    self.count += len(ids)


async def publish(channel: Channel, groups: int, rate: int, seconds: float, sent: dict[int, float]) -> None:
    """Envelopes at a steady rate to the groups in turn; `sent` gets the start of the call that stored each."""
    batch = max(1, round(rate * TICK_S))
    body = os.urandom(BODY_BYTES)

    async def call(number: int) -> None:
        envelopes = [
            group_envelope(group(number % groups), body=body + number.to_bytes(8, "big") + bytes((n,)))
            for n in range(batch)
        ]
        started = time.perf_counter()
        response = await channel.unary(PUBLISH, PublishRequest(envelopes=envelopes), PublishResponse, deadline_s=20)
        for meta in response.envelope_metas:
            sent[meta.cursor.sequence_id] = started

    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(round(seconds / TICK_S)):
            await trio.sleep_until(begin + number * TICK_S)
            nursery.start_soon(call, number)


async def measure_delivery(
    port: int, pid: int, rate: int, seconds: float, subscribers: int, *, shared: bool
) -> dict[str, Any]:
    readers = [Subscriber() for _ in range(subscribers)]
    sent: dict[int, float] = {}
    groups = TOPICS if shared else TOPICS * subscribers

    def delivered() -> int:
        return sum(reader.count for reader in readers)

    async with channels(port, 5) as opened, trio.open_nursery() as nursery:
        for number, reader in enumerate(readers):
            first = 0 if shared else TOPICS * number
            request = static_request([group(first + n) for n in range(TOPICS)], 0)
            await nursery.start(reader.run, opened[1 + number % 4], request)
        await publish(opened[0], groups, rate, 1.0, {})  # warm up
        await trio.sleep(1)
        for reader in readers:
            reader.arrivals.clear()
            reader.count = 0
        cpu, own_cpu, started = cpu_s(pid), time.process_time(), time.perf_counter()
        await publish(opened[0], groups, rate, seconds, sent)
        due = len(sent) * (subscribers if shared else 1)
        with trio.move_on_after(30):
            while delivered() < due:  # noqa: ASYNC110 - telling would cost time
                await trio.sleep(0.01)
        elapsed = time.perf_counter() - started
        cpu, own_cpu = cpu_s(pid) - cpu, time.process_time() - own_cpu
        nursery.cancel_scope.cancel()
    got = sorted(n for reader in readers for _, ids in reader.arrivals for n in ids)
    assert got == sorted(list(sent) * (due // len(sent))), "every delivery once"
    delays = sorted((at - sent[n]) / POLL_S for reader in readers for at, ids in reader.arrivals for n in ids)
    return {
        "rate": round(due / elapsed),
        "cpu_us_per_item": round(cpu / due * 1e6, 2),
        "client_cpu_us_per_item": round(own_cpu / due * 1e6, 2),
        "delay_p50_intervals": round(statistics.median(delays), 2),
        "delay_p99_intervals": round(delays[int(due * 0.99)], 2),
        "delay_max_intervals": round(delays[-1], 2),
    }


async def measure_memory(port: int, pid: int, streams: int) -> dict[str, Any]:
    before = rss_mib(pid)
    async with channels(port, -(-streams // STREAMS_PER_CONNECTION)) as opened, trio.open_nursery() as nursery:
        for number in range(streams):
            topics = [group(1_000_000 + number * TOPICS + n) for n in range(TOPICS)]
            request = static_request(topics, 0)
            await nursery.start(Subscriber().run, opened[number // STREAMS_PER_CONNECTION], request)
        after = rss_mib(pid)
        cpu, started = cpu_s(pid), time.perf_counter()
        await trio.sleep(3)
        idle_cpu = (cpu_s(pid) - cpu) / (time.perf_counter() - started)
        nursery.cancel_scope.cancel()
    return {
        "static_streams": streams,
        "static_rss_mib": round(after, 1),
        "static_kib_per_stream": round((after - before) * 1024 / streams, 1),
        "static_idle_cpu": round(idle_cpu, 3),
    }


async def measure(arguments: argparse.Namespace) -> str:
    config = base_config(server={"request_logger": False})
    with tempfile.TemporaryDirectory(prefix="pushd-bench-") as folder:
        async with running_server(Path(folder), config) as server:
            pid = server.process.pid
            # First, while nothing else has made the process grow.
            memory = await measure_memory(server.grpc_port, pid, arguments.streams)
            load = server.grpc_port, pid, arguments.rate, arguments.seconds, arguments.subscribers
            own = await measure_delivery(*load, shared=False)
            delivery = await measure_delivery(*load, shared=True)
            peak = peak_rss_mib(pid)
            server.process.terminate()
            await server.wait_exit()
    return line(
        "streams",
        **delivery,
        bound=arguments.rate * arguments.subscribers,
        bound_is=OFFERED_BOUND,
        rss_mib=peak,
        target={"delay_p99_intervals": 2},
        **{f"own_{name}": figure for name, figure in own.items()},
        **memory,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--subscribers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--streams", type=int, default=1_000)
    print(trio.run(measure, parser.parse_args()))


if __name__ == "__main__":
    main()
