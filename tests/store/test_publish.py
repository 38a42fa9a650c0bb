"""Storing envelopes: one statement, all or none, each once, ids in the order of commits within a topic."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import trio
from attrs import evolve

from pushd.core.admission import Retention
from pushd.core.topics import topic_lock_key
from pushd.errors import StoreInvariant, StoreTimeout
from pushd.model import NewEnvelope, TopicKind
from pushd.store.database import Connection, Database, DatabaseSettings, open_database
from pushd.store.envelopes import load_envelopes_of_topics
from pushd.store.publish import Placed, publish_envelopes
from pushd.telemetry import Metrics

RETENTION = Retention(group_message_s=10, welcome_s=20, key_package_s=30)


def topic(number: int) -> bytes:
    return b"\x00" + number.to_bytes(16, "big")


def envelope(number: int, *, of: int = 0) -> NewEnvelope:
    payload = b"payload %d" % number
    return NewEnvelope(TopicKind.GROUP_MESSAGE, topic(of), payload, hashlib.sha256(payload).digest())


async def publish(database: Database, *envelopes: NewEnvelope) -> list[Placed | None]:
    return await publish_envelopes(database, envelopes, RETENTION)


def ids(placed: list[Placed | None]) -> list[int | None]:
    return [None if one is None else one.meta.sequence_id for one in placed]


@pytest.fixture
def admin(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


async def test_ids_follow_the_order_of_the_request(database: Database) -> None:
    placed = await publish(database, *(envelope(n, of=-n % 7) for n in range(100)))
    assert ids(placed) == list(range(1, 101))
    assert all(one is not None and one.is_new for one in placed)


async def test_every_column_is_stored(database: Database, admin: psycopg.Connection[Any]) -> None:
    [(before_ns,)] = admin.execute("SELECT (extract(epoch FROM now()) * 1000000)::bigint * 1000").fetchall()
    commit = evolve(envelope(1), is_commit_or_proposal=True, push_eligible=True, sender_hmac=b"h" * 32)
    welcome = evolve(envelope(2, of=1), kind=TopicKind.WELCOME, push_eligible=True)
    plain = envelope(3)
    placed = await publish(database, commit, welcome, plain)
    rows = admin.execute(
        "SELECT sequence_id, topic, server_ns, expiry_ns, message_hash, is_commit_or_proposal, push_eligible,"
        " sender_hmac, payload FROM envelopes ORDER BY sequence_id"
    ).fetchall()
    now_ns = rows[0][2]
    assert before_ns <= now_ns < before_ns + 60 * 10**9
    assert rows == [
        (1, commit.topic, now_ns, None, commit.message_hash, True, True, b"h" * 32, commit.payload),
        (2, welcome.topic, now_ns, now_ns + 20 * 10**9, welcome.message_hash, False, True, None, welcome.payload),
        (3, plain.topic, now_ns, now_ns + 10 * 10**9, plain.message_hash, False, False, None, plain.payload),
    ]
    metas = [one.meta for one in placed if one is not None]
    assert [(meta.sequence_id, meta.server_ns, meta.expiry_ns) for meta in metas] == [
        (1, now_ns, None),
        (2, now_ns, now_ns + 20 * 10**9),
        (3, now_ns, now_ns + 10 * 10**9),
    ]
    assert admin.execute("SELECT topic, last_sequence_id FROM topic_watermark ORDER BY 1").fetchall() == [
        (topic(0), 3),
        (topic(1), 2),
    ]


async def test_what_is_stored_already_keeps_its_place_and_takes_no_id(
    database: Database, admin: psycopg.Connection[Any]
) -> None:
    first = await publish(database, envelope(1), envelope(2))
    again = await publish(database, envelope(2), envelope(3), envelope(1))
    assert ids(again) == [2, 3, 1]
    assert [one and one.is_new for one in again] == [False, True, False]
    assert [one and one.meta for one in again][0::2] == [one and one.meta for one in first][::-1]
    assert admin.execute("SELECT last_value FROM envelope_sequence").fetchall() == [(3,)]


async def test_a_duplicate_that_is_pruned_meanwhile_is_answered_as_it_was(
    database: Database, admin: psycopg.Connection[Any], database_url: str
) -> None:
    [first] = await publish(database, envelope(1))
    again: list[Placed | None] = []

    async def run() -> None:
        again.extend(await publish(database, envelope(1), envelope(2)))

    with psycopg.connect(database_url) as blocker:
        blocker.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until_waiting(admin, "relation", 1)
            admin.execute("DELETE FROM envelopes WHERE sequence_id = 1")
            blocker.rollback()
    assert first is not None
    assert again[0] == Placed(first.meta, is_new=False)
    assert ids(again) == [1, 2]


async def test_the_same_hash_elsewhere_is_another_envelope(database: Database) -> None:
    assert ids(await publish(database, envelope(1, of=0), envelope(1, of=1))) == [1, 2]


async def test_an_inadmissible_envelope_stores_nothing_and_takes_no_id(
    database: Database, admin: psycopg.Connection[Any]
) -> None:
    await publish(database, envelope(1))
    invalid = evolve(envelope(9), is_admissible=False)
    placed = await publish(database, envelope(1), envelope(2), invalid, envelope(3, of=5))
    assert ids(placed) == [1, None, None, None]
    assert admin.execute("SELECT count(*) FROM envelopes").fetchall() == [(1,)]
    assert admin.execute("SELECT topic FROM topic_watermark").fetchall() == [(topic(0),)]
    assert admin.execute("SELECT last_value FROM envelope_sequence").fetchall() == [(1,)]


async def test_an_inadmissible_envelope_that_is_stored_is_a_duplicate(database: Database) -> None:
    await publish(database, envelope(1))
    assert ids(await publish(database, evolve(envelope(1), is_admissible=False), envelope(2))) == [1, 2]


async def test_a_watermark_above_the_sequence_aborts_everything(
    database: Database, admin: psycopg.Connection[Any]
) -> None:
    admin.execute("INSERT INTO topic_watermark VALUES (%s, 1000)", (topic(3),))
    with pytest.raises(StoreInvariant):
        await publish(database, envelope(1), envelope(2, of=3))
    assert admin.execute("SELECT count(*) FROM envelopes").fetchall() == [(0,)]


async def test_T199_writers_of_one_topic_follow_one_another(
    database: Database, admin: psycopg.Connection[Any], database_url: str
) -> None:
    """With the first kept waiting inside its transaction, the second has not even taken an id."""
    placed: dict[str, list[int | None]] = {}

    async def run(name: str, number: int) -> None:
        placed[name] = ids(await publish(database, envelope(number)))

    with psycopg.connect(database_url) as blocker:
        blocker.execute("LOCK TABLE envelopes IN ACCESS EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "first", 1)
            await until_waiting(admin, "relation", 1)
            nursery.start_soon(run, "second", 2)
            await until_waiting(admin, "advisory", 1)
            assert admin.execute("SELECT is_called FROM envelope_sequence").fetchall() == [(False,)]
            blocker.rollback()
    assert placed == {"first": [1], "second": [2]}


async def test_T199_a_publish_that_fails_leaves_a_gap_and_its_retry_the_next_id(
    database_url: str, metrics: Metrics, admin: psycopg.Connection[Any]
) -> None:
    async with open_database(DatabaseSettings(database_url, statement_timeout_ms=200), metrics) as database:
        with psycopg.connect(database_url) as blocker:
            blocker.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
            with pytest.raises(StoreTimeout):
                await publish(database, envelope(1))
        assert ids(await publish(database, envelope(1))) == [2]
    assert admin.execute("SELECT sequence_id FROM envelopes").fetchall() == [(2,)]


async def test_a_concurrent_duplicate_is_found_behind_the_lock(
    database: Database, admin: psycopg.Connection[Any], database_url: str
) -> None:
    """It waits for the topic while the first commits; the look-up after the lock must see that commit."""
    placed: list[list[int | None]] = []

    async def run(one: NewEnvelope) -> None:
        placed.append(ids(await publish(database, one)))

    with psycopg.connect(database_url) as blocker:
        blocker.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, envelope(1))
            await until_waiting(admin, "relation", 1)
            # Its validation failed, as a retry's of an expiring key package may; that no longer matters.
            nursery.start_soon(run, evolve(envelope(1), is_admissible=False))
            await until_waiting(admin, "advisory", 1)
            blocker.rollback()
    assert placed == [[1], [1]]


async def test_a_default_isolation_that_is_stricter_changes_nothing(
    database_url: str, metrics: Metrics, admin: psycopg.Connection[Any]
) -> None:
    """With one snapshot for the whole transaction the look-up behind the lock would miss what the lock waited for."""
    name = admin.info.dbname
    admin.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    async with open_database(DatabaseSettings(database_url), metrics) as database:
        await test_a_concurrent_duplicate_is_found_behind_the_lock(database, admin, database_url)


# The view shows the whole server, and a session of the test before may still be ending in its own database.
IN_THIS_DATABASE = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"


async def test_topics_are_locked_in_ascending_order_of_their_keys(
    database: Database, admin: psycopg.Connection[Any], database_url: str
) -> None:
    """While the highest key is taken by somebody else, a publish holds all lower ones and has not begun the barrier."""
    topics = sorted((topic(n) for n in range(20)), key=topic_lock_key)
    with psycopg.connect(database_url) as blocker:
        blocker.execute("SELECT pg_advisory_xact_lock(%s)", (topic_lock_key(topics[-1]),))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish, database, *(envelope(n, of=n) for n in range(20)))
            await until_waiting(admin, "advisory", 1)
            locks = admin.execute(
                "SELECT count(*) FILTER (WHERE granted AND objsubid = 1), count(*) FILTER (WHERE objsubid = 2)"
                f" FROM pg_locks WHERE locktype = 'advisory' AND {IN_THIS_DATABASE} AND pid <> %s",
                (blocker.info.backend_pid,),
            ).fetchall()
            assert locks == [(19, 0)]
            blocker.rollback()


async def test_no_id_is_taken_before_the_barrier_is_granted(
    database: Database, admin: psycopg.Connection[Any], database_url: str
) -> None:
    """The boundary's proof: while somebody closes it, a publish that has all its topics has taken nothing yet."""
    with psycopg.connect(database_url) as closer:
        closer.execute("SELECT pg_advisory_xact_lock(0, 2)")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish, database, envelope(1))
            await until_waiting(admin, "advisory", 1)
            [held] = admin.execute(
                "SELECT objsubid, granted FROM pg_locks"
                f" WHERE locktype = 'advisory' AND {IN_THIS_DATABASE} AND pid <> %s ORDER BY 1",
                (closer.info.backend_pid,),
            ).fetchall()[:1]
            assert held == (1, True), "its topic"
            assert admin.execute("SELECT is_called FROM envelope_sequence").fetchall() == [(False,)]
            closer.rollback()
    assert admin.execute("SELECT last_value, is_called FROM envelope_sequence").fetchall() == [(1, True)]


