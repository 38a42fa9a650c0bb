"""What streams and the tailer read: pages, heads, unread ids; and the plans behind them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pushd.core.interest import TURN_ROWS, TURN_TOPICS
from pushd.core.outbound import ENVELOPE_OVERHEAD_BYTES, FRAME_BYTES
from pushd.core.unread import Unread
from pushd.rpc.translate_stream import encode_envelope
from pushd.store.database import Database
from pushd.store.queries import query
from pushd.store.streams import StreamPage, StreamStore
from pushd.store.tailer import TailerStore
from tests.support.envelopes import Row, insert_envelopes

A, B, C = (b"\x00" + bytes((n,)) * 16 for n in (1, 2, 3))


@pytest.fixture
def admin(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield conn


def places(page: StreamPage) -> list[tuple[int, int]]:
    return [(place, stored.meta.sequence_id) for place, stored in page.envelopes]


async def test_a_page_goes_topic_after_topic(database: Database, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(admin, [Row(A), Row(B), Row(A), Row(C), Row(B)])
    page = await StreamStore(database).load_page([B, C, A], [2, 4, 0])
    assert places(page) == [(0, 5), (2, 1), (2, 3)]
    assert not page.is_cut
    assert [stored.meta.topic for _, stored in page.envelopes] == [B, A, A]


async def test_a_topic_gives_its_share(database: Database, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(admin, [Row(A)] * 100 + [Row(B)])
    page = await StreamStore(database).load_page([A, B], [10, 0])
    assert places(page) == [(0, n) for n in range(11, 11 + TURN_ROWS)] + [(1, 101)]
    assert not page.is_cut, "it is each topic's share that ended, not the page"


async def test_a_page_is_cut_by_its_bytes(database: Database, admin: psycopg.Connection[Any]) -> None:
    size = 600_000
    insert_envelopes(admin, [Row(A, payload=bytes(size))] * 2 + [Row(B, payload=bytes(size))] * 3)
    page = await StreamStore(database).load_page([A, B], [0, 0])
    assert places(page) == [(0, 1), (0, 2), (1, 3)]
    assert page.is_cut


async def test_a_page_fits_a_frame_exactly_or_ends_before(database: Database, admin: psycopg.Connection[Any]) -> None:
    half = FRAME_BYTES // 2 - ENVELOPE_OVERHEAD_BYTES
    insert_envelopes(admin, [Row(A, payload=bytes(half))] * 2 + [Row(B, payload=bytes(half))] * 2)
    insert_envelopes(admin, [Row(C, payload=bytes(half + 1))] * 2)
    store = StreamStore(database)
    page = await store.load_page([A], [0])
    assert (places(page), page.is_cut) == ([(0, 1), (0, 2)], False)
    assert sum(len(encode_envelope(stored)) for _, stored in page.envelopes) <= FRAME_BYTES
    assert places(await store.load_page([C], [0])) == [(0, 5)]


async def test_the_first_envelope_always_fits(database: Database, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(admin, [Row(A, payload=bytes(FRAME_BYTES + 1)), Row(B)])
    page = await StreamStore(database).load_page([A, B], [0, 0])
    assert places(page) == [(0, 1)]
    assert page.is_cut


async def test_a_page_of_nothing(database: Database) -> None:
    page = await StreamStore(database).load_page([A, B], [0, 0])
    assert (places(page), page.is_cut) == ([], False)


async def test_heads_are_in_the_order_asked(database: Database, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(admin, [Row(A), Row(B), Row(A)])
    assert await StreamStore(database).load_heads([C, A, B]) == [0, 3, 2]
    assert await StreamStore(database).load_heads([]) == []


async def test_unread_ids_come_ascending_with_the_boundary(database: Database, admin: psycopg.Connection[Any]) -> None:
    insert_envelopes(admin, [Row(A, payload=b"abc"), Row(B)] * 5)  # 1..10
    insert_envelopes(admin, 2, close=False)
    async with TailerStore(database).open() as session:
        poll = await session.poll(Unread(8, ((2, 3), (6, 6))), 100)
        assert [(one.sequence_id, one.topic, one.payload_bytes) for one in poll.seen][:3] == [
            (2, B, 0),
            (3, A, 3),
            (6, B, 0),
        ]
        assert [one.sequence_id for one in poll.seen] == [2, 3, 6, 9, 10, 11, 12]
        assert (poll.boundary, poll.is_complete) == (10, True)
        poll = await session.poll(Unread(8, ((2, 3), (6, 6))), 4)
        assert [one.sequence_id for one in poll.seen] == [2, 3, 6, 9]
        assert not poll.is_complete
        poll = await session.poll(Unread(12), 4)
        assert (poll.boundary, list(poll.seen), poll.is_complete) == (10, [], True)
        assert [one.meta.sequence_id for one in await session.load([3, 99, 1])] == [1, 3]
        assert await session.load_boundary() == await TailerStore(database).load_primary_boundary() == 10


TOPICS = [b"\x00" + n.to_bytes(16, "big") for n in range(TURN_TOPICS)]
READS: dict[str, dict[str, Any]] = {
    "load_unread_ids": {"lows": [10, 20, 30_001], "highs": [10, 22, 2**63 - 1], "max_rows": 1_024},
    "load_topic_heads": {"topics": TOPICS[:1]},
    "load_stream_page": {
        "topics": TOPICS[:1],
        "cursors": [29_000],
        "topic_rows": TURN_ROWS,
        "overhead_bytes": ENVELOPE_OVERHEAD_BYTES,
        "max_bytes": FRAME_BYTES,
    },
    "load_envelopes_by_id": {"ids": [5, 6, 7]},
    "load_newest_envelopes": {"topics": TOPICS[:1], "max_bytes": 1_000},
}


def prepare(conn: psycopg.Connection[Any], name: str) -> None:
    names = list(READS[name])
    body = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", re.sub("--.*", "", query(name)))
    conn.execute(f"PREPARE {name} AS {body}".encode())


def buffers_of(conn: psycopg.Connection[Any], name: str) -> int:
    """Buffers that a prepared statement touches."""
    call = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE {} ({})").format(
        sql.Identifier(name), sql.SQL(", ").join(map(sql.Literal, READS[name].values()))
    )
    row = conn.execute(call).fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
def test_no_read_of_streams_scans_the_envelopes(mode: str, admin: psycopg.Connection[Any]) -> None:
    """Not even with a plan made while the table was empty, which a session may keep for long."""
    admin.execute(f"SET plan_cache_mode = {mode}".encode())
    for name in READS:
        prepare(admin, name)
        buffers_of(admin, name)
    insert_envelopes(admin, [Row(TOPICS[n % TURN_TOPICS]) for n in range(30_000)])
    [(all_pages,)] = admin.execute("SELECT pg_relation_size('envelopes') / 8192").fetchall()
    assert all_pages > 300
    for _ in ("without statistics", "with them"):
        for name in READS:
            assert buffers_of(admin, name) <= 48, name
        admin.execute("VACUUM ANALYZE envelopes")
