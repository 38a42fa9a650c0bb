"""The closed allocation boundary against real transactions: it never passes an id whose fate is open."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pushd.backend.boundary import BoundaryTask
from pushd.backend.placing import Placer
from pushd.core.admission import Retention
from pushd.errors import StoreError, StoreInvariant
from pushd.model import NewEnvelope, TopicKind
from pushd.store.boundary import advance_boundary, load_boundary
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.publish import publish_envelopes
from pushd.telemetry import Metrics
from tests.support.envelopes import insert_envelopes

WAIT_MS = 20


class Publisher:
    """A publisher taken to pieces on a session of its own, so that a test can stop between them."""

    def __init__(self, url: str) -> None:
        self.conn = psycopg.connect(url)

    def allocate(self) -> int:
        """BEGIN, take the barrier, take an id, insert a row."""
        self.conn.execute("SELECT pg_advisory_xact_lock_shared(0, 2)")
        [(sequence_id,)] = self.conn.execute("SELECT nextval('envelope_sequence')").fetchall()
        self.conn.execute(
            "INSERT INTO envelopes VALUES (%s, '\\x00', 0, NULL, sha256(%s::text::bytea), false, true, NULL, '')",
            (sequence_id, sequence_id),
        )
        return int(sequence_id)

    @property
    def pid(self) -> int:
        return self.conn.info.backend_pid


@pytest.fixture
def publishers(database_url: str) -> Iterator[Callable[[], Publisher]]:
    opened: list[Publisher] = []

    def open_one() -> Publisher:
        opened.append(Publisher(database_url))
        return opened[-1]

    yield open_one
    for publisher in opened:
        publisher.conn.close()


@pytest.fixture
def admin(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


async def advance(database: Database, wait_ms: int = WAIT_MS) -> int | None:
    async with database.primary() as connection:
        return await advance_boundary(connection, wait_ms)


async def until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    while not condition():
        meanwhile()
        await trio.sleep(0.01)


async def stored(database: Database) -> int:
    async with database.read() as connection:
        return await load_boundary(connection)


async def test_an_unused_sequence_closes_at_zero(database: Database) -> None:
    assert await advance(database) == 0
    assert await stored(database) == 0


async def test_B097_the_later_id_commits_first(database: Database, publishers: Callable[[], Publisher]) -> None:
    slow, fast = publishers(), publishers()
    assert slow.allocate() == 1
    assert fast.allocate() == 2
    fast.conn.commit()
    for _ in range(3):
        assert await advance(database) is None
        assert await stored(database) == 0
    slow.conn.commit()
    assert await advance(database) == 2
    assert await stored(database) == 2


async def test_B097_the_earlier_id_is_rolled_back(database: Database, publishers: Callable[[], Publisher]) -> None:
    slow, fast = publishers(), publishers()
    assert slow.allocate() == 1
    assert fast.allocate() == 2
    fast.conn.commit()
    assert await advance(database) is None
    slow.conn.rollback()
    assert await advance(database) == 2, "the gap is closed over for ever"


async def test_an_id_taken_and_rolled_back_alone_is_settled_too(
    database: Database, publishers: Callable[[], Publisher]
) -> None:
    publisher = publishers()
    publisher.allocate()
    publisher.conn.rollback()
    assert await advance(database) == 1


async def test_a_killed_publisher_frees_the_barrier(
    database: Database, publishers: Callable[[], Publisher], admin: psycopg.Connection[Any]
) -> None:
    victim, survivor = publishers(), publishers()
    victim.allocate()
    survivor.allocate()
    survivor.conn.commit()
    assert await advance(database) is None
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", (victim.pid,))
    assert await advance(database) == 2


async def test_a_publisher_stuck_in_its_statement_frees_the_barrier_when_the_statement_times_out(
    database_url: str, metrics: Metrics, publishers: Callable[[], Publisher]
) -> None:
    """It holds the barrier and waits for a table lock; whether its client still lives makes no difference."""
    blocker = publishers()
    blocker.conn.execute("LOCK TABLE topic_watermark IN EXCLUSIVE MODE")
    envelope = NewEnvelope(TopicKind.GROUP_MESSAGE, bytes(17), b"p", bytes(32))
    async with (
        open_database(DatabaseSettings(database_url, statement_timeout_ms=400), metrics) as database,
        trio.open_nursery() as nursery,
    ):

        async def publish() -> None:
            with pytest.raises(StoreError, match="database operation timed out"):
                await publish_envelopes(database, [envelope], Retention())

        nursery.start_soon(publish)
        with trio.fail_after(10):
            await until(lambda: blocker.conn.execute("SELECT FROM envelope_sequence WHERE is_called").rowcount == 1)
            assert await advance(database) is None
            closed = None
            while closed is None:
                closed = await advance(database)
        assert closed == 1, "the id was taken and lost"


async def test_a_publisher_that_stops_between_its_statement_and_the_commit_frees_the_barrier(
    database: Database, database_url: str, metrics: Metrics
) -> None:
    """Its statement is over, so no statement's time-out ends it; a stopped process looks just like this."""
    async with open_database(DatabaseSettings(database_url, statement_timeout_ms=200), metrics) as stopped:
        async with stopped.primary() as connection:
            await connection.execute("BEGIN")
            await connection.execute("SELECT pg_advisory_xact_lock_shared(0, 2), nextval('envelope_sequence')")
            assert await advance(database) is None
            with trio.fail_after(10):
                while await advance(database) is None:
                    pass
            assert await stored(database) == 1


