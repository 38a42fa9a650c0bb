"""Streams of a hub and a tailer inside the test, on a real database and behind the real gRPC edge.

`Following` is a subscriber that keeps what it gets; `Publishing` an open transaction that stores envelopes as the
product does, so that a test decides when, and whether, each becomes visible.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import trio
from attrs import define, evolve, field, frozen

from pushd.backend.boundary import BoundaryTask
from pushd.backend.streams import Streams, StreamSettings
from pushd.backend.tailer import Tailer
from pushd.core.outbound import FRAME_BYTES
from pushd.core.topics import topic_lock_key
from pushd.rpc.client import Channel, ClientCall, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Cursor, ServerEnvelope, Topic, TopicQuery
from pushd.rpc.server import serve_rpc
from pushd.rpc.services.subscription import FrameRates, SubscriptionService
from pushd.rpc.settings import RpcSettings
from pushd.rpc.translate_stream import encode_envelope
from pushd.stop import StopSignal
from pushd.store.boundary import advance_boundary
from pushd.store.database import Database
from pushd.store.queries import query
from pushd.store.streams import StreamStore
from pushd.store.tailer import TailerStore
from pushd.telemetry import Metrics
from tests.support.envelopes import group_envelope

DYNAMIC = "/xmtp.backend.v1.SubscriptionService/Subscribe"
STATIC = "/xmtp.backend.v1.SubscriptionService/SubscribeStatic"
POLL_S = 0.01
DEFAULTS = StreamSettings()
RATES = FrameRates()
QUIET = RpcSettings(log_calls=False)


def topic(number: int) -> bytes:
    """A group's topic."""
    return b"\x00" + number.to_bytes(16, "big")


def topic_queries(cursors: dict[bytes, int]) -> list[TopicQuery]:
    return [TopicQuery(topic=Topic(topic=one), cursor=Cursor(sequence_id=at)) for one, at in cursors.items()]


def update(number: int, adds: dict[bytes, int] | None = None, removes: Iterable[bytes] = ()) -> wire.SubscribeRequest:
    """An Update frame."""
    return wire.SubscribeRequest(
        update=wire.SubscribeRequest.Update(
            id=number, adds=topic_queries(adds or {}), removes=[Topic(topic=one) for one in removes]
        )
    )


@contextmanager
def publishing(database_url: str) -> Iterator[Publishing]:
    """A session to publish with, one transaction after another."""
    with psycopg.connect(database_url) as conn:
        yield Publishing(conn)


@frozen
class Publishing:
    """Publishes in a transaction that stays open until `commit` or `rollback`; it holds the topics and the barrier."""

    conn: psycopg.Connection[Any]

    def store(self, topics: Sequence[bytes], size: int = 16) -> list[int]:
        """Store one envelope a topic named, repeats included; their ids."""
        payloads = [group_envelope(one[1:], body=os.urandom(size)).SerializeToString() for one in topics]
        rows = self.conn.execute(
            query("publish_envelopes").encode(),
            {
                "lock_keys": sorted({topic_lock_key(one) for one in topics}),
                "topics": list(topics),
                "hashes": [os.urandom(32) for _ in topics],
                "payloads": payloads,
                "hmacs": [None] * len(topics),
                "retentions_ns": [None] * len(topics),
                "commits": [False] * len(topics),
                "eligible": [True] * len(topics),
                "admissible": [True] * len(topics),
            },
        ).fetchall()
        return [row[0] for row in rows]

    def publish(self, topics: Sequence[bytes], size: int = 16) -> list[int]:
        """Store and commit."""
        ids = self.store(topics, size)
        self.conn.commit()
        return ids


@define
class World:
    """Everything that runs, and a channel to it."""

    channel: Channel
    port: int
    streams: Streams
    tailer: Tailer
    boundary: BoundaryTask
    metrics: Metrics
    stop: StopSignal

    @asynccontextmanager
    async def follow(self, first: wire.SubscribeRequest | None = None) -> AsyncIterator[Following]:
        """A `Subscribe` stream, its Started frame read and `first` sent."""
        async with self.channel.stream(DYNAMIC, wire.SubscribeResponse, deadline_s=math.inf) as call:
            following = Following(call)
            await following.read_until(lambda: following.keepalive_ms > 0)
            if first is not None:
                await call.send(first)
            yield following

    @asynccontextmanager
    async def follow_static(self, cursors: dict[bytes, int]) -> AsyncIterator[Following]:
        """A `SubscribeStatic` stream, its Started frame read."""
        async with self.channel.stream(STATIC, wire.SubscribeStaticResponse, deadline_s=math.inf) as call:
            await call.send(wire.SubscribeStaticRequest(topics=topic_queries(cursors)))
            call.half_close()
            following = Following(call)
            await following.read_until(lambda: following.keepalive_ms > 0)
            yield following


