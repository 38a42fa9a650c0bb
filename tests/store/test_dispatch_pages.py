"""The window statements against a real PostgreSQL: what they return, and that no plan makes them expensive."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pushd.core.window import Page, PageRequest
from pushd.errors import StoreTimeout
from pushd.model import WINDOW_ROWS, Channel, DeliveryConfig
from pushd.store.database import Database
from pushd.store.dispatch import DispatchStore
from pushd.store.dispatch_pages import _SESSION, PageReader
from pushd.store.queries import query
from tests.dispatch.seed import SECRET_HASH, SIGNING_KEY, Seed, recipient_id, target, topic


@pytest.fixture
def seed(database_url: str) -> Iterator[Seed]:
    with Seed(database_url) as opened:
        yield opened


async def window(reader: PageReader, floor: int = 0) -> list[Page]:
    """All pages of the window above `floor`."""
    request = PageRequest(floor)
    pages = [await reader.read(request, WINDOW_ROWS)]
    last = pages[0].last
    assert last is not None
    request = request.from_start(last)
    while pages[-1].is_full:
        end = pages[-1].deliveries[-1]
        request = request.after((end.sequence_id, end.recipient_id))
        pages.append(await reader.read(request, WINDOW_ROWS))
    return pages


async def test_t080_rows_nobody_subscribed_to_give_bounds_and_no_delivery(database: Database, seed: Seed) -> None:
    seed.envelopes((n, topic(1)) for n in range(1, 5))
    seed.settle(4)
    async with DispatchStore(database).open_pages() as reader:
        assert await reader.read(PageRequest(0), WINDOW_ROWS) == Page(4, 1, 4, [], [], is_full=False)
        assert await reader.read(PageRequest(4), WINDOW_ROWS) == Page(4, None, None, [], [], is_full=False)


async def test_t081_pages_with_start_positions_and_commits(database: Database, seed: Seed) -> None:
    seed.recipients(range(1, 1_004))
    seed.subscribe(range(1, 1_002), topic(1))
    seed.subscribe([1_002], topic(1), commits=True)
    seed.subscribe([1_003], topic(1), commits=True, since=2)
    seed.envelopes([(1, topic(1))], commit=True)
    seed.envelopes([(2, topic(1))])
    seed.settle(2)
    async with DispatchStore(database).open_pages() as reader:
        pages = await window(reader)
    assert [(len(page.deliveries), page.is_full) for page in pages] == [(1_000, True), (3, False)]
    assert Counter(item.sequence_id for page in pages for item in page.deliveries) == {1: 1, 2: 1_002}


async def test_window_holds_1024_eligible_settled_rows_in_order(database: Database, seed: Seed) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    seed.envelopes((n, topic(1)) for n in range(1, 2_000, 2))
    seed.envelopes(((n, topic(1)) for n in range(2, 2_001, 2)), eligible=False)
    seed.envelopes((n, topic(1)) for n in range(2_001, 2_200))
    seed.settle(2_100)
    async with DispatchStore(database).open_pages() as reader:
        first, second = await window(reader), await window(reader, 2_024)
    assert (first[0].first, first[0].last) == (1, 2_024)
    assert [item.sequence_id for page in first for item in page.deliveries] == [
        *range(1, 2_000, 2),
        *range(2_001, 2_025),
    ]
    assert [item.sequence_id for page in second for item in page.deliveries] == list(range(2_025, 2_101))


async def test_every_pair_comes_exactly_once_in_order(database: Database, seed: Seed) -> None:
    seed.recipients(range(1, 700))
    seed.subscribe(range(1, 700), topic(1))
    seed.subscribe(range(1, 700, 7), topic(2))
    seed.envelopes((n, topic(n % 3)) for n in range(1, 40))
    seed.settle(39)
    async with DispatchStore(database).open_pages() as reader:
        pages = await window(reader)
    pairs = [(item.sequence_id, item.recipient_id) for page in pages for item in page.deliveries]
    assert pairs == sorted(set(pairs))
    assert len(pairs) == 13 * 699 + 13 * 100
    assert all(len(page.deliveries) <= 1_000 for page in pages)


async def test_delivery_carries_what_the_send_and_the_guard_need(database: Database, seed: Seed) -> None:
    seed.recipients([1], Channel.APNS)
    seed.recipients([2], Channel.HTTP)
    seed.subscribe([1, 2], topic(7))
    seed.envelopes([(1, topic(7)), (2, topic(7))])
    seed.settle(2)
    async with DispatchStore(database).open_pages() as reader:
        (page,) = await window(reader)
    first, second = page.deliveries[:2]
    assert (first.topic, first.recipient_id, first.secret_hash) == (topic(7), recipient_id(1), SECRET_HASH)
    assert first.config == DeliveryConfig(Channel.APNS, target(1, Channel.APNS), None)
    assert second.config == DeliveryConfig(Channel.HTTP, target(2, Channel.HTTP), SIGNING_KEY)
    assert page.deliveries[2].config is first.config, "one object for all deliveries of a recipient"


async def test_changed_configuration_is_a_new_one(database: Database, seed: Seed) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    seed.envelopes([(1, topic(1))])
    seed.settle(1)
    async with DispatchStore(database).open_pages() as reader:
        await window(reader)
        seed.conn.execute("UPDATE push_recipient SET delivery = 'other', channel = 2")
        (page,) = await window(reader)
    assert page.deliveries[0].config == DeliveryConfig(Channel.FCM, "other")


async def test_checks_are_asked_for_only_where_tag_key_and_epoch_meet(database: Database, seed: Seed) -> None:
    keys = [bytes([n]) * 42 for n in (1, 2)]
    seed.recipients(range(1, 5))
    seed.subscribe([1], topic(1), epoch_base=9, keys=keys)  # covers 9 and 10
    seed.subscribe([2], topic(1))
    seed.subscribe([3], topic(1), epoch_base=10, keys=[])
    seed.subscribe([4], topic(1), epoch_base=11, keys=keys)
    for row, (epoch, tag) in enumerate([(9, b"t"), (10, b"u"), (11, b"v"), (10, None)], 1):
        seed.envelopes([(row, topic(1))], epoch=epoch, sender_hmac=tag and tag * 32)
    seed.settle(4)
    async with DispatchStore(database).open_pages() as reader:
        (page,) = await window(reader)
    found = {
        (check.sequence_id, page.deliveries[check.place].recipient_id, check.key, check.sender_hmac[:1])
        for check in page.checks
    }
    assert found == {
        (1, recipient_id(1), keys[0], b"t"),
        (2, recipient_id(1), keys[1], b"u"),
        (3, recipient_id(4), keys[0], b"v"),
    }


async def test_bounds_stay_fixed_when_rows_vanish_between_pages(database: Database, seed: Seed) -> None:
    seed.recipients(range(1, 1_500))
    seed.subscribe(range(1, 1_500), topic(1))
    seed.envelopes([(1, topic(1)), (2, topic(2))])
    seed.settle(2)
    async with DispatchStore(database).open_pages() as reader:
        page = await reader.read(PageRequest(0), WINDOW_ROWS)
        assert (page.last, page.is_full) == (2, True)
        seed.conn.execute("DELETE FROM envelopes")
        end = page.deliveries[-1]
        following = PageRequest(0).from_start(2).after((end.sequence_id, end.recipient_id))
        assert await reader.read(following, WINDOW_ROWS) == Page(2, None, None, [], [], is_full=False)


async def test_page_reports_the_boundary_its_own_snapshot_sees(database: Database, seed: Seed) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    seed.envelopes([(1, topic(1)), (2, topic(1))])
    async with DispatchStore(database).open_pages() as reader:
        for boundary, expected in ((0, None), (1, 1), (2, 2)):
            seed.settle(boundary)
            page = await reader.read(PageRequest(0), WINDOW_ROWS)
            assert (page.boundary, page.last) == (boundary, expected)
            later = await reader.read(PageRequest(0).from_start(2), WINDOW_ROWS)
            assert later.boundary == boundary


async def test_payloads_come_within_a_budget_but_at_least_one(database: Database, seed: Seed) -> None:
    for row, size in enumerate([100, 300, 100, 900], 1):
        seed.envelopes([(row, topic(1))], payload=bytes([row]) * size)
    async with DispatchStore(database).open_pages() as reader:

        async def rows(ids: list[int], budget: int) -> list[int]:
            return [row for row, _ in await reader.payloads(ids, budget)]

        assert await reader.payloads([1], 1) == [(1, b"\x01" * 100)]
        assert await rows([1, 2, 3, 4], 500) == [1, 2, 3]
        assert await rows([4, 2, 1], 400) == [1, 2]
        assert await rows([2, 3], 299) == [2]
        assert await rows([2, 99], 10_000) == [2]
        assert await rows([99], 10_000) == []
        assert await rows([], 10_000) == []


async def test_page_that_takes_too_long_leaves_the_session_usable(database: Database, seed: Seed) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    seed.envelopes([(1, topic(1))])
    seed.settle(1)
    async with DispatchStore(database).open_pages() as reader:
        await reader._connection.execute("SET statement_timeout = 50")
        with psycopg.connect(seed.conn.info.dsn) as blocker:
            blocker.execute("LOCK TABLE push_subscription IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StoreTimeout):
                await reader.read(PageRequest(0), WINDOW_ROWS)
        assert len((await reader.read(PageRequest(0), WINDOW_ROWS)).deliveries) == 1


# Plans. What counts is buffers: they are the same on every machine.

BIG, WIDE, EMPTY, HUGE = range(1, 5)
PARAMETERS = {
    "floor": "bigint",
    "rows": "bigint",
    "page": "bigint",
    "resume_row": "bigint",
    "resume_recipient": "bytea",
    "last": "bigint",
}


@pytest.fixture(scope="module")
def planned(postgres: str) -> Iterator[psycopg.Connection[Any]]:
    """One topic with 1,000 recipients and 1,024 rows; 1,024 topics with 39; 20,000 rows for nobody; one with 20,000."""
    name = "planned"
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE IF EXISTS {name}")
        conn.execute(f"CREATE DATABASE {name} TEMPLATE migrated")
    url = psycopg.conninfo.make_conninfo(postgres, dbname=name)
    with Seed(url) as seed:
        seed.conn.execute("SET synchronous_commit = off")
        seed.recipients(range(20_000))
        seed.subscribe(range(0, 20_000, 20), topic(BIG))
        for number in range(1_024):
            seed.subscribe(((number * 7 + step * 513) % 20_000 for step in range(39)), topic(10_000 + number))
        seed.subscribe(range(20_000), topic(HUGE))
        seed.envelopes((n, topic(BIG)) for n in range(1, 1_025))
        seed.envelopes((n, topic(10_000 + n - 2_000)) for n in range(2_000, 3_024))
        seed.envelopes((n, topic(HUGE)) for n in range(4_000, 4_003))
        seed.envelopes((n, topic(EMPTY)) for n in range(10_000, 30_000))
        seed.settle(30_000)
        seed.conn.execute(_SESSION)
        yield seed.conn
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def buffers(conn: psycopg.Connection[Any], name: str, values: dict[str, Any]) -> tuple[int, int]:
    """Buffers touched and rows returned by a statement of `sql/queries`, as a prepared one."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    body = re.sub(r"%\((\w+)\)s", number, re.sub(r"--.*", "", query(name)))
    types = ", ".join(PARAMETERS[name] for name in names)
    conn.execute(f"PREPARE planned({types}) AS {body}" if names else f"PREPARE planned AS {body}")
    try:
        literals = ", ".join(
            f"'\\x{value.hex()}'" if isinstance(value, bytes) else str(value) for value in map(values.get, names)
        )
        call = f"planned({literals})" if names else "planned"
        row = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE {call}").fetchone()
    finally:
        conn.execute("DEALLOCATE planned")
    assert row is not None
    plan = (json.loads(row[0]) if isinstance(row[0], str) else row[0])[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], plan["Actual Rows"]


