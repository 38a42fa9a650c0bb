"""Subscribe and SubscribeStatic over a real connection and a real database."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import trio
from attrs import evolve

from pushd.app import make_streams
from pushd.config import Config, Limits
from pushd.core.outbound import CONTROL_BYTES, FRAME_BYTES, QUEUE_BYTES, TARGET_BYTES, Applied, Started
from pushd.errors import Code, StatusError
from pushd.rpc.client import ChannelSettings, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic
from pushd.rpc.services.subscription import FrameRates
from pushd.rpc.settings import RpcSettings
from pushd.rpc.translate_stream import dynamic_response, static_response
from pushd.store.database import Database, DatabaseSettings
from pushd.telemetry import Metrics, StreamEnd
from tests.support.streams import (
    DYNAMIC,
    QUIET,
    RATES,
    STATIC,
    Following,
    Publishing,
    World,
    fast,
    publishing,
    streaming,
    targets_of,
    topic,
    topic_queries,
    until,
    update,
)

A, B, C = topic(1), topic(2), topic(3)
MIB = 2**20


@pytest.fixture
def publisher(database_url: str) -> Iterator[Publishing]:
    with publishing(database_url) as opened:
        yield opened


async def end_of(following: Following) -> StatusError:
    """How the stream fails."""
    with trio.fail_after(20), pytest.raises(StatusError) as failure:
        while await following.read():
            pass
    return failure.value


def ended(metrics: Metrics) -> dict[str, float]:
    counts = {str(reason): metrics.stream_ended.labels(reason)._value.get() for reason in StreamEnd}
    return {reason: count for reason, count in counts.items() if count}


async def test_a_static_stream_catches_up_and_goes_on_live(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
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


async def test_updates_add_and_remove_topics(database: Database, publisher: Publishing, metrics: Metrics) -> None:
    before = publisher.publish([A, B, C])
    async with streaming(database, metrics) as world:
        async with world.follow(update(7, {B: 0, A: 0})) as following:
            assert following.frames[0].HasField("started"), "it greets before it is asked anything"
            applied = await following.read_applied(7)
            assert targets_of(applied.added_targets) == [(B, before[1]), (A, before[0])]
            await following.read_ids(before[:2])

            await following.call.send(update(8, {A: 0, C: before[2]}, [B, topic(99)]))
            applied = await following.read_applied(8)
            assert targets_of(applied.added_targets) == [(C, before[2])], "a followed topic is not added again"
            after = publisher.publish([A, B, C])
            await following.read_ids([after[0], after[2]])
            assert sorted(following.ids) == [*before[:2], after[0], after[2]]

            await following.call.send(update(9, {B: 0}))
            await following.read_applied(9)
            await following.read_ids([after[1]])
            assert following.ids_of(B) == [before[1], before[1], after[1]], "a new registration starts at its cursor"


async def test_an_envelope_arrives_as_it_was_stored(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
    publisher.publish([A])
    [(topic_of_row, server_ns, hash_of_row, payload)] = publisher.conn.execute(
        "SELECT topic, server_ns, message_hash, payload FROM envelopes", binary=True
    ).fetchall()
    publisher.conn.commit()
    async with streaming(database, metrics) as world:
        async with world.follow_static({A: 0}) as following:
            await following.read_ids([1])
            [envelope] = following.envelopes
    meta = envelope.meta
    assert (meta.topic.topic, meta.server_ns, meta.message_hash.sha256) == (topic_of_row, server_ns, hash_of_row)
    assert (meta.cursor.sequence_id, meta.expiry_ns, meta.is_commit_or_proposal) == (1, 0, False)
    assert envelope.envelope.SerializeToString(deterministic=True) == payload


async def test_half_closing_ends_a_stream_well(database: Database, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, {A: 0})) as following:
            await following.read_applied(1)
            following.call.half_close()
            with trio.fail_after(20):
                assert not await following.read()
    assert ended(metrics) == {"client": 1}


async def test_a_stream_without_topics_stays_open(database: Database, publisher: Publishing, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, {A: 0})) as following:
            await following.call.send(update(2, {}, [A]))
            await following.read_applied(2)
            publisher.publish([A])
            await following.call.send(update(3, {A: 0}))
            await following.read_ids([1])


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [
        pytest.param(update(1, {b"\x00short": 0}), "topic is not valid", id="topic"),
        pytest.param(update(1, {A: 2**63}), "cursor is not valid", id="cursor"),
        pytest.param(update(0, {A: 0}), "update is not valid", id="update id 0"),
        pytest.param(update(1, {A: 0}, [A]), "topic is repeated", id="added and removed"),
        pytest.param(update(1, {A: 0, B: 0, C: 0}), "stream exceeds topic limit", id="too many topics"),
        pytest.param(wire.SubscribeRequest(), "request is not valid", id="nothing set"),
    ],
)
async def test_what_an_update_may_not_say_ends_the_stream(
    request_: wire.SubscribeRequest, outcome: str, database: Database, metrics: Metrics
) -> None:
    settings = fast(max_stream_topics=2, max_update_adds=2)
    async with streaming(database, metrics, settings=settings) as world:
        async with world.follow(request_) as following:
            failure = await end_of(following)
            assert (failure.code, failure.message) == (Code.INVALID_ARGUMENT, outcome)
    assert ended(metrics) == {"invalid": 1}


async def test_bytes_that_are_no_request_end_the_stream(database: Database, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow() as following:
            following.call.send_nowait(b"\xff")
            failure = await end_of(following)
            assert (failure.code, failure.message) == (Code.INVALID_ARGUMENT, "request is malformed")
        assert ended(metrics) == {"invalid": 1}
        assert repr(world.streams).startswith("<Streams 0 topics=0")


@pytest.mark.parametrize(
    ("cursors", "outcome"),
    [
        ({}, "stream names no topic"),
        ({A: 0, B: 0, C: 0}, "stream exceeds topic limit"),
        ({b"\x01" + bytes(16): 0}, "topic is not valid"),
        ({A: 2**64 - 1}, "cursor is not valid"),
    ],
)
async def test_what_a_static_request_may_not_say(
    cursors: dict[bytes, int], outcome: str, database: Database, metrics: Metrics
) -> None:
    async with streaming(database, metrics, settings=fast(max_static_topics=2)) as world:
        with pytest.raises(StatusError) as failure:
            async with world.follow_static(cursors):
                pass
    assert (failure.value.code, failure.value.message) == (Code.INVALID_ARGUMENT, outcome)


async def test_a_static_topic_named_twice_is_refused(database: Database, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        async with world.channel.stream(STATIC, wire.SubscribeStaticResponse, deadline_s=20) as call:
            await call.send(wire.SubscribeStaticRequest(topics=[*topic_queries({A: 0}), *topic_queries({A: 5})]))
            call.half_close()
            with pytest.raises(StatusError, match="INVALID_ARGUMENT: topic is repeated"):
                await call.receive()


@pytest.mark.parametrize(
    ("frame", "text"),
    [(update(1), "too many updates"), (wire.SubscribeRequest(ping=wire.Ping(nonce=5)), "too many pings")],
)
async def test_frames_beyond_their_rate_end_the_stream(
    frame: wire.SubscribeRequest, text: str, database: Database, metrics: Metrics
) -> None:
    rates = FrameRates(updates_per_s=1, update_burst=3, pings_per_s=1, ping_burst=3)
    async with streaming(database, metrics, rates=rates) as world:
        async with world.follow() as following:
            for number in range(1, 6):
                if frame.HasField("update"):
                    frame.update.id = number
                await following.call.send(frame)
            failure = await end_of(following)
            assert (failure.code, failure.message) == (Code.RESOURCE_EXHAUSTED, text)
            assert len(following.frames) == 1 + 3, "what was within the rate was answered"
    assert ended(metrics) == {"rate_limited": 1}


@pytest.mark.parametrize("kind", ["update", "ping"])
async def test_frames_within_their_rate_are_answered_although_they_come_at_once(
    kind: str, database: Database, metrics: Metrics
) -> None:
    """More of them than answers may wait for a reader: this one reads."""
    burst = RATES.update_burst if kind == "update" else RATES.ping_burst
    frames = {
        "update": [update(number, {}, [A]) for number in range(1, burst + 1)],
        "ping": [wire.SubscribeRequest(ping=wire.Ping(nonce=number)) for number in range(1, burst + 1)],
    }[kind]
    async with streaming(database, metrics) as world:
        async with world.follow() as following:
            for frame in frames:
                following.call.send_nowait(frame.SerializeToString())
            await following.read_until(lambda: len(following.frames) == 1 + burst)
            answers = [frame.applied.id or frame.pong.nonce for frame in following.frames[1:]]
            assert answers == list(range(1, burst + 1))


async def test_pongs_are_free(database: Database, metrics: Metrics) -> None:
    rates = FrameRates(updates_per_s=1, update_burst=1, pings_per_s=1, ping_burst=1)
    async with streaming(database, metrics, rates=rates) as world:
        async with world.follow() as following:
            for number in range(50):
                await following.call.send(wire.SubscribeRequest(pong=wire.Pong(nonce=number)))
            await following.call.send(wire.SubscribeRequest(ping=wire.Ping(nonce=9)))
            await following.read_until(lambda: following.frames[-1].HasField("pong"))
            assert following.frames[-1].pong.nonce == 9


async def test_a_silent_peer_is_pinged_and_then_ended(database: Database, metrics: Metrics) -> None:
    async with streaming(database, metrics, settings=fast(keepalive_s=0.05, pong_s=0.5)) as world:
        async with world.follow() as alive, world.follow() as silent:
            silent.answers_pings = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(alive.read_until, lambda: len(alive.frames) > 10)
                failure = await end_of(silent)
            assert failure.code is Code.DEADLINE_EXCEEDED
            assert [frame.WhichOneof("response") for frame in silent.frames] == ["started", "ping"]
        async with world.follow_static({A: 0}) as following:
            await following.read_until(lambda: len(following.frames) > 3)
            assert {frame.WhichOneof("response") for frame in following.frames[1:]} == {"keepalive"}
    assert ended(metrics)["keepalive"] == 1


async def test_a_stop_ends_streams_unavailable(database: Database, publisher: Publishing, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, {A: 0})) as dynamic, world.follow_static({A: 0}) as static:
            await dynamic.read_applied(1)
            world.stop.request(trio.current_time() + 20)
            for following in (dynamic, static):
                failure = await end_of(following)
                assert (failure.code, failure.message) == (Code.UNAVAILABLE, "server is shutting down")
        assert repr(world.streams) == "<Streams 0 topics=0 ready=True>"
    assert ended(metrics) == {"shutdown": 2}


async def test_callers_that_leave_leave_nothing(database: Database, publisher: Publishing, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        for number in range(30):
            async with world.follow(update(1, {topic(number): 0})) as following:
                if number % 3:
                    await following.read_applied(1)
            if number % 5 == 0:
                async with world.follow_static({topic(number): 0}):
                    pass
        await until(lambda: repr(world.streams) == "<Streams 0 topics=0 ready=True>")
        assert metrics.stream_topics_registered._value.get() == 0
    assert ended(metrics) == {"client": 36}


async def stop_reading(world: World, publisher: Publishing, *, until_ended: Callable[[], bool]) -> None:
    """Publish to A until a reader that takes nothing is ended, while another one on A reads everything."""
    async with world.follow_static({A: 0}) as reader:
        published: list[int] = []
        with trio.fail_after(60):
            while not until_ended():
                published += publisher.publish([A], MIB - 4_096)
                await reader.read_ids(published[-1:])
        published += publisher.publish([A])
        await reader.read_ids(published[-1:])
        assert reader.ids == published


async def test_a_reader_that_stops_reading_is_ended_and_holds_no_memory(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
    """Its connection is read all the time; it is the stream that takes nothing, as a caller that does not iterate."""
    async with streaming(database, metrics) as world:
        async with open_channel("127.0.0.1", world.port) as other:
            async with other.stream(STATIC, wire.SubscribeStaticResponse, deadline_s=math.inf) as call:
                await call.send(wire.SubscribeStaticRequest(topics=topic_queries({A: 0})))
                call.half_close()
                assert await call.receive() is not None
                await stop_reading(world, publisher, until_ended=lambda: "backpressure" in ended(metrics))
                sessions = metrics.stream_sessions.labels("static")
                await until(lambda: sessions._value.get() == 0)
                # Reading again, it gets what had gone out and then the reason.
                received = 0
                with trio.fail_after(20), pytest.raises(StatusError) as failure:
                    while response := await call.receive():
                        received += response.ByteSize()
                assert (failure.value.code, failure.value.message) == (
                    Code.RESOURCE_EXHAUSTED,
                    "the reader is too slow",
                )
                assert received < QUEUE_BYTES


async def test_a_reader_that_never_reads_again_is_reset(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
    rpc = evolve(RpcSettings(log_calls=False), stall_s=1.0)
    async with streaming(database, metrics, rpc=rpc) as world:
        async with open_channel("127.0.0.1", world.port, settings=ChannelSettings(receive_bytes=MIB)) as other:
            async with other.stream(STATIC, wire.SubscribeStaticResponse, deadline_s=math.inf) as call:
                await call.send(wire.SubscribeStaticRequest(topics=topic_queries({A: 0})))
                call.half_close()
                await call.receive()
                await stop_reading(world, publisher, until_ended=lambda: bool(ended(metrics)))
                in_flight = metrics.grpc_in_flight.labels(
                    "xmtp.backend.v1.SubscriptionService", "SubscribeStatic", "server_stream"
                )
                await until(lambda: in_flight._value.get() == 0)


async def test_a_database_that_goes_away_ends_streams_and_they_come_back(
    database: Database, database_url: str, publisher: Publishing, metrics: Metrics
) -> None:
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, {A: 0})) as following:
            await following.read_applied(1)
            with psycopg.connect(database_url, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'pushd tailer %' AND datname = current_database()"
                )
            failure = await end_of(following)
            assert (failure.code, failure.message) == (Code.UNAVAILABLE, "streams lost the database")
        published = publisher.publish([A])
        await until(lambda: metrics.tailer_ready._value.get() == 1)
        async with world.follow(update(1, {A: 0})) as following:
            await following.read_ids(published)
        assert world.tailer.restarts == 1


async def test_too_many_gaps_end_streams_resource_exhausted(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
    async with streaming(database, metrics, max_gap_ranges=2) as world:
        async with world.follow(update(1, {A: 0})) as following:
            await following.read_applied(1)
            holders: list[Any] = []
            for number in range(3):
                conn = psycopg.connect(publisher.conn.info.dsn)
                Publishing(conn).store([topic(100 + number)])  # never committed: a gap
                holders.append(conn)
                publisher.publish([B])
            failure = await end_of(following)
            assert failure.code is Code.RESOURCE_EXHAUSTED
            for conn in holders:
                conn.close()
        await until(lambda: metrics.tailer_ready._value.get() == 1)
        async with world.follow(update(1, {A: 0})) as following:
            await following.read_applied(1)
            await following.read_ids(publisher.publish([A]))


async def test_a_large_update_is_answered_whole(database: Database, publisher: Publishing, metrics: Metrics) -> None:
    topics = [topic(number) for number in range(25_000)]
    publisher.publish(topics[::5_000])
    async with streaming(database, metrics) as world:
        async with world.follow(update(1, dict.fromkeys(topics, 0))) as following:
            applied = await following.read_applied(1)
            heads = dict(targets_of(applied.added_targets))
            assert list(heads) == topics
            assert {one: head for one, head in heads.items() if head} == {
                one: number + 1 for number, one in enumerate(topics[::5_000])
            }
            await following.read_ids(range(1, 6))


async def test_frames_fit_the_longest_response_allowed(
    database: Database, publisher: Publishing, metrics: Metrics
) -> None:
    """Caught up or live: what waits for a reader together is no reason to end its stream."""
    limit = 50_000
    rpc = evolve(QUIET, max_response_bytes=limit)
    behind = publisher.publish([A] * 30, 10_000)
    async with streaming(database, metrics, settings=fast(frame_bytes=limit - 8), rpc=rpc) as world:
        async with world.follow(update(1, {A: 0})) as following:
            await following.read_ids(behind)
            sizes = [45_000, 10_000, 45_000, 20_000, 20_000, 20_000, 49_000, 100, 100]
            ids = [publisher.store([A], size)[0] for size in sizes]
            publisher.conn.commit()
            await following.read_ids(ids)
            assert following.ids == [*behind, *ids]
            frames = [one for one in following.frames if one.HasField("messages")]
            assert max(one.ByteSize() for one in frames) <= limit
            assert len(frames) < len(following.ids) / 2


def test_the_configuration_bounds_frames(metrics: Metrics) -> None:
    low = make_streams(
        Config(limits=Limits(max_response_bytes=2**20)), Database(DatabaseSettings(""), metrics), metrics
    )
    assert low.settings.frame_bytes == 2**20 - 8
    usual = make_streams(Config(), Database(DatabaseSettings(""), metrics), metrics)
    assert usual.settings.frame_bytes == FRAME_BYTES


def test_the_longest_list_of_targets_takes_no_more_than_the_configuration_leaves_room_for() -> None:
    targets = [(b"\x01" + bytes(32), 2**63 - 1)] * 1_000
    longest = max(
        dynamic_response(Applied(2**64 - 1, targets), 0).ByteSize(),
        static_response(Started(targets), 2**31 - 1).ByteSize(),
    )
    assert longest <= 1_000 * TARGET_BYTES + CONTROL_BYTES


async def test_an_unknown_frame_of_a_newer_client_is_refused(database: Database, metrics: Metrics) -> None:
    async with streaming(database, metrics) as world:
        async with world.channel.stream(DYNAMIC, wire.SubscribeResponse, deadline_s=20) as call:
            call.send_nowait(b"\x7a" + bytes((33,)) + Topic(topic=bytes(31)).SerializeToString())
            with pytest.raises(StatusError, match="INVALID_ARGUMENT: request is not valid"):
                while await call.receive():
                    pass