@define(eq=False)
class Following:
    """A subscriber: what came on its stream, in order."""

    call: ClientCall[Any]
    keepalive_ms: int = 0
    targets: list[tuple[bytes, int]] = field(factory=list)
    envelopes: list[ServerEnvelope] = field(factory=list)
    applied: list[wire.SubscribeResponse.Applied] = field(factory=list)
    frames: list[Any] = field(factory=list)
    answers_pings: bool = True

    @property
    def ids(self) -> list[int]:
        """Sequence ids in the order they came."""
        return [one.meta.cursor.sequence_id for one in self.envelopes]

    def ids_of(self, wanted: bytes) -> list[int]:
        return [one.meta.cursor.sequence_id for one in self.envelopes if one.meta.topic.topic == wanted]

    async def read(self) -> bool:
        """Take one frame; False at the end of the stream. Raises StatusError when it failed."""
        response = await self.call.receive()
        if response is None:
            return False
        self.frames.append(response)
        match response.WhichOneof("response"):
            case "started":
                self.keepalive_ms = response.started.keepalive_interval_ms
                if isinstance(response, wire.SubscribeStaticResponse):
                    self.targets = targets_of(response.started.targets)
            case "applied":
                self.applied.append(response.applied)
            case "messages":
                self.envelopes += response.messages.envelopes
            case "ping" if self.answers_pings:
                await self.call.send(wire.SubscribeRequest(pong=wire.Pong(nonce=response.ping.nonce)))
        return True

    async def read_until(self, done: Any) -> None:
        """Take frames until `done()`."""
        with trio.fail_after(20):
            while not done():
                assert await self.read(), "the stream ended"

    async def read_ids(self, ids: Iterable[int]) -> None:
        """Take frames until all these envelopes have come."""
        missing = set(ids)
        await self.read_until(lambda: missing <= set(self.ids))

    async def read_applied(self, number: int) -> wire.SubscribeResponse.Applied:
        """Take frames until the update of this id was applied."""
        await self.read_until(lambda: self.applied and self.applied[-1].id == number)
        return self.applied[-1]


def targets_of(targets: Iterable[Any]) -> list[tuple[bytes, int]]:
    return [(one.topic.topic, one.through_sequence_id) for one in targets]


@asynccontextmanager
async def streaming(
    database: Database,
    metrics: Metrics,
    *,
    settings: StreamSettings = DEFAULTS,
    rates: FrameRates = RATES,
    rpc: RpcSettings = QUIET,
    poll_s: float = POLL_S,
    barrier_wait_ms: int = 20,
    max_gap_ranges: int = 10_000,
) -> AsyncIterator[World]:
    """Boundary task, tailer, hub and edge, all of them real."""

    async def advance() -> int | None:
        async with database.primary() as connection:
            return await advance_boundary(connection, barrier_wait_ms)

    boundary = BoundaryTask(advance, poll_interval_s=poll_s, metrics=metrics)
    streams = Streams(StreamStore(database, settings.frame_bytes), settings, encode_envelope, metrics)
    tailer = Tailer(
        TailerStore(database),
        streams,
        boundary.request,
        poll_interval_s=poll_s,
        max_gap_ranges=max_gap_ranges,
        metrics=metrics,
    )
    service = SubscriptionService(streams, round(settings.keepalive_s * 1_000), rates, metrics)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    stop = StopSignal()

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        await serve_rpc([service], listeners, rpc, metrics=metrics, stop=stop, task_status=task_status)

    async with trio.open_nursery() as nursery:
        await nursery.start(boundary.run)
        await nursery.start(streams.run)
        await nursery.start(tailer.run)
        await nursery.start(serve)
        async with open_channel("127.0.0.1", port) as channel:
            yield World(channel, port, streams, tailer, boundary, metrics, stop)
        nursery.cancel_scope.cancel()


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what nobody announces, such as a counter."""
    with trio.fail_after(20):
        while not is_so():  # noqa: ASYNC110
            await trio.sleep(0.005)


def fast(
    keepalive_s: float = 30.0, pong_s: float = 90.0, frame_bytes: int = FRAME_BYTES, **limits: int
) -> StreamSettings:
    """Settings with other times and limits."""
    base = StreamSettings()
    return StreamSettings(evolve(base.limits, **limits), keepalive_s, pong_s, frame_bytes)