async def test_twenty_publishes_of_a_thousand_topics_each_run_together(database: Database) -> None:
    """Every one takes a thousand locks; they overlap by half, in opposite orders."""
    stored: list[int | None] = []

    async def run(first: int) -> None:
        numbers = range(first, first + 1_000)
        placed = await publish(database, *(envelope(first * 10_000 + n, of=n) for n in reversed(numbers)))
        stored.extend(ids(placed))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(run, n * 500)
    assert sorted(one or 0 for one in stored) == list(range(1, 20_001))


async def test_a_cancelled_publish_is_stored_whole_or_not_at_all(
    database: Database, admin: psycopg.Connection[Any], database_url: str
) -> None:
    with psycopg.connect(database_url) as blocker:
        blocker.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
        with trio.move_on_after(0.2) as scope:
            await publish(database, envelope(1), envelope(2, of=1))
        assert scope.cancelled_caught
        with trio.fail_after(10):  # the server was told, so nothing still waits for the table
            await until_waiting(admin, "relation", 0)
    assert admin.execute("SELECT count(*) FROM envelopes").fetchall() == [(0,)]


class OneSession:
    """A database that is one session, for a test about what a session remembers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def fetch_on_primary(self, query: str, params: Any) -> Any:
        return await self.connection.fetch(query, params, binary=True)


async def test_lookups_use_the_index_whatever_the_table_looked_like_at_first(
    database: Database, admin: psycopg.Connection[Any]
) -> None:
    """The function's plans are cached per session: made on an empty table, they must still fit a full one."""
    async with database.primary() as connection:
        for n in range(10):
            await publish_envelopes(OneSession(connection), [envelope(n)], RETENTION)
        admin.execute(
            "INSERT INTO envelopes SELECT nextval('envelope_sequence'), %s, 0, NULL, sha256(n::text::bytea), false,"
            " false, NULL, '' FROM generate_series(1, 20000) n",
            (topic(1),),
        )
        [(before,)] = await connection.fetch(
            "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'envelopes'"
        )
        async with connection.transaction():
            await publish_envelopes(OneSession(connection), [envelope(n, of=n) for n in range(50, 100)], RETENTION)
            [(read,)] = await connection.fetch(
                "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'envelopes'"
            )
    assert read == before == 0


