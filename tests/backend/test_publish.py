"""Publish and Query as a caller meets them, from decoded request to response, on a real database."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import trio
from attrs import frozen
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pushd.backend import placing
from pushd.backend.publish import Publisher, PublishSettings
from pushd.backend.query import QueryLimits
from pushd.core.admission import Offer, PublishLimits, Retention
from pushd.core.topics import topic_lock_key
from pushd.errors import Code, StatusError
from pushd.rpc.gen.google.rpc.status_pb2 import Status
from pushd.rpc.gen.xmtp.backend.v1.publish_pb2 import PublishError, PublishRequest
from pushd.rpc.gen.xmtp.backend.v1.query_pb2 import QueryRequest
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import (
    ClientEnvelope,
    CommitLogEntry,
    Cursor,
    EnvelopeMeta,
    GroupMessage,
    KeyPackage,
    Topic,
    TopicQuery,
    WelcomeMessage,
)
from pushd.rpc.services.publish import PublishService
from pushd.rpc.services.query import QueryService
from pushd.rpc.translate_publish import offer_from
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.telemetry import Metrics
from tests.support.envelopes import (
    COMMIT,
    GROUP,
    INSTALLATION,
    KeyPackageMaker,
    commit_log_envelope,
    group_envelope,
    identity_envelope,
    key_package,
    private_message,
    public_message,
    welcome_envelope,
    welcome_pointer_envelope,
)


class Backend:
    """Both services on one database, with the requests for boundary maintenance counted."""

    def __init__(self, database: Database, metrics: Metrics, **options: Any) -> None:
        self.metrics = metrics
        self.boundary_requests = 0
        publisher = Publisher(database, PublishSettings(**options), self._request_boundary, metrics)
        self._publish = PublishService(publisher)
        self._query = QueryService(database, QueryLimits())

    def _request_boundary(self) -> None:
        self.boundary_requests += 1

    async def publish(self, *envelopes: ClientEnvelope) -> list[EnvelopeMeta]:
        response = await self._publish.Publish(PublishRequest(envelopes=envelopes))
        return list(response.envelope_metas)

    async def refused(self, *envelopes: ClientEnvelope) -> Refused:
        with pytest.raises(StatusError) as caught:
            await self.publish(*envelopes)
        return Refused.of(caught.value)

    async def query(self, *topics: bytes, after: int = 0, limit: int = 0) -> Any:
        queries = [TopicQuery(topic=Topic(topic=topic), cursor=Cursor(sequence_id=after)) for topic in topics]
        return await self._query.Query(QueryRequest(queries=queries, limit=limit))

    def counted(self) -> tuple[float, ...]:
        counter = self.metrics.publish_envelopes
        return tuple(counter.labels(outcome)._value.get() for outcome in ("stored", "duplicate", "rejected"))


@frozen
class Refused:
    code: Code
    text: str
    reason: str | None = None
    index: int | None = None

    @staticmethod
    def of(error: StatusError) -> Refused:
        if error.details is None:
            return Refused(error.code, error.message)
        status = Status.FromString(error.details)
        assert (status.code, status.message) == (error.code, error.message)
        [detail] = status.details
        assert detail.type_url == "type.googleapis.com/xmtp.backend.v1.PublishError"
        inner = PublishError.FromString(detail.value)
        assert inner.message == error.message
        index = inner.index if inner.HasField("index") else None
        return Refused(error.code, error.message, PublishError.Reason.Name(inner.reason), index)


def malformed(index: int) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, "envelope validation failed", "REASON_MALFORMED_PAYLOAD", index)


def invalid_key_package(index: int) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, "envelope validation failed", "REASON_INVALID_KEY_PACKAGE", index)


@pytest.fixture
def backend(database: Database, metrics: Metrics) -> Backend:
    return Backend(database, metrics)


@pytest.fixture
def admin(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


def rows(admin: psycopg.Connection[Any]) -> int:
    [(count,)] = admin.execute("SELECT count(*) FROM envelopes").fetchall()
    return int(count)


def lasting(**parts: Any) -> KeyPackageMaker:
    return key_package(not_before_s=0, not_after_s=int(time.time()) + 3_600, **parts)


def expired() -> KeyPackageMaker:
    return key_package(not_before_s=0, not_after_s=int(time.time()) - 10)


KINDS = {
    "group": (group_envelope(), b"\x00" + GROUP, False, True),
    "commit": (group_envelope(content_type=COMMIT), b"\x00" + GROUP, True, False),
    "public commit": (group_envelope(data=public_message()), b"\x00" + GROUP, True, False),
    "welcome": (welcome_envelope(), b"\x01" + INSTALLATION, False, True),
    "welcome pointer": (welcome_pointer_envelope(), b"\x01" + INSTALLATION, False, True),
    "key package": (lasting().envelope(), b"\x03" + key_package().public_key, False, True),
    "commit log": (commit_log_envelope(), b"\x04" + GROUP, False, False),
}


async def test_every_kind_is_stored_under_its_topic(backend: Backend, admin: psycopg.Connection[Any]) -> None:
    for kind, (envelope, topic, is_commit, expires) in KINDS.items():
        [meta] = await backend.publish(envelope)
        assert meta.topic.topic == topic, kind
        assert meta.is_commit_or_proposal == is_commit, kind
        assert meta.expiry_ns == (meta.server_ns + 7_776_000 * 10**9 if expires else 0), kind
        sequence_id = meta.cursor.sequence_id
        [(payload,)] = admin.execute("SELECT payload FROM envelopes WHERE sequence_id = %s", (sequence_id,)).fetchall()
        assert ClientEnvelope.FromString(payload) == envelope, kind
        assert meta.message_hash.sha256 == hashlib.sha256(payload).digest(), kind
        if kind != "key package":
            [found] = (await backend.query(topic, after=sequence_id - 1)).envelopes
            assert (found.meta, found.envelope) == (meta, envelope), kind


async def test_push_columns_of_group_messages(backend: Backend, admin: psycopg.Connection[Any]) -> None:
    eligibility = {
        (1, True): True,
        (1, False): False,
        (2, True): True,
        (2, False): True,
        (3, True): True,
        (3, False): True,
    }
    for (content_type, should_push), eligible in eligibility.items():
        for hmac_bytes in (0, 31, 32, 33):
            case = (content_type, should_push, hmac_bytes)
            hmac = b"\x5a" * hmac_bytes
            asked = backend.boundary_requests
            [meta] = await backend.publish(
                group_envelope(content_type=content_type, should_push=should_push, sender_hmac=hmac)
            )
            [(push_eligible, sender_hmac, payload)] = admin.execute(
                "SELECT push_eligible, sender_hmac, payload FROM envelopes WHERE sequence_id = %s",
                (meta.cursor.sequence_id,),
            ).fetchall()
            assert push_eligible == eligible, case
            assert sender_hmac == (hmac if hmac_bytes == 32 else None), case
            stored = ClientEnvelope.FromString(payload).group_message
            assert (stored.sender_hmac, stored.should_push) == (hmac, should_push), case
            assert backend.boundary_requests - asked == int(eligible), case


async def test_push_columns_of_the_other_kinds(backend: Backend, admin: psycopg.Connection[Any]) -> None:
    await backend.publish(welcome_envelope(), welcome_pointer_envelope(), lasting().envelope(), commit_log_envelope())
    columns = admin.execute("SELECT push_eligible, sender_hmac FROM envelopes ORDER BY sequence_id").fetchall()
    assert columns == [(True, None), (True, None), (False, None), (False, None)]


async def test_nothing_to_publish_is_a_success(backend: Backend) -> None:
    assert await backend.publish() == []
    assert backend.boundary_requests == 0


async def test_T197_duplicates_inside_and_across_requests(backend: Backend, admin: psycopg.Connection[Any]) -> None:
    a, b = group_envelope(), welcome_envelope()
    answers: list[list[EnvelopeMeta]] = []

    async def run() -> None:
        answers.append(await backend.publish(a, b, a))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        nursery.start_soon(run)
    assert answers[0] == answers[1]
    first, second, third = answers[0]
    assert first == third != second
    assert await backend.publish(b, a) == [second, first]
    assert rows(admin) == 2
    assert backend.counted() == (2, 6, 0)


async def test_T198_the_first_fault_of_a_batch_is_named_and_nothing_is_stored(
    backend: Backend, admin: psycopg.Connection[Any]
) -> None:
    retained = group_envelope()
    await backend.publish(retained)
    watermarks = admin.execute("SELECT * FROM topic_watermark").fetchall()
    refused = await backend.refused(retained, expired().envelope(), ClientEnvelope(), welcome_envelope())
    assert refused == invalid_key_package(1)
    assert rows(admin) == 1
    assert admin.execute("SELECT * FROM topic_watermark").fetchall() == watermarks
    assert admin.execute("SELECT last_value FROM envelope_sequence").fetchall() == [(1,)]
    assert backend.counted() == (1, 0, 4)
    assert backend.metrics.publish_rejections.labels("REASON_INVALID_KEY_PACKAGE")._value.get() == 1


async def test_a_fault_before_an_expired_key_package_is_the_first(backend: Backend) -> None:
    assert await backend.refused(ClientEnvelope(), expired().envelope()) == malformed(0)


async def test_an_expired_key_package_that_is_stored_is_a_duplicate_and_not_a_fault(
    backend: Backend, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, other, welcome = lasting().envelope(), lasting(seed=2).envelope(), welcome_envelope()
    [stored] = await backend.publish(package)
    monkeypatch.setattr("pushd.rpc.services.publish.time.time", lambda: 10**10)  # far behind its lifetime
    [again, _] = await backend.publish(package, welcome)
    assert again == stored
    assert await backend.refused(package, ClientEnvelope()) == malformed(1)
    assert await backend.refused(package, other) == invalid_key_package(1)
    assert rows(admin) == 2


MALFORMED = {
    "no payload": ClientEnvelope(),
    "no MLS message": group_envelope(data=b""),
    "not MLS": group_envelope(data=b"hello"),
    "an MLS welcome": group_envelope(data=b"\x00\x01\x00\x03" + private_message()[4:]),
    "a cut tail": group_envelope(data=private_message()[:-1]),
    "a long group id": group_envelope(data=private_message(GROUP + b"x")),
    "a reserved content type": group_envelope(data=private_message(GROUP, 0)),
    "a welcome of no version": ClientEnvelope(welcome_message=WelcomeMessage()),
    "a short installation key": welcome_envelope(INSTALLATION[:-1]),
    "a pointer to a short key": welcome_pointer_envelope(INSTALLATION[:-1]),
    "an empty key package": ClientEnvelope(key_package=KeyPackage()),
    "bytes behind a key package": ClientEnvelope(
        key_package=KeyPackage(key_package_tls_serialized=lasting().serialized() + b"\x00")
    ),
    "a commit log entry that does not decode": ClientEnvelope(
        commit_log_entry=CommitLogEntry(serialized_commit_log_entry=b"\xff")
    ),
    "a commit log entry of no group": ClientEnvelope(commit_log_entry=CommitLogEntry()),
}


async def test_what_has_no_topic_is_refused_with_its_index(backend: Backend, admin: psycopg.Connection[Any]) -> None:
    for name, envelope in MALFORMED.items():
        assert await backend.refused(group_envelope(), welcome_envelope(), envelope) == malformed(2), name
    assert rows(admin) == 0


async def test_identity_updates_are_refused_before_anything_is_stored(
    backend: Backend, admin: psycopg.Connection[Any]
) -> None:
    refused = await backend.refused(group_envelope(), identity_envelope())
    assert refused == Refused(Code.UNIMPLEMENTED, "identity updates are not supported")
    assert rows(admin) == 0


async def test_limits(database: Database, metrics: Metrics, admin: psycopg.Connection[Any]) -> None:
    limits = PublishLimits(max_request_bytes=400, max_envelope_bytes=200, max_publish_topics=2)
    backend = Backend(database, metrics, limits=limits)
    big = group_envelope(body=b"x" * 300)
    groups = [group_envelope(bytes((n,)) * 16) for n in range(3)]
    too_large = "REASON_TOO_LARGE"
    assert await backend.refused(*groups) == Refused(Code.INVALID_ARGUMENT, "publish exceeds topic limit", too_large)
    assert await backend.refused(groups[0], big) == Refused(
        Code.INVALID_ARGUMENT, "publish request exceeds byte limit", too_large
    )
    assert await backend.refused(big) == Refused(Code.INVALID_ARGUMENT, "envelope exceeds byte limit", too_large, 0)
    assert rows(admin) == 0


async def test_retention_is_the_operators(database: Database, metrics: Metrics) -> None:
    backend = Backend(database, metrics, retention=Retention(group_message_s=5, welcome_s=6, key_package_s=7))
    metas = await backend.publish(group_envelope(), welcome_envelope(), lasting().envelope())
    assert [meta.expiry_ns - meta.server_ns for meta in metas] == [5 * 10**9, 6 * 10**9, 7 * 10**9]


async def test_a_publish_that_takes_too_long_has_a_status_of_its_own(
    database: Database, database_url: str, metrics: Metrics
) -> None:
    backend = Backend(database, metrics, max_duration_ms=100)
    with psycopg.connect(database_url) as blocker:
        blocker.execute("LOCK TABLE envelopes IN ACCESS EXCLUSIVE MODE")
        refused = await backend.refused(group_envelope())
    assert refused == Refused(Code.DEADLINE_EXCEEDED, "publish timed out")
    assert len(await backend.publish(group_envelope())) == 1


async def test_parsing_a_long_request_gives_others_their_turns_and_is_bounded(
    database: Database, metrics: Metrics, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million empty envelopes are a megabyte on the wire, and seconds of parsing."""
    backend = Backend(database, metrics, max_duration_ms=300)
    turns = parsed = 0

    def count_parsed(envelope: ClientEnvelope, now_s: int) -> Offer:
        nonlocal parsed
        parsed += 1
        return offer_from(envelope, now_s)

    monkeypatch.setattr("pushd.rpc.services.publish.offer_from", count_parsed)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.sleep(0.001)
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        refused = await backend.refused(*[ClientEnvelope()] * 500_000)
        nursery.cancel_scope.cancel(reason="counted")
    assert refused == Refused(Code.DEADLINE_EXCEEDED, "publish timed out")
    assert turns >= 2
    assert 0 < parsed < 500_000
    assert rows(admin) == 0


