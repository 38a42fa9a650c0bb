"""What only the database knows: the lag as it is, and not a number from before when the database is away."""

from __future__ import annotations

import math
import time

import pytest
import trio

from pushd.errors import StoreUnavailable
from pushd.ops.progress import DATABASE_S, FRESH_S, Progress
from pushd.ops.status import Status
from pushd.store.database import Database
from pushd.telemetry import Metrics
from tests.dispatch.seed import Seed, topic

LAGS = ("rows", "seconds", "sequences")


def lag(metrics: Metrics) -> dict[str, float]:
    values = {name: metrics.registry.get_sample_value(f"pushd_push_cursor_lag_{name}") for name in LAGS}
    return {name: value for name, value in values.items() if value is not None}


async def test_lag_counts_eligible_rows_and_dates_the_oldest(
    database: Database, database_url: str, metrics: Metrics
) -> None:
    progress = Progress(database, metrics)
    with Seed(database_url) as seed:
        seed.envelopes([(number, topic(1)) for number in range(1, 11)])
        seed.envelopes([(number, topic(1)) for number in range(11, 16)], eligible=False)
        seed.settle(15)
        seed.conn.execute("UPDATE push_cursor SET sequence_id = 4")
        stored_s = time.time() - 90
        seed.conn.execute("UPDATE envelopes SET server_ns = %s WHERE sequence_id = 5", (int(stored_s * 1e9),))
    await progress.refresh()
    found = lag(metrics)
    assert (found["rows"], found["sequences"]) == (6, 11)
    assert found["seconds"] >= 90
    assert metrics.registry.get_sample_value("pushd_database_up") == 1
    assert progress.status is not None
    assert progress.status.holder is None


async def test_no_waiting_row_is_no_lag(database: Database, metrics: Metrics) -> None:
    await Progress(database, metrics).refresh()
    assert lag(metrics) == {"rows": 0, "seconds": 0, "sequences": 0}


class _Away:
    """A database that fails, or never answers."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs
        self.asked = 0

    def primary(self) -> _Away:
        return self

    async def __aenter__(self) -> None:
        self.asked += 1
        if self.hangs:
            await trio.sleep_forever()
        raise StoreUnavailable("connection")

    async def __aexit__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_database_that_is_away_leaves_no_old_number_and_holds_nobody_up(
    hangs: bool, metrics: Metrics, autojump_clock: object
) -> None:
    metrics.push_cursor_lag_rows.set(5)
    progress = Progress(_Away(hangs=hangs), metrics)  # type: ignore[arg-type]
    began = trio.current_time()
    await progress.refresh()
    assert trio.current_time() - began == (DATABASE_S if hangs else 0)
    assert progress.status is None
    assert metrics.registry.get_sample_value("pushd_database_up") == 0
    assert all(math.isnan(value) for value in lag(metrics).values())


async def test_readers_at_the_same_time_cost_one_statement(metrics: Metrics, autojump_clock: object) -> None:
    database = _Away(hangs=False)
    progress = Progress(database, metrics)  # type: ignore[arg-type]
    for round_ in (1, 2):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(progress.refresh)
        assert database.asked == round_
        await trio.sleep(FRESH_S)


@pytest.mark.parametrize("hangs", [False, True])
async def test_without_a_database_it_is_alive_but_not_ready_and_the_page_says_why(
    hangs: bool, metrics: Metrics, autojump_clock: object
) -> None:
    status = Status(_Away(hangs=hangs), metrics, ())  # type: ignore[arg-type]
    status.is_ready = True
    pages = status.pages()
    assert (await pages["/healthz"]()).status == 200
    ready = await pages["/readyz"]()
    assert (ready.status, ready.body) == (503, b"not ready: the database does not answer\n")
    assert b"the database does not answer" in (await pages["/"]()).body
    assert b"pushd_database_up 0.0" in (await pages["/metrics"]()).body


async def test_ready_is_database_and_listeners_and_standing_by_is_ready(database: Database, metrics: Metrics) -> None:
    status = Status(database, metrics, ())
    ready = status.pages()["/readyz"]
    before = await ready()
    assert (before.status, before.body) == (503, b"not ready: starting or stopping\n")
    status.is_ready = True
    assert (await ready()).body == b"ready\n"  # xmtp_push_dispatcher is 0 all the while
    assert metrics.registry.get_sample_value("xmtp_backend_ready") == 1
    status.is_ready = False
    assert (await ready()).status == 503
    assert metrics.registry.get_sample_value("xmtp_backend_ready") == 0