FIRST, NEXT = "load_window_page", "load_window_next_page"
RECIPIENT = recipient_id(10_000)


@pytest.mark.parametrize("plan", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize("statistics", [False, True])
def test_page_costs_the_same_wherever_it_lies_and_however_it_is_planned(
    planned: psycopg.Connection[Any], plan: str, statistics: bool
) -> None:
    conn = planned
    if statistics:
        conn.execute("ANALYZE")
    else:
        conn.execute(
            "DELETE FROM pg_statistic WHERE starelid = ANY (%s::regclass[])",
            (["envelopes", "push_subscription", "push_recipient"],),
        )
    conn.execute(f"SET plan_cache_mode = {plan}")
    limits = {"rows": WINDOW_ROWS, "page": 1_000}
    full = {
        "one topic": (FIRST, {"floor": 0}),
        "one topic, second page": (NEXT, {"resume_row": 1, "resume_recipient": recipient_id(19_980), "last": 1_024}),
        "one topic, middle": (NEXT, {"resume_row": 500, "resume_recipient": RECIPIENT, "last": 1_024}),
        "many topics": (FIRST, {"floor": 1_999}),
        "many topics, middle": (NEXT, {"resume_row": 2_500, "resume_recipient": RECIPIENT, "last": 3_023}),
        "huge topic": (FIRST, {"floor": 3_999}),
        "huge topic, middle": (NEXT, {"resume_row": 4_001, "resume_recipient": RECIPIENT, "last": 4_002}),
    }
    for name, (statement, values) in full.items():
        touched, rows = buffers(conn, statement, limits | values)
        assert rows == 1_000, name
        # Three or four for the recipient of each delivery, one or two for its subscription.
        assert touched <= 7_000, (name, touched)
    for name, statement, values, most in (
        ("nobody", FIRST, {"floor": 9_999}, 4_500),
        ("last page", NEXT, {"resume_row": 1_024, "resume_recipient": recipient_id(19_980), "last": 1_024}, 32),
        ("idle", FIRST, {"floor": 30_000}, 16),
    ):
        touched, rows = buffers(conn, statement, limits | values)
        assert rows == 1, name
        assert touched <= most, (name, touched)


@pytest.mark.parametrize("plan", ["force_generic_plan", "force_custom_plan"])
def test_t117_asking_for_maintenance_is_cheap(planned: psycopg.Connection[Any], plan: str) -> None:
    planned.execute(f"SET plan_cache_mode = {plan}")
    touched, _ = buffers(planned, "need_boundary_maintenance", {})
    assert touched <= 8