async def test_a_topic_that_stays_locked_holds_up_its_own_publishers_only(
    database_url: str, metrics: Metrics, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever shared a statement with them is let go long before a statement's or a publish's time is over."""
    monkeypatch.setattr(placing, "LEADS", 1)
    monkeypatch.setattr(placing, "PATIENCE_S", 60.0)
    monkeypatch.setattr(placing, "SHARED_S", 0.2)
    groups = [n.to_bytes(16, "big") for n in range(20)]
    settings = DatabaseSettings(database_url, statement_timeout_ms=60_000)
    async with open_database(settings, metrics) as database:
        backend = Backend(database, metrics, max_duration_ms=60_000)
        placer = backend._publish._publisher._placer
        metas: dict[bytes, EnvelopeMeta] = {}

        async def run(group: bytes) -> None:
            [metas[group]] = await backend.publish(group_envelope(group))

        with psycopg.connect(database_url) as blocker, trio.fail_after(30):
            blocker.execute("SELECT pg_advisory_xact_lock(%s)", (topic_lock_key(b"\x00" + groups[7]),))
            async with trio.open_nursery() as nursery:
                for n, group in enumerate(groups):
                    nursery.start_soon(run, group)
                    if n == 0:
                        while repr(placer) != "<Placer waiting=0 running=1>":
                            await trio.lowlevel.checkpoint()
                while len(metas) < 19:  # noqa: ASYNC110 - nobody tells us
                    await trio.sleep(0.01)
                assert groups[7] not in metas
                blocker.rollback()
    assert rows(admin) == 20
    assert sorted(meta.cursor.sequence_id for meta in metas.values()) == list(range(1, 21))
    assert all(meta.topic.topic == b"\x00" + group for group, meta in metas.items())


async def test_a_caller_that_gives_up_in_a_shared_statement_takes_nobody_along(
    database: Database,
    database_url: str,
    metrics: Metrics,
    admin: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that leads is cut while its statement waits; the others' envelopes are stored once all the same."""
    monkeypatch.setattr(placing, "LEADS", 1)
    monkeypatch.setattr(placing, "PATIENCE_S", 60.0)
    monkeypatch.setattr(placing, "SHARED_S", 60.0)
    backend = Backend(database, metrics)
    sent = {n: (group_envelope(n.to_bytes(16, "big")), welcome_envelope()) for n in range(10)}
    told: dict[int, list[EnvelopeMeta]] = {}
    scopes = {n: trio.CancelScope() for n in sent}
    placer = backend._publish._publisher._placer

    async def run(n: int) -> None:
        with scopes[n]:
            told[n] = await backend.publish(*sent[n])

    with psycopg.connect(database_url) as blocker, trio.fail_after(30):
        blocker.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            for n in sent:
                nursery.start_soon(run, n)
                while repr(placer) != f"<Placer waiting={n} running=1>":
                    await trio.lowlevel.checkpoint()
            while admin.execute(_WAITING_TOPICS).fetchone() != (2,):  # noqa: ASYNC110 - nobody tells us
                await trio.sleep(0.01)
            scopes[0].cancel(reason="its caller is gone")  # the next statement is everybody else's, led by the second
            while admin.execute(_WAITING_TOPICS).fetchone() != (10,):  # noqa: ASYNC110 - nobody tells us
                await trio.sleep(0.01)
            scopes[1].cancel(reason="its caller is gone")
            scopes[5].cancel(reason="its caller is gone")
            while admin.execute(_WAITING_TOPICS).fetchone() == (10,):  # noqa: ASYNC110 - nobody tells us
                await trio.sleep(0.01)
            blocker.rollback()
    assert set(told) == {2, 3, 4, 6, 7, 8, 9}
    assert rows(admin) == 2 * 7
    for n, metas in told.items():
        assert await backend.publish(*sent[n]) == metas
        first, second = (meta.cursor.sequence_id for meta in metas)
        assert second == first + 1, "the ids of one request follow its order"
    assert rows(admin) == 2 * 7


# Topics locked by the session that waits for the table: nine groups and one installation in the shared statement.
_WAITING_TOPICS = """
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1
    AND pid = (SELECT min(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'relation')
"""


async def test_duplicates_ask_for_no_maintenance(backend: Backend) -> None:
    envelope = group_envelope()
    await backend.publish(envelope)
    await backend.publish(envelope, commit_log_envelope())
    assert backend.boundary_requests == 1


async def test_queries_that_cannot_be_answered(backend: Backend) -> None:
    group = b"\x00" + GROUP
    for topics, text in (
        ([b""], "topic is not valid"),
        ([group, b"\x05" + GROUP], "topic is not valid"),
        ([group + b"\x00"], "topic is not valid"),
        ([b"\x03" + INSTALLATION], "topic is not valid"),
        ([group] * 1_001, "query exceeds topic limit"),
    ):
        with pytest.raises(StatusError) as caught:
            await backend.query(*topics)
        assert Refused.of(caught.value) == Refused(Code.INVALID_ARGUMENT, text)


async def test_a_cursor_beyond_all_ids_is_refused(backend: Backend) -> None:
    assert not (await backend.query(b"\x00" + GROUP, after=2**63 - 1)).envelopes
    with pytest.raises(StatusError, match="cursor is not valid"):
        await backend.query(b"\x00" + GROUP, after=2**63)


async def test_queries_page_through_topics(backend: Backend) -> None:
    groups = [bytes((n,)) * 16 for n in range(3)]
    await backend.publish(*(group_envelope(groups[n % 3]) for n in range(150)))
    topics = [b"\x00" + group for group in groups[:2]]

    def ids(response: Any) -> list[int]:
        return [one.meta.cursor.sequence_id for one in response.envelopes]

    first = await backend.query(*topics)
    assert ids(first) == [n for n in range(1, 151) if n % 3 != 0]
    assert not first.continuation.has_more
    page = await backend.query(*topics, after=7, limit=5)
    assert ids(page) == [8, 10, 11, 13, 14]
    assert page.continuation.has_more
    everything = await backend.query(*(b"\x00" + group for group in groups), limit=0)
    assert len(everything.envelopes) == 100
    assert everything.continuation.has_more
    assert ids(await backend.query(limit=5)) == []


async def test_a_topic_named_twice_is_read_from_its_lower_cursor(backend: Backend) -> None:
    await backend.publish(*(group_envelope() for _ in range(4)))
    topic = Topic(topic=b"\x00" + GROUP)
    queries = [TopicQuery(topic=topic, cursor=Cursor(sequence_id=after)) for after in (3, 1, 2)]
    response = await backend._query.Query(QueryRequest(queries=queries))
    assert [one.meta.cursor.sequence_id for one in response.envelopes] == [2, 3, 4]


SEEDS = [envelope.SerializeToString() for envelope, *_ in KINDS.values()] + [identity_envelope().SerializeToString()]
MUTATION = st.tuples(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, 40),
)