async def until_waiting(admin: psycopg.Connection[Any], event: str, sessions: int) -> None:
    """Wait until this many sessions of the database wait for a lock of this kind."""
    with trio.fail_after(10):
        statement = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = %s"
        while admin.execute(statement, (event,)).fetchall() != [(sessions,)]:  # noqa: ASYNC110 - nobody tells us
            await trio.sleep(0.005)


async def load(database: Database, cursors: dict[bytes, int], limit: int = 100, max_bytes: int = 10**9) -> Any:
    async with database.primary() as connection:
        page = await load_envelopes_of_topics(connection, cursors, limit=limit, max_bytes=max_bytes)
    return [stored.meta.sequence_id for stored in page.envelopes], page.has_more


async def test_topics_are_read_back_in_sequence_order(database: Database) -> None:
    placed = await publish(database, *(envelope(n, of=n % 3) for n in range(9)))
    assert await load(database, {topic(0): 0, topic(2): 0}) == ([1, 3, 4, 6, 7, 9], False)
    assert await load(database, {topic(0): 4, topic(1): 7}) == ([7, 8], False)
    assert await load(database, {topic(0): 0, topic(1): 0}, limit=4) == ([1, 2, 4, 5], True)
    assert await load(database, {topic(0): 0}, limit=3) == ([1, 4, 7], False)
    assert await load(database, {topic(9): 0}) == ([], False)
    async with database.primary() as connection:
        page = await load_envelopes_of_topics(connection, {topic(1): 0}, limit=1, max_bytes=1_000)
    assert page.envelopes[0].meta == (placed[1] and placed[1].meta)
    assert page.envelopes[0].payload == envelope(1).payload


