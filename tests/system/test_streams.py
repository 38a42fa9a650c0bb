"""Streams of a whole `pushd serve` process, with grpcio as the client."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishRequest, PublishResponse
from pushd.rpc.gen.xmtp.backend.v1.query_pb2 import QueryNewestRequest, QueryNewestResponse
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic, TopicQuery
from tests.support.envelopes import GROUP, group_envelope, welcome_envelope
from tests.support.postgres import as_url
from tests.support.server import base_config, running_server

pytestmark = pytest.mark.slow

TOPIC = b"\x00" + GROUP


async def test_streams_over_the_wire(tmp_path: Path, database_url: str) -> None:
    config = base_config(database={"url": as_url(database_url)})
    with trio.fail_after(90):
        async with running_server(tmp_path, config) as server:
            with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
                used = Used(channel)
                await trio.to_thread.run_sync(used.follow)
                server.send_signal(signal.SIGTERM)
                await trio.to_thread.run_sync(used.expect_shutdown)
            assert await server.wait_exit() == 0


class Used:
    """One stream of each kind, read by this thread; grpcio sends requests from its own."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._requests: queue.Queue[wire.SubscribeRequest | None] = queue.Queue()
        service = "/xmtp.backend.v1.SubscriptionService"
        self._dynamic = channel.stream_stream(
            f"{service}/Subscribe", wire.SubscribeRequest.SerializeToString, wire.SubscribeResponse.FromString
        )(self._take_requests(), timeout=60)
        self._static = channel.unary_stream(
            f"{service}/SubscribeStatic",
            wire.SubscribeStaticRequest.SerializeToString,
            wire.SubscribeStaticResponse.FromString,
        )(wire.SubscribeStaticRequest(topics=[TopicQuery(topic=Topic(topic=TOPIC))]), timeout=60)

    def _take_requests(self) -> Iterator[wire.SubscribeRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _call(self, method: str, request: Any, response: Any) -> Any:
        run = self._channel.unary_unary(
            f"/xmtp.backend.v1.{method}", type(request).SerializeToString, response.FromString
        )
        return run(request, timeout=30)

    def follow(self) -> None:
        assert next(self._dynamic).started.keepalive_interval_ms == 30_000
        assert next(self._static).started.targets[0].through_sequence_id == 0
        update = wire.SubscribeRequest.Update(id=1, adds=[TopicQuery(topic=Topic(topic=TOPIC))])
        self._requests.put(wire.SubscribeRequest(update=update))
        assert next(self._dynamic).applied.id == 1

        sent = [group_envelope(), welcome_envelope(), group_envelope()]
        metas = self._call("PublishService/Publish", PublishRequest(envelopes=sent), PublishResponse).envelope_metas
        for stream in (self._dynamic, self._static):
            got = next(stream).messages.envelopes
            assert [(one.meta, one.envelope) for one in got] == [(metas[0], sent[0]), (metas[2], sent[2])]

        self._requests.put(wire.SubscribeRequest(ping=wire.Ping(nonce=77)))
        assert next(self._dynamic).pong.nonce == 77

        newest = self._call(
            "QueryService/QueryNewest", QueryNewestRequest(topics=[Topic(topic=TOPIC)]), QueryNewestResponse
        )
        assert [result.meta for result in newest.results] == [metas[2]]

    def expect_shutdown(self) -> None:
        for stream in (self._dynamic, self._static):
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        self._requests.put(None)