def mutated(seed: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    data = bytearray(seed)
    for position, value in changes:
        data[position % len(data)] = value
    return bytes(data[: len(data) - cut]) if cut < 20 else bytes(data)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(MUTATION, min_size=10, max_size=40))
def test_a_mutated_payload_is_either_stored_whole_or_refused_without_a_trace(
    database_url: str, mutations: list[Any]
) -> None:
    async def run() -> None:
        metrics = Metrics()
        async with open_database(DatabaseSettings(database_url), metrics) as database:
            backend = Backend(database, metrics)
            for mutation in mutations:
                try:
                    envelope = ClientEnvelope.FromString(mutated(*mutation))
                except DecodeError:
                    continue
                before = rows(conn)
                try:
                    metas = await backend.publish(group_envelope(), envelope)
                except StatusError as error:
                    refused = error.code
                    added = (0,)
                else:
                    refused = None
                    added = (1, 2)
                    assert len(metas) == 2
                assert refused in (None, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)
                assert rows(conn) - before in added

    with psycopg.connect(database_url, autocommit=True) as conn:
        trio.run(run)


async def test_bytes_behind_an_mls_message_come_back(backend: Backend) -> None:
    envelope = ClientEnvelope(group_message=GroupMessage(data=private_message() + b"trailing"))
    await backend.publish(envelope)
    assert (await backend.query(b"\x00" + GROUP)).envelopes[0].envelope == envelope
