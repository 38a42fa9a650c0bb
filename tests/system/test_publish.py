"""Publishing to and querying a whole `pushd serve` process with grpcio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
import trio

from pushd.rpc.gen.google.rpc.status_pb2 import Status
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishError, PublishRequest, PublishResponse
from pushd.rpc.gen.xmtp.backend.v1.query_pb2 import QueryRequest, QueryResponse
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope, Topic, TopicQuery
from tests.support.envelopes import GROUP, group_envelope, welcome_envelope
from tests.support.postgres import as_url
from tests.support.server import base_config, running_server

pytestmark = pytest.mark.slow


async def test_publish_and_query_over_the_wire(tmp_path: Path, database_url: str) -> None:
    config = base_config(database={"url": as_url(database_url)})
    with trio.fail_after(60):
        async with running_server(tmp_path, config) as server:
            with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
                await use(channel)
            await boundary_reaches(database_url, 3)


async def use(channel: grpc.Channel) -> None:
    async def call(method: str, body: bytes) -> bytes:
        run = channel.unary_unary(f"/xmtp.backend.v1.{method}")
        return await trio.to_thread.run_sync(lambda: run(body, timeout=30))

    async def refused(body: bytes) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            await call("PublishService/Publish", body)
        return caught.value

    sent = [group_envelope(), welcome_envelope(), group_envelope()]
    encoded = PublishRequest(envelopes=sent).SerializeToString()
    metas = PublishResponse.FromString(await call("PublishService/Publish", encoded)).envelope_metas
    assert [meta.cursor.sequence_id for meta in metas] == [1, 2, 3]
    again = PublishResponse.FromString(await call("PublishService/Publish", encoded)).envelope_metas
    assert again == metas

    query = QueryRequest(queries=[TopicQuery(topic=Topic(topic=b"\x00" + GROUP))]).SerializeToString()
    page = QueryResponse.FromString(await call("QueryService/Query", query))
    assert [(one.meta, one.envelope) for one in page.envelopes] == [(metas[0], sent[0]), (metas[2], sent[2])]

    error = await refused(PublishRequest(envelopes=[group_envelope(), ClientEnvelope()]).SerializeToString())
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "envelope validation failed")
    status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    detail = PublishError.FromString(status.details[0].value)
    assert (detail.index, detail.reason) == (1, PublishError.REASON_MALFORMED_PAYLOAD)

    error = await refused(b"\xff")
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "request is malformed")


async def boundary_reaches(database_url: str, sequence_id: int) -> None:
    """Wait until the server has closed the boundary over what it stored; it tells nobody outside."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        while conn.execute("SELECT closed_sequence_id FROM allocation_boundary").fetchone() != (sequence_id,):  # noqa: ASYNC110
            await trio.sleep(0.02)
