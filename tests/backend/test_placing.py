"""Joining publishes, on virtual time, with a store that takes a second a statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from pushd.backend import placing
from pushd.backend.placing import PATIENCE_S, STATEMENT_ENVELOPES, Placer
from pushd.errors import StoreError, StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.model import EnvelopeMeta, NewEnvelope, TopicKind
from pushd.store.publish import Placed


def envelope(number: int, *, size: int = 10) -> NewEnvelope:
    return NewEnvelope(TopicKind.GROUP_MESSAGE, bytes(17), bytes(size), number.to_bytes(32, "big"))


class Store:
    """Keeps what every statement carried; each lasts `lasting_s`, less than a caller's patience."""

    def __init__(self, lasting_s: float = PATIENCE_S / 5) -> None:
        self.lasting_s = lasting_s
        self.statements: list[list[int]] = []
        self.stored: dict[bytes, int] = {}
        self.fail: Callable[[list[int]], StoreError | None] = lambda numbers: None

    async def __call__(self, envelopes: Sequence[NewEnvelope]) -> list[Placed | None]:
        numbers = [int.from_bytes(one.message_hash, "big") for one in envelopes]
        assert len(set(numbers)) == len(numbers), "each envelope once"
        self.statements.append(numbers)
        await trio.sleep(self.lasting_s)
        error = self.fail(numbers)
        if error is not None:
            raise error
        placed: list[Placed | None] = []
        for one in envelopes:
            is_new = one.message_hash not in self.stored
            sequence_id = self.stored.setdefault(one.message_hash, len(self.stored) + 1)
            placed.append(Placed(EnvelopeMeta(sequence_id, 0, None, one.message_hash, one.topic, False), is_new))
        return placed


