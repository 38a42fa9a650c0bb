"""Subscribe and SubscribeStatic over a real connection and a real database."""

from __future__ import annotations

import trio

from pushd.store.database import Database
from pushd.telemetry import Metrics
from tests.support.streams import publishing, streaming, targets_of, topic, update

A, B, C = topic(1), topic(2), topic(3)


async def test_a_static_stream_catches_up_and_goes_on_live(
    database: Database, database_url: str, metrics: Metrics
) -> None:
    with publishing(database_url) as publisher:
        before = publisher.publish([A, B, A, C])
        async with streaming(database, metrics) as world:
            async with world.follow_static({A: before[0], B: 0, topic(9): 0}) as following:
                assert following.keepalive_ms == 30_000
                assert following.targets == [(A, before[2]), (B, before[1]), (topic(9), 0)]
                await following.read_ids([before[1], before[2]])
                after = publisher.publish([A, C, B, topic(9)])
                await following.read_ids([after[0], after[2], after[3]])
                assert following.ids_of(A) == [before[2], after[0]]
                assert following.ids_of(B) == [before[1], after[2]]
                assert len(following.ids) == 5
