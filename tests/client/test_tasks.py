"""The task runner under a virtual clock: durable, one at a time, the earliest deadline first."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import trio

from pushd.client.database import open_database
from pushd.client.tasks import MAX_SLEEP_NS, Backoff, Tasks, TryAgain
from tests.client.rig import INSTALLATION

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS


class Runner:
    """Tasks on a virtual clock, with a journal of (kind, payload, seconds since the start)."""

    def __init__(self, path: Path) -> None:
        self.skew_ns = 0
        self.began = trio.current_time()
        self.file = open_database(path, INSTALLATION)
        self.db = self.file.__enter__()
        self.db.execute("PRAGMA synchronous = OFF")
        self.tasks = Tasks(self.db, self.now_ns)
        self.journal: list[tuple[str, bytes, float]] = []

    @property
    def elapsed_s(self) -> float:
        return round(trio.current_time() - self.began, 3)

    def now_ns(self) -> int:
        return START_NS + round((trio.current_time() - self.began) * SECOND_NS) + self.skew_ns

    def after(self, seconds: float) -> int:
        return self.now_ns() + round(seconds * SECOND_NS)

    def note(self, kind: str, payload: bytes) -> None:
        self.journal.append((kind, payload, self.elapsed_s))


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    made = Runner(tmp_path / "tasks.db")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.tasks.run)
        yield made
        nursery.cancel_scope.cancel()
    made.file.__exit__(None, None, None)


async def test_earliest_deadline_goes_first_and_one_at_a_time(runner: Runner, autojump_clock) -> None:
    running = 0

    async def handler(payload: bytes) -> None:
        nonlocal running
        running += 1
        assert running == 1
        runner.note("work", payload)
        await anyio.sleep(10)
        running -= 1

    runner.tasks.handle("work", handler)
    for payload, due_s in ((b"c", 30), (b"b", 6), (b"a", 5)):
        runner.tasks.add("work", payload, due_ns=runner.after(due_s))
    await trio.sleep(100)
    assert runner.journal == [("work", b"a", 5), ("work", b"b", 15), ("work", b"c", 30)]
    assert runner.db.execute("SELECT count(*) FROM task").fetchone() == (0,)


async def test_failures_double_the_wait_up_to_the_longest(runner: Runner, autojump_clock) -> None:
    async def handler(payload: bytes) -> None:
        runner.note("work", payload)
        raise TryAgain

    runner.tasks.handle("work", handler, Backoff(first_ns=60 * SECOND_NS, longest_ns=300 * SECOND_NS))
    runner.tasks.add("work")
    await trio.sleep(1_500)
    assert [time for _, _, time in runner.journal] == [0, 60, 180, 420, 720, 1_020, 1_320]


async def test_task_is_given_up_after_its_attempts_or_its_time(runner: Runner, caplog, autojump_clock) -> None:
    async def handler(payload: bytes) -> None:
        runner.note("work", payload)
        raise TryAgain

    runner.tasks.handle("work", handler, Backoff(max_attempts=2))
    runner.tasks.add("work", b"attempts")
    runner.tasks.add("work", b"time", due_ns=runner.after(10), expires_ns=runner.after(40))
    await trio.sleep(1_000)
    assert runner.journal == [("work", b"attempts", 0), ("work", b"time", 10), ("work", b"attempts", 60)]
    assert runner.db.execute("SELECT count(*) FROM task").fetchone() == (0,)
    assert len(caplog.records) == 2


async def test_broken_handler_takes_nothing_along_and_says_nothing_private(
    runner: Runner, caplog, autojump_clock
) -> None:
    async def broken(payload: bytes) -> None:
        runner.note("broken", payload)
        raise ValueError("secret-in-a-text")

    async def sound(payload: bytes) -> None:
        runner.note("sound", payload)

    runner.tasks.handle("broken", broken)
    runner.tasks.handle("sound", sound)
    runner.tasks.add("broken", b"secret-payload")
    runner.tasks.add("sound")
    await trio.sleep(61)
    assert [(kind, time) for kind, _, time in runner.journal] == [("broken", 0), ("sound", 0), ("broken", 60)]
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
    assert all(record.exc_info is None for record in caplog.records)


async def test_file_that_takes_no_writes_for_a_while_ends_nothing(runner: Runner, caplog, autojump_clock) -> None:
    async def handler(payload: bytes) -> int:
        runner.note("work", payload)
        return runner.after(3_600)

    runner.tasks.handle("work", handler)
    runner.tasks.add("work", due_ns=runner.after(10))
    runner.db.execute("PRAGMA query_only = 1")  # fails as a full disk does
    await trio.sleep(100)
    runner.tasks.wake("work")
    await trio.sleep(100)
    runner.db.execute("PRAGMA query_only = 0")
    await trio.sleep(5_000)
    assert [time for _, _, time in runner.journal][:2] == [10, 70]  # a minute apart, never a storm
    assert len(runner.journal) <= 6
    assert {record.getMessage() for record in caplog.records} == {"the local file cannot be written"}
    assert runner.db.execute("SELECT count(*), attempts FROM task").fetchone() == (1, 0)


async def test_same_task_again_is_brought_forward_but_not_out_of_a_backoff(runner: Runner, autojump_clock) -> None:
    fails = True

    async def handler(payload: bytes) -> None:
        runner.note("work", payload)
        if fails:
            raise TryAgain

    runner.tasks.handle("work", handler)
    runner.tasks.add("work", due_ns=runner.after(500))
    runner.tasks.add("work", due_ns=runner.after(1_000))
    runner.tasks.add("work", due_ns=runner.after(100))
    assert runner.db.execute("SELECT count(*) FROM task").fetchone() == (1,)
    await trio.sleep(110)
    fails = False
    runner.tasks.add("work")
    runner.tasks.wake("work")
    await trio.sleep(100)
    assert [time for _, _, time in runner.journal] == [100, 160]


async def test_task_added_again_while_it_runs_runs_again(runner: Runner, autojump_clock) -> None:
    async def handler(payload: bytes) -> None:
        runner.note("work", payload)
        await anyio.sleep(10)

    runner.tasks.handle("work", handler)
    runner.tasks.add("work")
    await trio.sleep(5)
    runner.tasks.add("work", due_ns=runner.after(50))
    await trio.sleep(100)
    assert [time for _, _, time in runner.journal] == [0, 55]


async def test_wake_during_a_run_counts_for_after_it(runner: Runner, autojump_clock) -> None:
    async def handler(payload: bytes) -> int:
        runner.note("work", payload)
        await anyio.sleep(10)
        return runner.after(3_600)

    runner.tasks.handle("work", handler)
    runner.tasks.add("work")
    await trio.sleep(5)
    for _ in range(20):
        runner.tasks.wake("work")
    await trio.sleep(3_650)
    assert [time for _, _, time in runner.journal] == [0, 10, 3_620]
    assert runner.db.execute("SELECT count(*), attempts FROM task").fetchone() == (1, 0)


async def test_task_without_a_handler_waits_for_one_and_holds_nobody_up(runner: Runner, autojump_clock) -> None:
    async def handler(payload: bytes) -> None:
        runner.note("known", payload)

    runner.tasks.add("unknown")
    runner.tasks.handle("known", handler)
    runner.tasks.add("known", due_ns=runner.after(10))
    await trio.sleep(20)
    assert runner.journal == [("known", b"", 10)]
    runner.tasks.handle("unknown", handler)
    await trio.sleep(1)
    assert runner.journal[1:] == [("known", b"", 20)]


async def test_task_far_away_is_reached(runner: Runner, autojump_clock) -> None:
    async def handler(payload: bytes) -> None:
        runner.note("work", payload)

    runner.tasks.handle("work", handler)
    far_s = 3.5 * MAX_SLEEP_NS / SECOND_NS
    runner.tasks.add("work", due_ns=runner.after(far_s))
    await trio.sleep(far_s + 1)
    assert runner.journal == [("work", b"", far_s)]


async def test_clock_set_back_during_a_wait_does_not_lengthen_it(runner: Runner, autojump_clock) -> None:
    async def handler(payload: bytes) -> None:
        runner.note("work", payload)

    runner.tasks.handle("work", handler)
    runner.tasks.add("work", due_ns=runner.after(3_600))
    await trio.sleep(10)
    runner.skew_ns -= 30 * MAX_SLEEP_NS
    await trio.sleep(4_000)
    assert [time for _, _, time in runner.journal] == [3_600]


async def test_tasks_outlive_their_process(tmp_path: Path, autojump_clock) -> None:
    with open_database(tmp_path / "tasks.db", INSTALLATION) as db:
        Tasks(db).add("work", b"payload", due_ns=1)
    seen: list[bytes] = []

    async def handler(payload: bytes) -> None:
        seen.append(payload)

    with open_database(tmp_path / "tasks.db", INSTALLATION) as db:
        tasks = Tasks(db)
        tasks.handle("work", handler)
        assert await tasks.run_due()
        assert not await tasks.run_due()
    assert seen == [b"payload"]


def test_backoff_of_a_year_of_failures_stays_at_its_longest(caplog) -> None:
    caplog.set_level(logging.DEBUG)
    backoff = Backoff()
    assert [backoff.delay_ns(n) // SECOND_NS for n in (1, 2, 3, 7, 10_000)] == [60, 120, 240, 3_600, 3_600]
