"""Query and QueryNewest, called as the edge calls them, on a real database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pushd.backend.query import QueryLimits
from pushd.errors import Code, StatusError
from pushd.rpc.gen.xmtp.backend.v1 import query_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope, Cursor, Topic, TopicQuery
from pushd.rpc.services.query import QueryService
from pushd.store.database import Database
from tests.support.envelopes import Row, group_envelope, insert_envelopes

A, B, C = (b"\x00" + bytes((n,)) * 16 for n in (1, 2, 3))
KEY_PACKAGE = b"\x03" + bytes(32)
SOME: bytes = group_envelope().SerializeToString()
LIMITS = QueryLimits(
    max_query_topics=3,
    default_query_limit=2,
    max_query_limit=4,
    max_response_bytes=10_000,
    max_newest_metadata_topics=4,
    max_newest_full_topics=3,
)


@pytest.fixture
def admin(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


@pytest.fixture
def service(database: Database) -> QueryService:
    return QueryService(database, LIMITS)


async def query(service: QueryService, *wanted: tuple[bytes, int], limit: int = 0) -> tuple[list[int], bool]:
    request = wire.QueryRequest(
        queries=[TopicQuery(topic=Topic(topic=topic), cursor=Cursor(sequence_id=at)) for topic, at in wanted],
        limit=limit,
    )
    response = await service.Query(wire.QueryRequest.FromString(request.SerializeToString()))
    ids = [one.meta.cursor.sequence_id for one in response.envelopes]
    return ids, response.continuation.has_more


async def newest(service: QueryService, *topics: bytes, full: bool = False) -> wire.QueryNewestResponse:
    request = wire.QueryNewestRequest(topics=[Topic(topic=one) for one in topics], include_full_envelope=full)
    response = await service.QueryNewest(request)
    decoded: wire.QueryNewestResponse = wire.QueryNewestResponse.FromString(response.SerializeToString())
    return decoded


async def refused(call: Any) -> tuple[Code, str]:
    with pytest.raises(StatusError) as refusal:
        await call
    return refusal.value.code, refusal.value.message


@pytest.mark.parametrize(
    ("wanted", "limit", "ids", "has_more"),
    [
        pytest.param([(A, 0)], 4, [1, 3, 5], False, id="one topic"),
        pytest.param([(A, 0), (B, 0)], 4, [1, 2, 3, 4], True, id="topics together, in sequence order"),
        pytest.param([(A, 0), (B, 2)], 4, [1, 3, 4, 5], False, id="the last page may be full"),
        pytest.param([(A, 1), (B, 9)], 4, [3, 5], False, id="cursors are exclusive and each topic's own"),
        pytest.param([(A, 0)], 0, [1, 3], True, id="the default limit"),
        pytest.param([(A, 0), (B, 0)], 1_000, [1, 2, 3, 4], True, id="a limit above the maximum is the maximum"),
        pytest.param([(A, 0)], 1, [1], True, id="a limit of one"),
        pytest.param([(A, 3), (A, 1)], 4, [3, 5], False, id="a topic named twice is read from the lower cursor"),
        pytest.param([(C, 0)], 4, [], False, id="an empty topic"),
        pytest.param([(A, 2**63 - 1)], 4, [], False, id="the last cursor"),
        pytest.param([], 4, [], False, id="no topic"),
    ],
)
async def test_pages(
    wanted: list[tuple[bytes, int]],
    limit: int,
    ids: list[int],
    has_more: bool,
    service: QueryService,
    admin: psycopg.Connection[Any],
) -> None:
    insert_envelopes(admin, [Row(A), Row(B), Row(A), Row(B), Row(A)])
    assert await query(service, *wanted, limit=limit) == (ids, has_more)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([(A, 0), (A, 0), (A, 0), (A, 0)], "query exceeds topic limit"),
        ([(KEY_PACKAGE, 0)], "topic is not valid"),
        ([(b"\x00" * 16, 0)], "topic is not valid"),
        ([(b"\x05" + bytes(16), 0)], "topic is not valid"),
        ([(b"", 0)], "topic is not valid"),
        ([(A, 2**63)], "cursor is not valid"),
        ([(A, 2**64 - 1)], "cursor is not valid"),
    ],
)
async def test_what_a_query_may_not_say(wanted: list[tuple[bytes, int]], message: str, service: QueryService) -> None:
    assert await refused(query(service, *wanted)) == (Code.INVALID_ARGUMENT, message)


async def test_a_page_fits_the_response_and_the_next_one_goes_on(
    service: QueryService, admin: psycopg.Connection[Any]
) -> None:
    payload = group_envelope(body=bytes(4_000)).SerializeToString()
    insert_envelopes(admin, [Row(A, payload=payload)] * 5)
    got: list[int] = []
    has_more = True
    while has_more:
        response = await service.Query(
            wire.QueryRequest(
                queries=[TopicQuery(topic=Topic(topic=A), cursor=Cursor(sequence_id=got[-1] if got else 0))], limit=4
            )
        )
        assert response.ByteSize() <= LIMITS.max_response_bytes
        got += [one.meta.cursor.sequence_id for one in response.envelopes]
        has_more = response.continuation.has_more
    assert got == [1, 2, 3, 4, 5]


async def test_the_newest_of_each_topic_that_has_one(service: QueryService, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(
        admin, [Row(A, payload=SOME), Row(B, is_commit_or_proposal=True), Row(A, payload=SOME, server_ns=7)]
    )
    response = await newest(service, B, C, A, B)
    assert [one.topic.topic for one in response.results] == [B, A], "in the order asked for, once each"
    assert [one.meta.cursor.sequence_id for one in response.results] == [2, 3]
    assert [one.meta.topic.topic for one in response.results] == [B, A]
    assert [one.meta.is_commit_or_proposal for one in response.results] == [True, False]
    assert response.results[1].meta.server_ns == 7
    assert not any(one.HasField("envelope") for one in response.results)


async def test_envelopes_come_only_when_asked_for(service: QueryService, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(admin, [Row(A, payload=SOME), Row(KEY_PACKAGE, payload=SOME)])
    response = await newest(service, A, KEY_PACKAGE, full=True)
    assert [one.envelope for one in response.results] == [ClientEnvelope.FromString(SOME)] * 2


async def test_nothing_asked_nothing_answered(service: QueryService) -> None:
    assert not (await newest(service)).results
    assert not (await newest(service, A, full=True)).results


@pytest.mark.parametrize(
    ("topics", "full", "outcome"),
    [
        ([A] * 4, False, None),
        ([A] * 5, False, "query exceeds topic limit"),
        ([A] * 3, True, None),
        ([A] * 4, True, "query exceeds topic limit"),
        ([b"\x03" + bytes(31)], False, "topic is not valid"),
        ([b""], True, "topic is not valid"),
    ],
)
async def test_what_a_query_for_the_newest_may_not_say(
    topics: list[bytes], full: bool, outcome: str | None, service: QueryService
) -> None:
    if outcome is None:
        await newest(service, *topics, full=full)
    else:
        assert await refused(newest(service, *topics, full=full)) == (Code.INVALID_ARGUMENT, outcome)


async def test_envelopes_too_long_for_one_response_are_refused(
    service: QueryService, admin: psycopg.Connection[Any]
) -> None:
    payload = group_envelope(body=bytes(4_000)).SerializeToString()
    insert_envelopes(admin, [Row(topic, payload=payload) for topic in (A, B, C)])
    response = await newest(service, A, B, full=True)
    assert response.ByteSize() <= LIMITS.max_response_bytes
    assert await refused(newest(service, A, B, C, full=True)) == (Code.OUT_OF_RANGE, "response is too large")
    assert len((await newest(service, A, B, C)).results) == 3, "metadata always fits"