async def test_the_boundary_is_not_written_when_nothing_was_taken(
    database: Database, admin: psycopg.Connection[Any]
) -> None:
    insert_envelopes(admin, 3, close=False)
    assert await advance(database) == 3
    [(before,)] = admin.execute("SELECT xmin FROM allocation_boundary").fetchall()
    assert await advance(database) == 3
    assert admin.execute("SELECT xmin FROM allocation_boundary").fetchall() == [(before,)]


async def test_an_idle_attempt_does_not_queue_for_the_barrier(
    database: Database, publishers: Callable[[], Publisher]
) -> None:
    holder = publishers()
    holder.conn.execute("SELECT pg_advisory_xact_lock_shared(0, 2)")
    assert await advance(database) == 0


@pytest.mark.parametrize(
    "damage", ["SELECT setval('envelope_sequence', 1)", "DELETE FROM allocation_boundary"], ids=["rewound", "missing"]
)
async def test_a_database_that_contradicts_itself_is_an_error(
    damage: str, database: Database, admin: psycopg.Connection[Any]
) -> None:
    insert_envelopes(admin, 5)
    admin.execute(damage)
    with pytest.raises(StoreInvariant):
        await advance(database)


async def test_T120_the_wait_ends_before_the_statement_does(
    database_url: str, metrics: Metrics, publishers: Callable[[], Publisher]
) -> None:
    holder = publishers()
    holder.allocate()
    async with open_database(DatabaseSettings(database_url, statement_timeout_ms=100), metrics) as database:
        assert await advance(database, wait_ms=1_000) is None
        assert await stored(database) == 0
        holder.conn.commit()
        assert await advance(database, wait_ms=1_000) == 1


@pytest.mark.parametrize(
    ("statement_timeout", "wait_ms", "lock_timeout"),
    [("0", 700, "700ms"), ("5s", 700, "700ms"), ("5s", 9_000, "2500ms"), ("1min", 9_000, "9s")],
)
def test_the_wait_is_clipped_to_half_of_the_statement(
    statement_timeout: str, wait_ms: int, lock_timeout: str, admin: psycopg.Connection[Any]
) -> None:
    insert_envelopes(admin, 1, close=False)
    with admin.transaction():
        admin.execute("SELECT set_config('statement_timeout', %s, true)", (statement_timeout,))
        assert admin.execute("SELECT close_allocation_boundary(%s)", (wait_ms,)).fetchone() == (1,)
        assert admin.execute("SHOW lock_timeout").fetchone() == (lock_timeout,)