class Callers:
    """Publishes made at once, and what each was told."""

    def __init__(self, placer: Placer) -> None:
        self.placer = placer
        self.told: dict[int, list[Placed | None] | StoreError] = {}

    async def one(self, key: int, *envelopes: NewEnvelope) -> None:
        try:
            self.told[key] = await self.placer.place(envelopes)
        except StoreError as error:
            self.told[key] = error

    async def at_once(self, count: int) -> None:
        async with trio.open_nursery() as nursery:
            for n in range(count):
                nursery.start_soon(self.one, n, envelope(n))

    def told_right(self, store: Store) -> bool:
        return all(
            isinstance(told, list)
            and [one and one.meta.message_hash for one in told] == [envelope(key).message_hash]
            and told[0] is not None
            and told[0].meta.sequence_id == store.stored[envelope(key).message_hash]
            for key, told in self.told.items()
        )


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(autouse=True)
def one_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One statement at a time, so that who goes with whom does not depend on the order in which tasks run."""
    monkeypatch.setattr(placing, "LEADS", 1)


@pytest.fixture
def callers(store: Store) -> Callers:
    return Callers(Placer(store))


async def test_a_lone_publish_runs_at_once(store: Store, callers: Callers, autojump_clock: MockClock) -> None:
    start = trio.current_time()
    await callers.one(0, envelope(0))
    assert trio.current_time() - start == pytest.approx(store.lasting_s)
    assert store.statements == [[0]]


async def test_publishes_that_wait_go_together(store: Store, callers: Callers, autojump_clock: MockClock) -> None:
    start = trio.current_time()
    await callers.at_once(32)
    assert [len(numbers) for numbers in store.statements] == [1, 31]
    assert trio.current_time() - start == pytest.approx(2 * store.lasting_s)
    assert len(callers.told) == 32
    assert callers.told_right(store)


async def test_a_statement_takes_no_more_than_its_share(
    store: Store, callers: Callers, autojump_clock: MockClock
) -> None:
    await callers.at_once(1 + 2 * STATEMENT_ENVELOPES + 5)
    assert max(len(numbers) for numbers in store.statements) == STATEMENT_ENVELOPES
    assert len(store.stored) == 1 + 2 * STATEMENT_ENVELOPES + 5
    assert callers.told_right(store)


async def test_several_statements_run_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(placing, "LEADS", 3)
    callers = Callers(Placer(store))
    start = trio.current_time()
    for _ in range(3):
        await callers.at_once(50)
        assert callers.told_right(store)
    assert [len(numbers) for numbers in store.statements[:3]] == [1, 1, 1]
    assert len(store.statements) <= 3 * 6
    assert trio.current_time() - start == pytest.approx(3 * 2 * store.lasting_s)
    assert repr(callers.placer) == "<Placer waiting=0 running=0>"


async def test_an_envelope_two_callers_bring_is_stored_once_and_new_to_one(
    store: Store, callers: Callers, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.one, 0, envelope(0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(callers.one, 100, envelope(7), envelope(8))
        nursery.start_soon(callers.one, 101, envelope(8), envelope(9), envelope(7))
    first, second = callers.told[100], callers.told[101]
    assert isinstance(first, list)
    assert isinstance(second, list)
    news = {}
    for one in (*first, *second):
        assert one is not None
        news.setdefault(one.meta.message_hash, []).append(one.is_new)
    assert sorted(map(sorted, news.values())) == [[False, True], [False, True], [True]]
    assert [one and one.meta.message_hash for one in second] == [envelope(n).message_hash for n in (8, 9, 7)]


@pytest.mark.parametrize(
    "envelopes",
    [
        [evolve(envelope(500), is_admissible=False)],
        [envelope(500), evolve(envelope(501), is_admissible=False)],
        [envelope(500 + n) for n in range(placing.JOINING_ENVELOPES + 1)],
        [envelope(500, size=placing.JOINING_BYTES + 1)],
    ],
    ids=["inadmissible", "inadmissible in company", "many", "big"],
)
async def test_what_may_not_join_goes_alone_and_does_not_wait(
    envelopes: list[NewEnvelope], store: Store, callers: Callers, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.at_once, 10)
        await trio.testing.wait_all_tasks_blocked()
        before = trio.current_time()
        await callers.one(999, *envelopes)
        assert trio.current_time() - before == pytest.approx(store.lasting_s)
    assert [int.from_bytes(one.message_hash, "big") for one in envelopes] in store.statements


@pytest.mark.parametrize("error", [StoreTimeout(), StoreInvariant()])
async def test_a_failure_one_of_them_may_have_caused_is_sorted_out_alone(
    error: StoreError, store: Store, callers: Callers, autojump_clock: MockClock
) -> None:
    store.fail = lambda numbers: error if 9 in numbers else None
    await callers.at_once(12)
    assert callers.told.pop(9) is error
    assert len(callers.told) == 11
    assert callers.told_right(store)


async def test_a_database_in_trouble_is_asked_once(store: Store, callers: Callers, autojump_clock: MockClock) -> None:
    store.fail = lambda numbers: StoreUnavailable("connection")
    await callers.at_once(12)
    assert len(store.statements) == 2
    assert len(callers.told) == 12
    errors = list(callers.told.values())
    assert all(isinstance(error, StoreUnavailable) and error.kind == "connection" for error in errors)
    assert len({id(error) for error in errors}) == 12, "each caller raises an exception of its own"
    assert repr(callers.placer) == "<Placer waiting=0 running=0>"


async def test_a_leader_that_is_cancelled_leaves_its_company_to_themselves(
    store: Store, callers: Callers, autojump_clock: MockClock
) -> None:
    await_turn = trio.CancelScope()

    async def leader() -> None:
        with await_turn:
            await callers.one(100, envelope(100))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.one, 0, envelope(0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(leader)
        await trio.testing.wait_all_tasks_blocked()
        for n in range(10, 15):
            nursery.start_soon(callers.one, n, envelope(n))
        await trio.sleep(1.5 * store.lasting_s)
        assert store.statements[-1][0] == 100
        assert len(store.statements[-1]) == 6
        await_turn.cancel()
    assert 100 not in callers.told
    assert set(callers.told) == {0, *range(10, 15)}
    assert callers.told_right(store)
    assert repr(callers.placer) == "<Placer waiting=0 running=0>"


async def test_a_caller_that_is_cancelled_in_the_queue_is_not_stored(
    store: Store, callers: Callers, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.one, 0, envelope(0))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(store.lasting_s / 2):
            await callers.one(50, envelope(50))
    assert envelope(50).message_hash not in store.stored
    assert repr(callers.placer) == "<Placer waiting=0 running=0>"


async def test_nobody_waits_long_for_statements_that_hang(autojump_clock: MockClock) -> None:
    """Those already taken along stay with their statement; everybody else goes alone."""
    store = Store(lasting_s=5)
    callers = Callers(Placer(store))
    start = trio.current_time()
    await callers.at_once(11)
    assert trio.current_time() - start == pytest.approx(5 + PATIENCE_S)
    assert [len(numbers) for numbers in store.statements] == [1] * 11
    assert callers.told_right(store)


async def test_a_shared_statement_that_hangs_is_given_up_and_everybody_goes_alone(autojump_clock: MockClock) -> None:
    """One of them waits for something; the others must not wait with it."""
    store = Store()
    callers = Callers(Placer(store))
    done_at: dict[int, float] = {}

    async def one(key: int) -> None:
        await callers.one(key, envelope(key))
        done_at[key] = trio.current_time()

    async def slow_for_nine(envelopes: Sequence[NewEnvelope]) -> list[Placed | None]:
        if any(stored.message_hash == envelope(9).message_hash for stored in envelopes):
            await trio.sleep(100)
        return await store(envelopes)

    callers.placer = Placer(slow_for_nine)
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for key in range(12):
            nursery.start_soon(one, key)
    assert callers.told_right(store)
    assert done_at.pop(9) - start >= 100
    assert max(done_at.values()) - start <= placing.SHARED_S + 3 * store.lasting_s < 10
    assert repr(callers.placer) == "<Placer waiting=0 running=0>"


async def test_a_statement_of_one_caller_may_take_its_time(autojump_clock: MockClock) -> None:
    store = Store(lasting_s=100)
    callers = Callers(Placer(store))
    await callers.one(0, envelope(0))
    assert callers.told_right(store)
    assert store.statements == [[0]]


async def test_a_statement_under_way_is_waited_for_beyond_the_patience(autojump_clock: MockClock) -> None:
    store = Store(lasting_s=PATIENCE_S * 0.9)
    callers = Callers(Placer(store))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(callers.at_once, 5)
        await trio.sleep(PATIENCE_S * 1.0)
        store.lasting_s = 99  # for those who come later
    assert len(store.statements) == 2
    assert callers.told_right(store)
