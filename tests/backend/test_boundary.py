"""The boundary task on virtual time, with scripted attempts."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pushd.backend.boundary import BoundaryTask
from pushd.errors import StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.telemetry import Metrics

POLL_S = 0.1
Script = list[int | Exception | None]


class Attempts:
    """Plays a script, one entry an attempt, then repeats the last; remembers when each began."""

    def __init__(self, script: Script, *, lasting_s: float = 0.0) -> None:
        self.script = script
        self.lasting_s = lasting_s
        self.starts: list[float] = []

    async def __call__(self) -> int | None:
        step = self.script[min(len(self.starts), len(self.script) - 1)]
        self.starts.append(trio.current_time())
        await trio.sleep(self.lasting_s)
        if isinstance(step, Exception):
            raise step
        return step

    def since(self, start_s: float) -> list[float]:
        """Starts in poll intervals since `start_s`."""
        return [round((at - start_s) / POLL_S, 3) for at in self.starts]


def task_of(advance: Callable[[], Awaitable[int | None]], metrics: Metrics) -> BoundaryTask:
    return BoundaryTask(advance, poll_interval_s=POLL_S, metrics=metrics)


def counted(metrics: Metrics) -> dict[str, float]:
    results = ("ok", "lock_timeout", "error")
    return {result: metrics.boundary_advances.labels(result)._value.get() for result in results}


async def test_it_starts_with_one_attempt_and_idles(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    attempts = Attempts([7])
    task = task_of(attempts, metrics)
    assert await nursery.start(task.run) == 7
    await trio.sleep(60)
    assert len(attempts.starts) == 1
    assert task.closed_sequence_id == 7
    assert not task.is_pending


async def test_it_starts_only_once_a_boundary_is_known(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    start = trio.current_time()
    attempts = Attempts([None, StoreUnavailable(), 3])
    assert await nursery.start(task_of(attempts, metrics).run) == 3
    assert attempts.since(start) == [0, 1, 2]
    assert counted(metrics) == {"ok": 1, "lock_timeout": 1, "error": 1}


async def test_a_request_after_a_quiet_time_is_attempted_at_once(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    attempts = Attempts([1, 2])
    task = task_of(attempts, metrics)
    await nursery.start(task.run)
    await trio.sleep(5)
    before = trio.current_time()
    task.request()
    assert await task.wait_above(1) == 2
    assert trio.current_time() == before


async def test_many_requests_are_one_attempt_a_poll_interval(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    start = trio.current_time()
    attempts = Attempts([1])
    task = task_of(attempts, metrics)
    await nursery.start(task.run)
    for _ in range(100):
        for _ in range(10):
            task.request()
        await trio.sleep(POLL_S / 20)
    await trio.sleep(1)
    assert attempts.since(start) == [0, 1, 2, 3, 4, 5]


async def test_the_interval_counts_from_the_start_of_an_attempt(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    start = trio.current_time()
    attempts = Attempts([1], lasting_s=2.5 * POLL_S)
    task = task_of(attempts, metrics)
    await nursery.start(task.run)
    task.request()
    await trio.sleep(5)
    assert attempts.since(start) == [0, 2.5]


async def test_a_request_during_an_attempt_is_not_lost_to_it(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """The running attempt may have read the sequence already; what was stored since needs another one."""
    attempts = Attempts([1, 1, 2], lasting_s=POLL_S / 2)
    task = task_of(attempts, metrics)
    await nursery.start(task.run)
    task.request()
    await trio.sleep(0.75 * POLL_S)  # into the middle of the second attempt
    assert len(attempts.starts) == 2
    task.request()
    assert await task.wait_above(1) == 2
    assert len(attempts.starts) == 3


@pytest.mark.parametrize("failure", [None, StoreTimeout(), StoreUnavailable(), StoreInvariant()])
async def test_a_request_survives_attempts_that_come_to_nothing(
    failure: Exception | None, metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    attempts = Attempts([1, failure, failure, failure, 2])
    task = task_of(attempts, metrics)
    await nursery.start(task.run)
    await trio.sleep(5)
    asked = trio.current_time()
    task.request()
    assert await task.wait_above(1) == 2
    assert attempts.since(asked)[1:] == [0, 1, 2, 3]
    assert not task.is_pending


async def test_T119_a_request_survives_the_end_of_the_task_and_of_its_callers(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async def never() -> int | None:
        await trio.sleep_forever()
        return None

    steps: list[Callable[[], Awaitable[int | None]]] = [Attempts([1]), never, Attempts([2]), Attempts([3])]

    async def advance() -> int | None:
        return await steps.pop(0)()

    task = task_of(advance, metrics)
    request = task.request  # as a caller took it before anything failed
    async with trio.open_nursery() as first:
        await first.start(task.run)
        request()
        await trio.sleep(1)  # the second attempt hangs
        first.cancel_scope.cancel(reason="the task's surroundings failed")
    assert task.is_pending
    assert await nursery.start(task.run) == 2
    await trio.sleep(1)
    request()
    assert await task.wait_above(2) == 3


async def test_an_attempt_cut_short_counts_for_the_interval(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    start = trio.current_time()
    attempts = Attempts([1], lasting_s=POLL_S / 4)
    task = task_of(attempts, metrics)
    with trio.move_on_after(POLL_S / 8):
        await task.run()
    await nursery.start(task.run)
    assert attempts.since(start) == [0, 1]


async def test_a_lower_boundary_is_never_told(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    task = task_of(Attempts([5, 4]), metrics)
    await nursery.start(task.run)
    task.request()
    await trio.sleep(1)
    assert task.closed_sequence_id == 5


async def test_every_waiter_is_told_at_once_and_only_above_its_own_mark(
    metrics: Metrics, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    task = task_of(Attempts([5, 10]), metrics)
    told: list[tuple[int, int, float]] = []

    async def wait(above: int) -> None:
        told.append((above, await task.wait_above(above), trio.current_time()))

    for above in (0, 4, 5, 9, 10):
        nursery.start_soon(wait, above)
    await nursery.start(task.run)
    await wait_all_tasks_blocked()
    assert sorted((above, boundary) for above, boundary, _ in told) == [(0, 5), (4, 5)]
    await trio.sleep(1)
    asked = trio.current_time()
    task.request()
    await wait_all_tasks_blocked()
    assert sorted(told)[2:] == [(5, 10, asked), (9, 10, asked)]


async def test_a_programming_error_ends_the_task(metrics: Metrics, autojump_clock: MockClock) -> None:
    with pytest.raises(ZeroDivisionError):
        await task_of(Attempts([ZeroDivisionError()]), metrics).run()
