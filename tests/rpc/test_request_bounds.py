"""What has too many parts to be allowed is not read to its end: a message of the largest size holds twelve million."""

from __future__ import annotations

from typing import Any

import pytest

from pushd.backend.query import QueryLimits
from pushd.core.stream_updates import Update, UpdateLimits, Wanted
from pushd.rpc.gen.xmtp.backend.v1 import query_pb2, subscription_pb2
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic, TopicQuery
from pushd.rpc.services import query as service_module
from pushd.rpc.services.query import QueryService
from pushd.rpc.translate_stream import update_from, wanted_from
from pushd.store.envelopes import Page


@pytest.mark.parametrize(("adds", "removes", "read"), [(3, 2, (3, 2)), (9, 0, (4, 0)), (0, 9, (0, 3))])
async def test_an_update(adds: int, removes: int, read: tuple[int, int]) -> None:
    limits = UpdateLimits(max_update_adds=3, max_update_removes=2)
    message = subscription_pb2.SubscribeRequest.Update(id=7, adds=[TopicQuery()] * adds, removes=[Topic()] * removes)
    assert await update_from(message, limits) == Update(7, [Wanted(b"", 0)] * read[0], [b""] * read[1])


async def test_a_static_stream() -> None:
    assert len(await wanted_from(subscription_pb2.SubscribeStaticRequest(topics=[TopicQuery()] * 9).topics, 3)) == 4


async def test_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    async def envelopes(_: object, __: object, wanted: list[Any], limit: int) -> Page:
        read.append(len(wanted))
        return Page((), has_more=False)

    async def newest(_: object, __: object, topics: list[Any], *, with_payload: bool) -> list[Any]:
        read.append(len(topics))
        return []

    monkeypatch.setattr(service_module, "query_envelopes", envelopes)
    monkeypatch.setattr(service_module, "query_newest", newest)
    limits = QueryLimits(max_query_topics=3, max_newest_metadata_topics=5, max_newest_full_topics=4)
    service = QueryService(None, limits)  # type: ignore[arg-type]
    await service.Query(query_pb2.QueryRequest(queries=[TopicQuery()] * 9))
    for full in (False, True):
        await service.QueryNewest(query_pb2.QueryNewestRequest(topics=[Topic()] * 9, include_full_envelope=full))
    assert read == [4, 6, 5]
