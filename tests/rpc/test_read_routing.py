"""Which reads go to the replica. The replica here is a second database, so that what it lacks it lacks for good."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pushd.backend.query import QueryLimits
from pushd.rpc.gen.xmtp.backend.v1 import query_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.notification_pb2 import UnregisterResponse
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic, TopicQuery
from pushd.rpc.services.query import QueryService
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.tailer import TailerSession
from pushd.telemetry import Metrics
from tests.support.envelopes import Row, insert_envelopes
from tests.support.registration import FCM, OTHER_SECRET, WRONG_SECRET, Api, add
from tests.support.streams import streaming, topic

A = topic(1)


@pytest.fixture
def replica_url(postgres: str, database_url: str) -> Iterator[str]:
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}_replica TEMPLATE migrated STRATEGY file_copy".encode())
        yield make_conninfo(postgres, dbname=f"{name}_replica")
        conn.execute(f"DROP DATABASE {name}_replica WITH (FORCE)".encode())


@pytest.fixture
async def split(database_url: str, replica_url: str, metrics: Metrics) -> AsyncIterator[Database]:
    async with open_database(DatabaseSettings(database_url, replica_url), metrics) as opened:
        yield opened


@contextmanager
def session(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as conn:
        yield conn


async def test_query_reads_the_primary_and_query_newest_the_replica(
    split: Database, database_url: str, replica_url: str
) -> None:
    with session(database_url) as primary, session(replica_url) as replica:
        insert_envelopes(primary, [Row(A), Row(A), Row(A)])
        insert_envelopes(replica, [Row(A), Row(A)])
    service = QueryService(split, QueryLimits())
    page = await service.Query(wire.QueryRequest(queries=[TopicQuery(topic=Topic(topic=A))]))
    assert [one.meta.cursor.sequence_id for one in page.envelopes] == [1, 2, 3]
    newest = await service.QueryNewest(wire.QueryNewestRequest(topics=[Topic(topic=A)]))
    assert [one.meta.cursor.sequence_id for one in newest.results] == [2]


async def test_registration_reads_and_writes_the_primary_alone(
    split: Database, database_url: str, replica_url: str, metrics: Metrics
) -> None:
    """A recipient the replica has never heard of is its owner's, and the start position is the primary's boundary."""
    with session(database_url) as primary, session(replica_url) as replica:
        primary.execute("UPDATE allocation_boundary SET closed_sequence_id = 9")
        replica.execute("UPDATE allocation_boundary SET closed_sequence_id = 5")
        api = Api(split, metrics)
        await api.register(FCM)
        assert (await api.update([add(A)])).topic_count == 1
        assert await api.register(FCM, secret=OTHER_SECRET) == WRONG_SECRET
        assert primary.execute("SELECT since_sequence_id FROM push_subscription").fetchall() == [(9,)]
        assert (await api.unregister()) == UnregisterResponse()
        assert replica.execute("SELECT count(*) FROM push_recipient").fetchone() == (0,)


async def test_streams_read_the_replica_once_it_shows_the_primary_s_boundary(
    split: Database, database_url: str, replica_url: str, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    load_boundary = TailerSession.load_boundary

    async def look(tailer: TailerSession) -> int:
        shown.append(await load_boundary(tailer))
        return shown[-1]

    monkeypatch.setattr(TailerSession, "load_boundary", look)
    with session(database_url) as primary, session(replica_url) as replica:
        insert_envelopes(primary, [Row(A), Row(A)])
        insert_envelopes(replica, [Row(A)])
        got: list[int] = []

        async def follow() -> None:
            async with streaming(split, metrics) as world, world.follow_static({A: 0}) as following:
                await following.read_ids([1, 2, 3])
                got.extend(following.ids)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follow)
                while len(shown) < 3 and not metrics.tailer_ready._value.get():  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert metrics.tailer_ready._value.get() == 0, "the replica was looked at, and no stream is served"
                insert_envelopes(replica, [Row(A)])
                while not metrics.tailer_ready._value.get():  # noqa: ASYNC110
                    await trio.sleep(0.01)
                insert_envelopes(replica, [Row(A)])
        assert got == [1, 2, 3]