async def test_T121_trouble_behind_the_barrier_is_an_error(
    database: Database, publishers: Callable[[], Publisher], admin: psycopg.Connection[Any]
) -> None:
    insert_envelopes(admin, 1, close=False)
    blocker = publishers()
    blocker.conn.execute("SELECT FROM allocation_boundary FOR UPDATE")
    with pytest.raises(StoreError):
        await advance(database)
    blocker.conn.rollback()
    assert await advance(database) == 1


async def test_two_instances_close_it_together(database: Database, publishers: Callable[[], Publisher]) -> None:
    holder = publishers()
    holder.allocate()
    results: list[int | None] = []

    async def attempt() -> None:
        results.append(await advance(database, wait_ms=5_000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt)
        nursery.start_soon(attempt)
        await trio.sleep(0.05)
        holder.conn.commit()
    assert results == [1, 1]


async def test_T118_attempts_at_a_held_barrier_keep_their_pace(
    database: Database, metrics: Metrics, publishers: Callable[[], Publisher], nursery: trio.Nursery
) -> None:
    poll_s = 0.1
    holder = publishers()
    task = BoundaryTask(lambda: advance(database), poll_interval_s=poll_s, metrics=metrics)
    await nursery.start(task.run)
    holder.allocate()
    timeouts = metrics.boundary_advances.labels("lock_timeout")
    started = trio.current_time()
    task.request()
    with trio.fail_after(20):
        await until(lambda: timeouts._value.get() >= 3, meanwhile=task.request)
    assert timeouts._value.get() <= (trio.current_time() - started) / poll_s + 1
    assert await stored(database) == 0
    holder.conn.commit()
    with trio.fail_after(20):
        assert await task.wait_above(0) == 1


async def test_T119_a_request_survives_the_loss_of_every_session(
    database: Database,
    metrics: Metrics,
    publishers: Callable[[], Publisher],
    admin: psycopg.Connection[Any],
    nursery: trio.Nursery,
) -> None:
    holder = publishers()
    task = BoundaryTask(lambda: advance(database), poll_interval_s=0.02, metrics=metrics)
    await nursery.start(task.run)
    holder.allocate()
    task.request()
    with trio.fail_after(20):
        await until(lambda: metrics.boundary_advances.labels("lock_timeout")._value.get() >= 1)
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid <> %s",
            (holder.pid,),
        )
        holder.conn.commit()
        assert await task.wait_above(0) == 1


ACTS = st.sampled_from(["commit", "rollback", "kill"])


