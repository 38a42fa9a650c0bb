"""Whole terms on a virtual clock: locking, draining, losing, waiting. Real databases are in test_postgres.py."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import trio

from pushd.errors import StoreError, StoreTimeout, StoreUnavailable
from pushd.model import Channel, Delivered, DeliveryConfig, Gone, Mismatch, Rejected, Terminal, Transient
from tests.dispatch.memory import (
    POLL_S,
    MemoryStore,
    Provider,
    Row,
    Stored,
    Subscription,
    dispatching,
    until,
)
from tests.dispatch.seed import SIGNING_KEY, recipient_id, target, topic

APNS, FCM, HTTP = Channel


def transient_first(delivery: object, attempt: int) -> Transient | Delivered:
    return Transient("x", 0.0) if attempt == 1 else Delivered()


async def test_t080_rows_nobody_subscribed_to_move_the_cursor(autojump_clock: object) -> None:
    store = MemoryStore(rows=[Row(n, topic(9)) for n in range(1, 5)], boundary=4)
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 4)
        await run.stopped()
    assert provider.attempts == []
    assert store.payload_reads == []


async def test_t100_abort_ends_at_once_and_leaves_the_cursor(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    provider = Provider(lambda delivery, attempt: None)
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: provider.in_flight == 1)
        with trio.fail_after(2):
            await run.stopped(0)
    assert (store.lock_holder, store.cursor, run.counts()) == (None, 0, {})


async def test_t101_deadline_shortened_in_the_middle_of_a_drain(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    provider = Provider(lambda delivery, attempt: Transient("x", 0.0) if attempt == 1 else None)
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: len(provider.attempts) == 1)
        run.stop.request(trio.current_time() + 30)
        await until(lambda: provider.in_flight == 1)
        with trio.fail_after(2):
            await run.stopped(0)
    assert (store.cursor, len(provider.attempts)) == (1, 2)
    assert run.counts() == {"failed": 1}, "the retry was cut and nobody makes it again"


async def test_t102_only_settled_rows_are_sent_and_maintenance_is_asked_for(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 1 and run.boundary.requests > 0)
        assert provider.rows() == [1]
        store.boundary = 2
        await until(lambda: store.cursor == 2)
        asked = run.boundary.requests
        await trio.sleep(1)
        assert run.boundary.requests == asked, "everything is settled: nothing to ask for"
        await run.stopped()
    assert provider.rows() == [1, 2]


async def test_maintenance_is_asked_for_at_most_once_a_poll_interval(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    async with dispatching(store, {APNS: Provider()}) as run:
        await trio.sleep(10)
        assert 95 <= run.boundary.requests <= 101


async def test_advance_of_the_boundary_wakes_the_loader_once(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    provider = Provider()
    async with dispatching(store, {APNS: provider}, poll_interval_s=5.0) as run:
        await until(lambda: len(provider.attempts) == 1)
        store.boundary = 2
        advanced = trio.current_time()
        run.boundary.advance(2)
        await until(lambda: len(provider.attempts) == 2)
        assert provider.attempts[1][0] - advanced < 0.01
        # A replica that lags behind the advance this instance knows of must not make the loader spin.
        reads = len(store.requests)
        run.boundary.advance(3)
        await trio.sleep(1)
        assert len(store.requests) - reads <= 2


async def test_t103_stalled_channel_holds_the_cursor_and_nothing_else(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1_024, channel=HTTP)
    store.simple(1, channel=APNS, first_row=1_025)
    release = trio.Event()
    hooks, apns = Provider(lambda delivery, attempt: release), Provider()
    async with dispatching(store, {HTTP: hooks, APNS: apns}) as run:
        await until(lambda: len(apns.attempts) == 1)
        assert (hooks.in_flight, store.cursor) == (256, 0)
        release.set()
        await until(lambda: store.cursor == 1_025)
        await run.stopped()
    assert hooks.most_in_flight == 256
    assert run.counts() == {"delivered": 1_025}


async def test_t104_clean_drain_sends_nothing_twice(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    release = trio.Event()
    provider = Provider(lambda delivery, attempt: release)
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: provider.in_flight == 2)
        run.stop.request(trio.current_time() + 2)
        await trio.sleep(0.1)
        assert not run.finished.is_set()
        release.set()
        await run.finished.wait()
    assert store.cursor == 2
    async with dispatching(store, {APNS: provider}):
        await trio.sleep(5)
    assert len(provider.attempts) == 2


async def test_t105_drain_that_runs_out_leaves_everything_to_the_successor(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1_100)
    stuck, provider = Provider(lambda delivery, attempt: None), Provider()
    async with dispatching(store, {APNS: stuck}) as run:
        await until(lambda: stuck.in_flight == 256)
        with trio.fail_after(1):
            await run.stopped(0.15)
    assert (store.cursor, run.counts()) == (0, {})
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 1_100)
        await run.stopped()
    assert sorted(provider.rows()) == list(range(1, 1_101))


async def test_stop_in_the_middle_of_a_window_loads_it_to_its_end(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(5, recipients=1_000)
    store.simple(1, channel=FCM, first_row=6)
    store.boundary = 5

    async def slowly() -> Delivered:
        await trio.sleep(0.05)
        return Delivered()

    store.delays["read"] = 0.05
    provider, others = Provider(lambda delivery, attempt: slowly()), Provider()
    async with dispatching(store, {APNS: provider, FCM: others}) as run:
        await until(lambda: len(provider.attempts) > 100)
        assert len(store.requests) < 6, "it is in the middle of its window"
        store.boundary = 6
        await run.stopped(60)
    assert (store.cursor, run.counts()) == (5, {"delivered": 5_000})
    async with dispatching(store, {APNS: provider, FCM: others}) as run:
        await until(lambda: store.cursor == 6)
        await run.stopped()
    assert max(Counter(provider.attempts).values()) == 1
    assert len(provider.attempts) == 5_000
    assert others.rows() == [6], "the window that was not begun came later"


async def test_stop_while_the_first_page_is_on_its_way_begins_no_window(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(3)
    store.gates["read"] = trio.Event()
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: any(name == "read" for _, name in store.calls))
        await run.stopped(5)
    assert (store.cursor, provider.attempts) == (0, [])
    assert not run.holds


async def test_page_that_arrives_although_a_stop_was_requested_begins_no_window(autojump_clock: object) -> None:
    store = MemoryStore(is_deaf_to_cancels=True)
    store.simple(3)
    gate = store.gates["read"] = trio.Event()
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: any(name == "read" for _, name in store.calls))
        run.stop.request(trio.current_time() + 5)
        await trio.sleep(0.1)
        gate.set()
        await run.finished.wait()
    assert (store.cursor, provider.attempts) == (0, [])


async def test_retry_that_waits_when_the_deadline_comes_nearer_fails(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, channel=FCM)
    provider = Provider(lambda delivery, attempt: Transient("x", 10.0))
    async with dispatching(store, {FCM: provider}) as run:
        await until(lambda: store.cursor == 1)
        run.stop.request(trio.current_time() + 30)
        await trio.sleep(1)
        assert not run.finished.is_set()
        await run.stopped(0)
    assert (len(provider.attempts), run.counts()) == (1, {"failed": 1})


async def test_mark_that_moved_since_the_last_write_is_written_when_the_deadline_has_passed(
    autojump_clock: object,
) -> None:
    store = MemoryStore()
    store.simple(3)
    store.boundary = 1
    provider = Provider(lambda delivery, attempt: None if delivery.sequence_id == 3 else Delivered())
    async with dispatching(store, {APNS: provider}, poll_interval_s=30.0) as run:
        for row in (1, 2, 3):
            store.boundary = row
            run.boundary.advance(row)
            await until(lambda row=row: len(provider.attempts) == row)  # type: ignore[misc]
            await trio.sleep(1)
        assert store.cursor == 1
        await run.stopped(0.2)
    assert [mark for _, mark in store.writes] == [1, 2]


async def test_t111_drain_finishes_a_queued_retry_and_loads_nothing(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    first = trio.Event()

    async def fail_once() -> Transient:
        await first.wait()
        return Transient("x", 0.0)

    provider = Provider(lambda delivery, attempt: fail_once() if attempt == 1 else Delivered())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: provider.in_flight == 1)
        run.stop.request(trio.current_time() + 20)
        store.simple(1, channel=FCM, first_row=2)
        first.set()
        await run.finished.wait()
    assert provider.rows() == [1, 1]
    assert (store.cursor, run.counts()) == (1, {"delivered": 1})


async def test_drain_does_not_wait_for_a_retry_that_would_come_too_late(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, channel=FCM)
    provider = Provider(lambda delivery, attempt: Transient("quota", 60.0))
    async with dispatching(store, {FCM: provider}) as run:
        await until(lambda: len(provider.attempts) == 1)
        began = trio.current_time()
        await run.stopped(20)
        assert trio.current_time() - began < 1
    assert (store.cursor, run.counts()) == (1, {"failed": 1})


async def test_t112_stalled_provider_frees_the_cursor_after_the_time_of_one_attempt(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    provider = Provider(lambda delivery, attempt: None)
    async with dispatching(store, {APNS: provider}, max_attempts=1) as run:
        await until(lambda: store.cursor == 1)
        assert 10 <= trio.current_time() <= 10 + 2 * POLL_S
        assert run.counts() == {"failed": 1}
        await run.stopped()
    assert len(provider.attempts) == 1


async def test_every_attempt_has_ten_seconds_of_its_own(autojump_clock: object) -> None:
    async def nearly() -> Delivered:
        await trio.sleep(9.9)
        return Delivered()

    store = MemoryStore()
    store.simple(600)
    provider = Provider(lambda delivery, attempt: nearly() if delivery.sequence_id % 5 else None)
    async with dispatching(store, {APNS: provider}, max_attempts=1) as run:
        await until(lambda: store.cursor == 600)
        await run.stopped()
    assert run.counts() == {"delivered": 480, "failed": 120}
    assert provider.most_in_flight == 256


async def test_t108_not_found_is_tried_again_after_a_second(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, channel=HTTP)
    provider = Provider(lambda delivery, attempt: Gone(404) if attempt == 1 else Delivered())
    async with dispatching(store, {HTTP: provider}) as run:
        await until(lambda: run.counts() == {"delivered": 1})
        await run.stopped()
    assert provider.attempts[1][0] - provider.attempts[0][0] == pytest.approx(1.0)
    assert store.cursor == 1
    assert len(store.recipients) == 1


@pytest.mark.parametrize(
    ("maximum", "answers", "count", "kept"),
    [
        (3, [Gone(404), Gone(410), Gone(404)], {"dead": 1}, False),  # T109
        (1, [Gone(404)], {"dead": 1}, False),
        (3, [Gone(404), Transient("x", 0.0), Gone(404)], {"failed": 1}, True),
    ],
)
async def test_t109_gone_on_every_attempt_deletes(
    maximum: int, answers: list[Gone | Transient], count: dict[str, int], kept: bool, autojump_clock: object
) -> None:
    store = MemoryStore()
    store.simple(1, channel=HTTP)
    provider = Provider(lambda delivery, attempt: answers[attempt - 1])
    async with dispatching(store, {HTTP: provider}, max_attempts=maximum) as run:
        await until(lambda: run.counts() == count)
        await run.stopped()
    assert len(provider.attempts) == len(answers)
    assert bool(store.recipients) is kept
    assert run.recipients("dead") == (0 if kept else 1)


async def test_t110_crash_is_followed_by_a_resend(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    stuck, provider = Provider(lambda delivery, attempt: None), Provider()
    async with dispatching(store, {APNS: stuck}):
        await until(lambda: stuck.in_flight == 2)
    store.lock_holder = None
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 2)
        await run.stopped()
    assert sorted(provider.rows()) == [1, 2]


async def test_t113_row_pruned_between_two_pages_does_not_hold_its_window_open(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, recipients=13_000)
    store.simple(1, channel=FCM, first_row=2)
    store.boundary = 1
    release = trio.Event()
    provider, others = Provider(lambda delivery, attempt: release), Provider()
    async with dispatching(store, {APNS: provider, FCM: others}) as run:
        await until(lambda: provider.in_flight == 256)
        await until(lambda: len(store.requests) == 10)
        await trio.sleep(5)
        assert len(store.requests) == 10, "no page is loaded that does not fit"
        store.rows.pop(0)
        store.boundary = 2
        release.set()
        await until(lambda: store.cursor == 2)
        await run.stopped()
    assert len(provider.attempts) == 10_000
    assert others.rows() == [2]


async def test_ten_thousand_subscribers_are_ten_pages(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, recipients=10_000)
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 1)
        await run.stopped()
    assert sum(request.floor == 0 for request, _ in store.requests) == 11, (
        "ten full pages and the empty one behind them"
    )
    assert len(provider.attempts) == len(set(provider.attempts)) == 10_000


async def test_t115_gauge_is_one_exactly_while_the_lock_is_held(autojump_clock: object) -> None:
    store = MemoryStore(lock_holder="somebody else")
    async with dispatching(store, {}) as run:
        await trio.sleep(1)
        assert not run.holds
        store.lock_holder = None
        await until(lambda: run.holds)
        await run.stopped()
        assert not run.holds


async def test_idle_instance_tries_once_a_poll_interval_on_one_session(autojump_clock: object) -> None:
    store = MemoryStore(lock_holder="somebody else")
    async with dispatching(store, {}) as run:
        await trio.sleep(10)
        names = Counter(name for _, name in store.calls)
        assert names["connect"] == 1
        assert 99 <= names["try_lock"] <= 101
        store.lock_holder = None
        freed = trio.current_time()
        await until(lambda: run.holds)
        assert trio.current_time() - freed <= POLL_S + 0.01


async def test_idle_session_does_not_fall_silent_between_rare_tries(autojump_clock: object) -> None:
    store = MemoryStore(lock_holder="somebody else")
    async with dispatching(store, {}, poll_interval_s=60.0):
        await trio.sleep(59)
        times = [0.0, *(time for time, name in store.calls if name in {"try_lock", "probe"})]
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 1.0
        assert sum(name == "try_lock" for _, name in store.calls) == 1


async def test_try_that_does_not_return_costs_its_session(autojump_clock: object) -> None:
    """B099: the server may have granted the lock to a session that nobody hears any more."""
    store = MemoryStore()
    store.gates["try_lock"] = trio.Event()
    async with dispatching(store, {}) as run:
        await until(lambda: bool(store.severed))
        assert store.severed[0] <= 3.1
        store.gates.pop("try_lock").set()
        await until(lambda: run.holds)
        assert [name for _, name in store.calls].count("connect") == 2


async def test_idle_instance_stops_at_once(autojump_clock: object) -> None:
    store = MemoryStore(lock_holder="somebody else")
    async with dispatching(store, {}, poll_interval_s=60.0) as run:
        await trio.sleep(10)
        began = trio.current_time()
        await run.stopped(20)
        assert trio.current_time() == began


async def test_unreachable_primary_is_tried_again_and_found(autojump_clock: object) -> None:
    store = MemoryStore()
    store.failures["connect"] = [StoreUnavailable() for _ in range(5)]
    async with dispatching(store, {}) as run:
        await until(lambda: run.holds)
        assert trio.current_time() == pytest.approx(0.5, abs=0.1)


async def test_lost_session_ends_the_term_and_lets_attempts_finish(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(600)
    release = trio.Event()
    provider = Provider(lambda delivery, attempt: release)
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: provider.in_flight == 256)
        store.successor = "the successor"
        store.failures["probe"] = [StoreUnavailable()]
        await until(lambda: not run.holds)
        await trio.sleep(1)
        release.set()
        await until(lambda: run.counts() == {"delivered": 256})
        await trio.sleep(5)
        assert len(provider.attempts) == 256
        assert store.cursor == 0
        store.lock_holder = None
        await until(lambda: store.cursor == 600)
    assert Counter(provider.rows()) == {row: 2 if row <= 256 else 1 for row in range(1, 601)}


async def test_retry_is_not_made_after_the_lock_is_lost(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    provider = Provider(transient_first)
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: len(provider.attempts) == 1)
        store.successor = "the successor"
        store.failures["probe"] = [StoreUnavailable()]
        await until(lambda: not run.holds)
        await trio.sleep(30)
        assert (len(provider.attempts), run.counts()) == (1, {})


async def test_dead_token_learnt_after_the_loss_is_still_deleted(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    learnt = trio.Event()

    async def dead() -> Terminal:
        await learnt.wait()
        return Terminal("x")

    provider = Provider(lambda delivery, attempt: dead())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: provider.in_flight == 1)
        store.successor = "the successor"
        store.failures["probe"] = [StoreUnavailable()]
        await until(lambda: not run.holds)
        learnt.set()
        await until(lambda: run.counts() == {"dead": 1} and not store.recipients)
    assert run.recipients("dead") == 1


async def test_lock_is_tried_for_again_ten_seconds_after_a_loss_however_many_dead_recipients_are_left(
    autojump_clock: object,
) -> None:
    store = MemoryStore()
    store.simple(1, recipients=1_000)
    store.delays["delete_dead"] = 2.0
    async with dispatching(store, {APNS: Provider(lambda delivery, attempt: Terminal("x"))}) as run:
        await until(lambda: run.counts() == {"dead": 1_000})
        store.failures["probe"] = [StoreUnavailable()]
        await until(lambda: not run.holds)
        lost = trio.current_time()
        await until(lambda: run.holds)
        assert trio.current_time() - lost == pytest.approx(10, abs=0.1)
        await trio.sleep(60)
        assert 0 < len(store.recipients) < 1_000, "the next push to what is left brings the same answer"


async def test_clean_stop_deletes_dead_recipients_until_its_deadline(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, recipients=1_000)
    store.delays["delete_dead"] = 2.0
    async with dispatching(store, {APNS: Provider(lambda delivery, attempt: Terminal("x"))}) as run:
        await until(lambda: run.counts() == {"dead": 1_000})
        await run.stopped(60)
    assert store.recipients == {}


async def test_silent_session_is_cut_and_nothing_begins_once_trust_has_run_out(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(400)
    begun: list[float] = []

    async def slowly() -> Delivered:
        begun.append(trio.current_time())
        await trio.sleep(0.5)
        return Delivered()

    provider = Provider(lambda delivery, attempt: slowly() if store.gates else Delivered())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 400)
        went_deaf = trio.current_time()
        store.gates["probe"] = store.gates["move_cursor"] = trio.Event()
        for row in range(401, 1_200):
            store.rows.append(Row(row, topic(int(APNS))))
        store.boundary = 1_199
        store.successor = "the successor"
        await until(lambda: not run.holds)
        assert store.severed
        assert store.severed[0] - went_deaf <= 3 + 2 * POLL_S
        await trio.sleep(20)
    assert begun
    assert max(begun) <= went_deaf + 4


async def test_attempts_begin_again_when_a_slow_proof_arrives_after_all(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushd.dispatch.keeper.TRUST_S", 1.0)
    store = MemoryStore()
    store.simple(5_000)

    async def slowly() -> Delivered:
        await trio.sleep(0.2)
        return Delivered()

    provider = Provider(lambda delivery, attempt: slowly())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: len(provider.attempts) > 300)
        gate = store.gates["probe"] = store.gates["move_cursor"] = trio.Event()
        silent = trio.current_time()
        await trio.sleep(1.5)
        store.rows.append(Row(5_001, topic(int(APNS))))
        store.boundary = 5_001  # what the loader brings now is no reason to begin either
        await trio.sleep(0.5)
        assert store.requests[-1][0].floor == 5_001
        begun = len(provider.attempts)
        assert provider.attempts[-1][0] <= silent + 1.0
        assert provider.in_flight == 0
        assert begun < 5_000
        store.gates.clear()
        gate.set()
        await until(lambda: store.cursor == 5_001)
        assert run.holds
    assert len(provider.attempts) == 5_001


@pytest.mark.parametrize("poll_interval_s", [POLL_S, 3.0])
async def test_cursor_is_written_at_most_once_a_poll_interval_and_only_when_it_moved(
    poll_interval_s: float, autojump_clock: object
) -> None:
    store = MemoryStore()
    store.simple(40)
    store.boundary = 0
    async with dispatching(store, {APNS: Provider()}, poll_interval_s=poll_interval_s) as run:
        for boundary in range(1, 41):
            store.boundary = boundary
            run.boundary.advance(boundary)
            await trio.sleep(poll_interval_s / 3)
        await trio.sleep(5)
        await run.stopped()
    times = [time for time, _ in store.writes]
    assert len(times) >= 8
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= poll_interval_s - 1e-9
    assert [mark for _, mark in store.writes] == sorted({mark for _, mark in store.writes})
    assert store.cursor == 40


@pytest.mark.parametrize(("grace_s", "gap_s"), [(5.0, POLL_S), (0.02, POLL_S / 2 + 0.02)])
async def test_final_mark_waits_out_the_interval_if_the_deadline_allows(
    grace_s: float, gap_s: float, autojump_clock: object
) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    release = trio.Event()
    provider = Provider(lambda delivery, attempt: release if delivery.sequence_id == 2 else Delivered())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: bool(store.writes))
        store.boundary = 2
        run.boundary.advance(2)
        await until(lambda: provider.in_flight == 1)
        written = store.writes[0][0]
        await trio.sleep_until(written + POLL_S / 2)
        release.set()
        await run.stopped(grace_s)
    assert [mark for _, mark in store.writes] == [1, 2]
    assert store.writes[1][0] - written == pytest.approx(gap_s)


async def test_session_does_not_fall_silent_while_the_final_mark_waits_for_a_long_interval(
    autojump_clock: object,
) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    async with dispatching(store, {APNS: Provider()}, poll_interval_s=30.0) as run:
        await until(lambda: store.cursor == 1)
        store.boundary = 2
        run.boundary.advance(2)
        await until(lambda: run.counts() == {"delivered": 2})
        await run.stopped(60)
    assert [mark for _, mark in store.writes] == [1, 2]
    assert store.writes[1][0] - store.writes[0][0] >= 30
    times = [time for time, name in store.calls if name in {"probe", "move_cursor"}]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 1.01


async def test_refused_cursor_write_ends_the_term(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 1)
        store.cursor = 7  # somebody else's doing
        store.successor = "somebody else"
        store.boundary = 2
        await until(lambda: not run.holds)
        await trio.sleep(5)
        assert store.cursor == 7
        store.lock_holder = None
        await until(lambda: run.holds)
        await trio.sleep(1)
        assert store.cursor == 7


async def test_failed_cursor_write_ends_the_term_and_the_windows_are_sent_again(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(3)
    store.failures["move_cursor"] = [StoreUnavailable()]
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 3)
        await run.stopped()
    assert Counter(provider.rows()) == {1: 2, 2: 2, 3: 2}
    assert run.counts() == {"delivered": 6}


async def test_stop_during_a_cursor_write_is_a_clean_stop(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    store.gates["move_cursor_answer"] = trio.Event()
    async with dispatching(store, {APNS: Provider()}) as run:
        await until(lambda: store.cursor == 1)
        run.stop.request(trio.current_time() + 5)
        await trio.sleep(1)
        store.gates["move_cursor_answer"].set()
        await run.finished.wait()
    assert store.cursor == 1
    assert not run.holds


async def test_cursor_write_cut_by_the_deadline_is_read_before_it_is_judged(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2)
    store.boundary = 1
    provider = Provider()
    answer = store.gates["move_cursor_answer"] = trio.Event()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 1)  # written, but its answer does not come
        store.boundary = 2
        await until(lambda: run.counts() == {"delivered": 2})
        run.stop.request(trio.current_time() + 0.3)
        await trio.sleep(0.2)
        del store.gates["move_cursor_answer"]
        await run.finished.wait()
    assert not answer.is_set()
    assert store.cursor == 2, "the final mark builds on the write that was cut"


async def test_cut_cursor_write_is_not_built_upon_when_somebody_else_moved_the_cursor(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(10)
    store.boundary = 1
    store.gates["move_cursor_answer"] = trio.Event()
    async with dispatching(store, {APNS: Provider()}) as run:
        await until(lambda: store.cursor == 1)  # written, but its answer does not come
        store.boundary = 10
        await until(lambda: run.counts() == {"delivered": 10})
        store.cursor = 5
        del store.gates["move_cursor_answer"]
        await run.stopped(2)
    assert store.cursor == 5


async def test_blocked_cursor_write_does_not_outlast_the_deadline(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    store.gates["move_cursor"] = trio.Event()
    async with dispatching(store, {APNS: Provider()}) as run:
        await until(lambda: any(name == "move_cursor" for _, name in store.calls))
        with trio.fail_after(0.5):
            await run.stopped(0.1)
    assert store.cursor == 0


@pytest.mark.parametrize(
    "name", ["delete_dead", "delete_expired", "needs_maintenance", "read", "open_pages", "payloads"]
)
async def test_failures_beside_the_lock_session_never_end_the_term(
    name: str, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushd.dispatch.upkeep.SWEEP_INTERVAL_S", 3.0)
    store = MemoryStore(expired_batches=[3, 2])
    store.simple(2)
    key = b"\x05" * 42
    store.subscriptions = [
        Subscription(item.recipient, item.topic, 0, False, 9, (key, key, key)) for item in store.subscriptions
    ]
    store.rows = [Row(row.sequence_id, row.topic, sender_hmac=b"\x01" * 32) for row in store.rows]
    store.failures[name] = [StoreUnavailable(), StoreTimeout(), StoreError()]
    provider = Provider(lambda delivery, attempt: Terminal("x") if delivery.sequence_id == 1 else Delivered())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 2)
        await trio.sleep(15)
        assert run.holds
        assert run.counts() == {"dead": 1, "delivered": 1}
        assert sum(call == "connect" for _, call in store.calls) == 1
        await run.stopped()


async def test_sweep_runs_at_takeover_and_hourly_in_batches(autojump_clock: object) -> None:
    store = MemoryStore(expired_batches=[3, 2])
    async with dispatching(store, {}, poll_interval_s=30.0) as run:
        await trio.sleep(3_599)
        assert sum(name == "delete_expired" for _, name in store.calls) == 3
        assert run.recipients("expired") == 5
        await trio.sleep(2)
        assert sum(name == "delete_expired" for _, name in store.calls) == 4


async def test_slow_sweep_and_slow_deletes_hold_nothing_up(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(300)
    store.gates["delete_expired"] = store.gates["delete_dead"] = trio.Event()
    provider = Provider(lambda delivery, attempt: Terminal("x") if delivery.sequence_id == 1 else Delivered())
    async with dispatching(store, {APNS: provider}):
        await until(lambda: store.cursor == 300)
        assert trio.current_time() < 1


async def test_pending_work_of_a_deleted_recipient_is_dropped(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(600)
    release = trio.Event()

    async def late() -> Transient:
        await release.wait()
        return Transient("x", 0.0)

    provider = Provider(lambda delivery, attempt: Terminal("x") if delivery.sequence_id == 1 else late())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: run.recipients("dead") == 1)
        release.set()
        await until(lambda: store.cursor == 600)
        await run.stopped()
    assert run.counts()["dead"] == 600 - run.counts()["failed"]
    assert 255 <= run.counts()["failed"] <= 256
    assert len(provider.attempts) == 1 + run.counts()["failed"]


async def test_recipient_registered_anew_is_kept_when_an_old_answer_says_dead(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    learnt = trio.Event()

    async def dead() -> Terminal:
        await learnt.wait()
        return Terminal("x")

    provider = Provider(lambda delivery, attempt: dead())
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: provider.in_flight == 1)
        next(iter(store.recipients.values())).secret_hash = b"\x08" * 32
        learnt.set()
        await until(lambda: run.counts() == {"dead": 1})
        await trio.sleep(1)
        assert len(store.recipients) == 1
        assert run.recipients("dead") == 0


async def test_t158_channel_that_is_not_configured_any_more_fails_once(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MemoryStore()
    store.simple(2, channel=FCM)
    async with dispatching(store, {}, max_attempts=10) as run:
        await until(lambda: store.cursor == 2)
        await run.stopped()
    assert run.channel_counts(FCM) == {"failed": 2}
    assert len(store.recipients) == 1
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count("channel_missing") == 1
    assert target(int(FCM) * 1_000_000, FCM) not in logged.out + logged.err


async def test_t159_one_of_each_outcome(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(5)
    answers = [Delivered(), Rejected("x"), Mismatch("x"), Terminal("x"), Transient("x", 0.0)]
    provider = Provider(lambda delivery, attempt: answers[delivery.sequence_id - 1])
    async with dispatching(store, {APNS: provider}, max_attempts=1) as run:
        await until(lambda: store.cursor == 5)
        await run.stopped()
    assert run.counts() == {"delivered": 1, "rejected": 1, "mismatch": 1, "dead": 1, "failed": 1}
    assert run.recipients("dead") == 1


async def test_sender_that_raises_costs_its_delivery_a_retry_and_nobody_else_anything(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MemoryStore()
    store.simple(20)
    provider = Provider(
        lambda delivery, attempt: (
            ValueError("token secret") if attempt == 1 and delivery.sequence_id % 2 else Delivered()
        )
    )
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: run.counts() == {"delivered": 20})
        await run.stopped()
    logged = capsys.readouterr()
    text = logged.out + logged.err
    assert text.count("attempt_crashed") == 1
    assert "ValueError" in text
    assert "secret" not in text


async def test_failed_attempt_does_not_hold_the_cursor_while_its_retry_waits(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, channel=FCM)
    provider = Provider(lambda delivery, attempt: Transient("quota", 60.0) if attempt == 1 else Delivered())
    async with dispatching(store, {FCM: provider}) as run:
        await until(lambda: store.cursor == 1)
        assert trio.current_time() < 1
        await until(lambda: run.counts() == {"delivered": 1})
        assert provider.attempts[1][0] - provider.attempts[0][0] == pytest.approx(60)


async def test_retries_wake_in_order_of_their_due_times(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(3)
    delays = {1: 30.0, 2: 5.0, 3: 1.0}
    provider = Provider(
        lambda delivery, attempt: Transient("x", delays[delivery.sequence_id]) if attempt == 1 else Delivered()
    )
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: run.counts() == {"delivered": 3})
    start = provider.attempts[0][0]
    assert [(row, round(time - start, 2)) for time, row, _ in provider.attempts[3:]] == [(3, 1.0), (2, 5.0), (1, 30.0)]


async def test_provider_that_fails_at_once_fills_retained_work_and_no_more(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(12, recipients=1_000)
    retained: set[float] = set()

    def is_over() -> bool:
        [gauge] = run.metrics.push_retained.collect()
        retained.add(gauge.samples[0].value)
        return run.counts().get("failed", 0) == 12_000

    provider = Provider(lambda delivery, attempt: Transient("x", 30.0))
    async with dispatching(store, {APNS: provider}, max_attempts=2) as run:
        await until(is_over)
        assert store.cursor == 12
        await run.stopped()
    assert max(retained) == 10_000
    assert provider.most_in_flight == 256
    assert len(provider.attempts) <= 24_000


async def test_page_of_a_replica_that_lags_behind_its_window_is_read_again(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(2, recipients=1_500)
    provider = Provider()
    store.page_boundaries = [2, 1, 0, 2]
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 2)
        await run.stopped()
    assert len(provider.attempts) == len({(row, who) for _, row, who in provider.attempts}) == 3_000


async def test_page_that_times_out_is_tried_with_fewer_rows(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1_024)
    store.failures["read"] = [StoreTimeout(), StoreTimeout()]
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 1_024)
        await run.stopped()
    assert [rows for _, rows in store.requests[:4]] == [256, 512, 1_024, 1_024]
    assert sorted(provider.rows()) == list(range(1, 1_025))


async def test_later_page_that_times_out_shortens_its_window(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(20, recipients=300)
    store.delays["read"] = 0.05
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: len(store.requests) == 1)
        store.failures["read"] = [StoreTimeout()]
        await until(lambda: store.cursor == 20)
        await run.stopped()
    assert (store.requests[1][0].floor, store.requests[1][0].last) == (0, 4), "the first page ended within row 4"
    assert 4 in {request.floor for request, _ in store.requests}, "the rest came as a window of its own"
    assert Counter(provider.rows()) == dict.fromkeys(range(1, 21), 300)
    assert len(set(provider.attempts)) == len({(row, who) for _, row, who in provider.attempts}) == 6_000


async def test_dispatcher_without_any_channel_keeps_the_cursor_current(autojump_clock: object) -> None:
    store = MemoryStore(rows=[Row(n, topic(1)) for n in range(1, 3_000)], boundary=2_999)
    async with dispatching(store, {}) as run:
        await until(lambda: store.cursor == 2_999)
        await run.stopped()


async def test_idle_tick_costs_three_statements(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(10)
    async with dispatching(store, {APNS: Provider()}):
        await until(lambda: store.cursor == 10)
        await trio.sleep(1)
        before = len(store.calls)
        await trio.sleep(10)
        assert (len(store.calls) - before) / 100 <= 3.1


async def test_one_stalled_host_leaves_the_other_hosts_their_permits(autojump_clock: object) -> None:
    store = MemoryStore()
    stalled, quick = range(64, 64 * 1_000, 64), range(1, 64)
    store.add_recipients([*stalled, *quick], HTTP)
    store.subscriptions = [Subscription(n, topic(1)) for n in stalled] + [Subscription(n, topic(2)) for n in quick]
    store.rows = [Row(1, topic(1)), Row(2, topic(2))]
    store.boundary = 2
    slow = {recipient_id(n) for n in stalled}
    provider = Provider(lambda delivery, attempt: None if delivery.recipient_id in slow else Delivered())
    async with dispatching(store, {HTTP: provider}, max_attempts=1) as run:
        await until(lambda: run.counts().get("delivered", 0) == 63)
        assert trio.current_time() <= 10.1, "the first permits that time out go to the hosts that wait"


async def test_more_stalled_hosts_than_permits_leave_a_healthy_host_its_turn(autojump_clock: object) -> None:
    """2,000 for 400 hosts that never answer, then 100 for one that does: it waits for one round of time-outs only."""
    store = MemoryStore()
    urls = [f"https://stalled{n % 400}.example:{8_000 + n}/" for n in range(2_000)]
    urls += [f"https://healthy.example/{n}" for n in range(100)]
    for number, url in enumerate(urls):
        store.recipients[recipient_id(number)] = Stored(DeliveryConfig(HTTP, url, SIGNING_KEY))
        store.subscriptions.append(Subscription(number, topic(1)))
    store.rows = [Row(1, topic(1))]
    store.boundary = 1
    provider = Provider(lambda delivery, attempt: Delivered() if "healthy" in delivery.config.target else None)
    async with dispatching(store, {HTTP: provider}, max_attempts=1) as run:
        await until(lambda: run.counts().get("delivered", 0) == 100)
        assert trio.current_time() <= 10.1


async def test_step_down_drains_and_lets_another_instance_take_over(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(3, recipients=400)
    old, new = Provider(transient_first), Provider()
    async with dispatching(store, {APNS: old}) as first:
        await until(lambda: len(old.attempts) == 1_200)  # every delivery awaits its retry
        async with dispatching(store, {APNS: new}) as second:
            store.step_down_asked = True
            await until(lambda: second.holds)
            assert not first.holds
            assert (store.cursor, first.counts()) == (3, {"delivered": 1_200})
            assert not new.attempts
            store.rows += [Row(number, topic(int(APNS))) for number in (4, 5, 6)]
            store.boundary = 6
            await until(lambda: store.cursor == 6)
            await trio.sleep(60)
            assert second.holds
            assert not first.holds
    assert first.term_ends() == {"stepped_down": 1}
    assert set(old.rows()) == {1, 2, 3}
    assert set(new.rows()) == {4, 5, 6}
    assert len(new.attempts) == 1_200


@pytest.mark.parametrize("poll_interval_s", [0.1, 2.0])
async def test_single_instance_comes_back_twenty_intervals_after_it_stepped_down(
    poll_interval_s: float, autojump_clock: object
) -> None:
    store = MemoryStore()
    async with dispatching(store, {APNS: Provider()}, poll_interval_s=poll_interval_s) as run:
        await until(lambda: run.holds)
        store.step_down_asked = True
        await until(lambda: not run.holds)
        gone = trio.current_time()
        await until(lambda: run.holds)
        assert 20 * poll_interval_s - 0.01 <= trio.current_time() - gone <= 21 * poll_interval_s + 0.01
        await run.stopped()


async def test_step_down_is_bounded_by_the_drain_time_like_a_stop(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1, recipients=300)
    provider = Provider(lambda delivery, attempt: None)
    async with dispatching(store, {APNS: provider}, drain_s=3.0) as run:
        await until(lambda: provider.in_flight == 256)
        asked, store.step_down_asked = trio.current_time(), True
        await until(lambda: store.lock_holder is None)
        assert trio.current_time() - asked == pytest.approx(3.0, abs=0.2)
        assert (run.holds, provider.in_flight, store.cursor) == (False, 0, 0)


async def test_stop_while_stepping_down_shortens_the_drain(autojump_clock: object) -> None:
    store = MemoryStore()
    store.simple(1)
    async with dispatching(store, {APNS: Provider(lambda delivery, attempt: None)}) as run:
        await until(lambda: run.holds)
        store.step_down_asked = True
        await trio.sleep(1)
        assert run.holds
        with trio.fail_after(1):
            await run.stopped(0.5)


async def test_stop_while_sitting_out_ends_at_once(autojump_clock: object) -> None:
    store = MemoryStore()
    async with dispatching(store, {}) as run:
        await until(lambda: run.holds)
        store.step_down_asked = True
        await until(lambda: not run.holds)
        await trio.sleep(0.5)
        with trio.fail_after(0.1):
            await run.stopped()


async def test_request_to_step_down_reaches_the_holder_of_that_moment_only(autojump_clock: object) -> None:
    """A session that waits for the lock does not listen, so nothing old can be waiting for it when it wins."""
    store = MemoryStore()
    async with dispatching(store, {}) as first:
        await until(lambda: first.holds)
        async with dispatching(store, {}) as second:
            store.step_down_asked = True
            await until(lambda: second.holds)
            assert sum(name == "listen" for _, name in store.calls) == 2
            await trio.sleep(60)
            assert second.holds