@pytest.mark.parametrize(
    ("max_bytes", "expected"), [(0, ([1], True)), (18, ([1, 2], True)), (26, ([1, 2], True)), (27, ([1, 2, 3], False))]
)
async def test_a_page_ends_before_it_grows_too_long(database: Database, max_bytes: int, expected: Any) -> None:
    await publish(database, *(envelope(n) for n in range(3)))  # nine bytes each
    assert await load(database, {topic(0): 0}, max_bytes=max_bytes) == expected


async def test_the_session_of_a_cancelled_or_failed_publish_is_used_again(
    database_url: str, metrics: Metrics, admin: psycopg.Connection[Any]
) -> None:
    async with open_database(DatabaseSettings(database_url, max_connections=1, acquire_s=5.0), metrics) as database:
        assert ids(await publish(database, envelope(1))) == [1]
        with psycopg.connect(database_url) as blocker:
            blocker.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
            with trio.move_on_after(0.1) as scope:
                await publish(database, envelope(2))
            assert scope.cancelled_caught
        admin.execute("INSERT INTO topic_watermark VALUES (%s, 1000)", (topic(3),))
        with pytest.raises(StoreInvariant):
            await publish(database, envelope(3, of=3))
        [(pid,)] = await database.fetch_on_primary("SELECT pg_backend_pid()")
        assert ids(await publish(database, envelope(1))) == [1]
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        assert ids(await publish(database, envelope(1))) == [1], "a new session took the place of the dead one"