@settings(max_examples=12, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(acts=st.lists(st.tuples(ACTS, st.integers(0, 8)), min_size=2, max_size=10))
def test_the_boundary_never_passes_an_open_id(database_url: str, acts: list[tuple[str, int]]) -> None:
    """Publishers that take some milliseconds and then commit, abort or die, while the boundary is closed as it comes.

    Before each attempt the open ids are noted; what it returns must lie below those still open when it is done.
    """
    lock = threading.Lock()
    open_ids: set[int] = set()

    def publish(act: str, delay_ms: int) -> None:
        conn = psycopg.connect(database_url)
        pid = conn.info.backend_pid
        conn.execute("SELECT pg_advisory_xact_lock_shared(0, 2)")
        with lock:
            [(sequence_id,)] = conn.execute("SELECT nextval('envelope_sequence')").fetchall()
            open_ids.add(sequence_id)
        time.sleep(delay_ms / 1_000)
        with lock:  # noted as closed only together with the act itself
            match act:
                case "commit":
                    conn.commit()
                case "rollback":
                    conn.rollback()
                case "kill":
                    with psycopg.connect(database_url, autocommit=True) as other:
                        other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
            open_ids.discard(sequence_id)
        conn.close()

    with (
        psycopg.connect(database_url, autocommit=True) as closer,
        ThreadPoolExecutor(len(acts)) as threads,
    ):
        running: list[Future[None]] = [threads.submit(publish, act, delay_ms) for act, delay_ms in acts]
        last = 0
        while not all(future.done() for future in running):
            [(closed,)] = closer.execute("SELECT close_allocation_boundary(3)").fetchall()
            with lock:
                if closed is not None:
                    assert closed >= last
                    assert not any(sequence_id <= closed for sequence_id in open_ids)
                    last = closed
        for future in running:
            future.result()
        [(closed,)] = closer.execute("SELECT close_allocation_boundary(1000)").fetchall()
        [(allocated,)] = closer.execute("SELECT last_value FROM envelope_sequence").fetchall()
        assert closed == allocated, "every id is settled once its publisher is gone"


# What a row's payload asks of its publisher's transaction: milliseconds to take with the id in hand, then to fail.
_OBEDIENT_ROWS = """
CREATE OR REPLACE FUNCTION obey() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(get_byte(NEW.payload, 0) / 1000.0);
    IF get_byte(NEW.payload, 1) = 1 THEN
        RAISE EXCEPTION 'as asked' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER obey BEFORE INSERT ON envelopes FOR EACH ROW EXECUTE FUNCTION obey();
"""
PUBLISHES = st.tuples(st.integers(0, 10), st.sampled_from([0, 0, 0, 1]), st.integers(1, 3), st.sampled_from([0, 0, 8]))


@settings(max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(publishes=st.lists(PUBLISHES, min_size=4, max_size=24), kills=st.integers(0, 2))
def test_nothing_appears_below_a_closed_boundary(
    database_url: str, publishes: list[tuple[int, int, int, int]], kills: int
) -> None:
    """The program's own publishes, sharing statements, that are slow, fail, are given up or lose their session.

    What a reader sees up to a boundary right after it was closed is all that there will ever be up to it.
    """

    async def run() -> None:
        metrics = Metrics()
        async with open_database(DatabaseSettings(database_url), metrics) as database:
            placer = Placer(lambda envelopes: publish_envelopes(database, envelopes, Retention()))

            async def publish(n: int, delay_ms: int, fails: int, size: int, patience_ms: int) -> None:
                envelopes = [
                    NewEnvelope(
                        TopicKind.GROUP_MESSAGE,
                        b"\x00" + (n % 5).to_bytes(16, "big"),
                        bytes((delay_ms, fails)),
                        hashlib.sha256(f"{next(numbers)} {m}".encode()).digest(),
                    )
                    for m in range(size)
                ]
                with trio.move_on_after(patience_ms / 1_000 or math.inf), suppress(StoreError):
                    placed = await placer.place(envelopes)
                    told.update(one.meta.sequence_id for one in placed if one is not None)

            async def work() -> None:
                async with trio.open_nursery() as publishers:
                    for n, (delay_ms, fails, size, patience_ms) in enumerate(publishes):
                        publishers.start_soon(publish, n, delay_ms, fails, size, patience_ms)
                    for _ in range(kills):
                        await trio.sleep(0.005)
                        conn.execute(_KILL_A_PUBLISHER)
                done.set()

            done = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                while not done.is_set():
                    closed = await advance(database, 3)
                    if closed is not None:
                        seen[closed] = visible(closed)
            allocated = conn.execute("SELECT last_value FROM envelope_sequence").fetchone()
            assert (await advance(database, 1_000),) in (allocated, (0,))

    def visible(up_to: int) -> list[int]:
        found = conn.execute("SELECT sequence_id FROM envelopes WHERE sequence_id <= %s ORDER BY 1", (up_to,))
        return [sequence_id for (sequence_id,) in found]

    numbers = itertools.count()
    seen: dict[int, list[int]] = {}
    told: set[int] = set()
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(_OBEDIENT_ROWS)
        conn.execute("TRUNCATE envelopes, topic_watermark")
        trio.run(run)
        for closed, ids in seen.items():
            assert visible(closed) == ids
        assert told <= set(visible(2**63 - 1)), "what a publisher was told is there"


_KILL_A_PUBLISHER = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE '%FROM publish_envelopes%'
    AND state = 'active' LIMIT 1
"""
