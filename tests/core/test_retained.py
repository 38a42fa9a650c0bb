"""Retained work: the named situations, and any order of everything against a plain model."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pushd.core.lanes import State, Work, host_of
from pushd.core.retained import Bounds, Retained
from pushd.core.retry import Result
from pushd.core.window import Window, Windows
from pushd.model import (
    TIMED_OUT,
    Channel,
    Delivered,
    Delivery,
    DeliveryConfig,
    Gone,
    Mismatch,
    Outcome,
    Rejected,
    Terminal,
    Transient,
)

APNS, FCM, HTTP = Channel
HASH = b"\x09" * 32


def delivery(
    sequence_id: int = 1,
    recipient: int = 1,
    channel: Channel = APNS,
    *,
    key: bytes | None = None,
    host: str = "a.example",
) -> Delivery:
    target = f"https://{host}/{recipient}" if channel is HTTP else f"token{recipient}"
    return Delivery(
        sequence_id, b"\x00topic", recipient.to_bytes(32, "big"), DeliveryConfig(channel, target, key), HASH
    )


def loaded(retained: Retained, deliveries: list[Delivery], last: int = 10) -> Windows:
    """Windows with one window that holds these deliveries and is loaded."""
    windows = Windows(0)
    window = windows.begin(last)
    assert retained.admit(windows, window, deliveries) == len(deliveries)
    windows.close(window)
    return windows


def take(retained: Retained, channel: Channel = APNS) -> Work:
    work = retained.take(channel)
    assert work is not None
    return work


def settle(retained: Retained, work: Work, outcome: Outcome, now: float = 0.0) -> Result | None:
    return retained.settle(work, outcome, now, 0.0)


def test_t091_saturated_channel_lets_another_pass() -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(n, n, HTTP) for n in range(1, 1_025)], 1_024)
    later = windows.begin(1_025)
    retained.admit(windows, later, [delivery(1_025, 1, APNS)])
    windows.close(later)
    taken = [work for channel in Channel for work in iter(lambda c=channel: retained.take(c), None)]  # type: ignore[misc]
    assert Counter(work.delivery.config.channel for work in taken) == {HTTP: 256, APNS: 1}
    assert windows.mark == 0


def test_t092_retry_holds_no_permit_and_is_not_handed_out_early() -> None:
    retained = Retained(3)
    loaded(retained, [delivery()])
    work = take(retained)
    assert settle(retained, work, Transient("x", 60.0), now=100.0) is None
    assert retained.in_flight(APNS) == 0
    assert retained.next_due == 160.0
    assert retained.wake(160.0 - 1e-9) == set()
    assert retained.take(APNS) is None
    assert retained.wake(160.0) == {APNS}
    again = take(retained)
    assert again is work
    assert again.attempts == 1
    assert settle(retained, again, Delivered(), 160.0) is Result.DELIVERED
    assert retained.is_empty


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ([Gone(404), Gone(410), Gone(404)], Result.DEAD),  # T093
        ([Gone(404), Transient("x", 0), Gone(404)], Result.FAILED),  # T094
        ([Transient("x", 0), Gone(404), Gone(404)], Result.FAILED),
        ([Gone(404), Gone(404), Transient("x", 0)], Result.FAILED),
        ([Gone(404), Delivered()], Result.DELIVERED),  # T095
        ([Mismatch("x")], Result.MISMATCH),
        ([Rejected("x")], Result.REJECTED),
        ([Terminal("x")], Result.DEAD),
    ],
)
def test_attempts_of_one_delivery(outcomes: list[Outcome], result: Result) -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(channel=HTTP)])
    now = 0.0
    for number, outcome in enumerate(outcomes, 1):
        now += 1.0
        retained.wake(now)
        found = settle(retained, take(retained, HTTP), outcome, now)
        assert windows.mark == 10, "the first attempt alone moves the mark"
        assert found is (result if number == len(outcomes) else None)
    assert retained.is_empty
    assert retained.waiting == 0


def test_t096_retry_beats_a_reserved_page_which_is_cut() -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(n, n) for n in range(1, 9_001)])
    flying = [take(retained) for _ in range(256)]
    window = windows.begin(20)
    assert retained.admit(windows, window, [delivery(11, n) for n in range(256)]) == 256
    assert retained.waiting == 9_000
    assert retained.reserve()
    assert not retained.has_room
    assert not retained.reserve()
    assert [settle(retained, work, Transient("x", 0.0)) for work in flying] == [None] * 256
    assert retained.waiting == 9_256
    retained.release()
    assert retained.admit(windows, window, [delivery(12, n) for n in range(1_000)]) == 744
    assert retained.waiting == 10_000
    flying = [take(retained) for _ in range(256)]
    assert settle(retained, flying[0], Transient("x", 0.0)) is None
    assert retained.waiting == 9_745


def test_retry_without_room_fails() -> None:
    retained = Retained(3, Bounds(retained=2, page=1, in_flight=1))
    windows = loaded(retained, [delivery(1, 1), delivery(1, 2)])
    work = take(retained)
    window = windows.begin(20)
    assert retained.admit(windows, window, [delivery(2, 1), delivery(2, 2)]) == 1
    assert settle(retained, work, Transient("x", 0.0)) is Result.FAILED


def test_t097_delete_drops_what_waits_for_that_configuration_only() -> None:
    retained = Retained(3)
    old, new = b"k" * 32, b"n" * 32
    windows = loaded(retained, [delivery(1, 1, HTTP, key=old), delivery(2, 1, HTTP, key=new), delivery(3, 2, HTTP)])
    gone = delivery(1, 1, HTTP, key=old)
    assert retained.drop(gone.recipient_id, gone.config, HASH) == 1
    assert retained.waiting == 2
    assert retained.drop(gone.recipient_id, gone.config, b"\x08" * 32) == 0
    assert windows.mark == 0
    for _ in range(2):
        assert settle(retained, take(retained, HTTP), Delivered()) is Result.DELIVERED
    assert windows.mark == 10
    assert retained.is_empty


def test_t098_delete_stops_retries_of_attempts_in_flight() -> None:
    retained = Retained(3)
    old, new = b"k" * 32, b"n" * 32
    loaded(retained, [delivery(1, 1, HTTP, key=old), delivery(2, 1, HTTP, key=old), delivery(3, 1, HTTP, key=new)])
    flying = [take(retained, HTTP) for _ in range(3)]
    gone = flying[0].delivery
    assert retained.drop(gone.recipient_id, gone.config, HASH) == 0
    assert settle(retained, flying[0], Transient("x", 0)) is Result.FAILED
    assert settle(retained, flying[1], Gone(404)) is Result.FAILED
    assert settle(retained, flying[2], Transient("x", 0)) is None
    assert retained.waiting == 1
    retained.wake(1.0)
    assert settle(retained, take(retained, HTTP), Delivered()) is Result.DELIVERED
    assert retained.is_empty


def test_delete_drops_a_retry_that_waits() -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(1, 1), delivery(2, 1)])
    assert settle(retained, take(retained), Transient("x", 0)) is None
    gone = delivery(1, 1)
    assert retained.drop(gone.recipient_id, gone.config, HASH) == 2
    assert windows.mark == 10
    assert retained.is_empty
    assert retained.wake(99.0) == set()


def test_first_attempts_go_before_retries() -> None:
    for channel in Channel:
        retained = Retained(3)
        windows = loaded(retained, [delivery(1, 1, channel)])
        assert settle(retained, take(retained, channel), Transient("x", 0)) is None
        window = windows.begin(20)
        retained.admit(windows, window, [delivery(2, 2, channel)])
        retained.wake(99.0)
        assert [take(retained, channel).delivery.sequence_id for _ in range(2)] == [2, 1]


def test_freed_permit_goes_to_the_host_with_the_fewest_in_flight() -> None:
    retained = Retained(3)
    loaded(retained, [delivery(n, n, HTTP, host="stalled.example") for n in range(1, 401)])
    stalled = [take(retained, HTTP) for _ in range(256)]
    windows = Windows(0)
    retained.admit(windows, windows.begin(1), [delivery(900, 900, HTTP, host="quick.example")])
    assert retained.take(HTTP) is None
    settle(retained, stalled[0], Transient("timeout", 0))
    assert take(retained, HTTP).delivery.sequence_id == 900


@pytest.mark.parametrize(
    ("outcome", "following"),
    [(Transient(TIMED_OUT, 0), 3), (Transient("not_connected", 0), 2), (Delivered(), 2)],
)
def test_host_that_timed_out_comes_after_one_that_did_not(outcome: Outcome, following: int) -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(n, n, HTTP, host="first.example") for n in (1, 2)])
    settle(retained, take(retained, HTTP), outcome)
    retained.admit(windows, windows.begin(20), [delivery(3, 3, HTTP, host="second.example")])
    assert take(retained, HTTP).delivery.sequence_id == following


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://A.Example/x", "a.example"),
        ("https://a.example", "a.example"),
        ("https://a.example?q", "a.example"),
        ("https://a.example#f", "a.example"),
        ("https://a.example:8443/x", "a.example"),
        ("HTTPS://a.example:8444?q", "a.example"),
        ("https://[2001:DB8::1]/", "[2001:db8::1]"),
        ("https://[2001:db8::1]:8443/", "[2001:db8::1]"),
        ("", ""),
    ],
)
def test_host_of(url: str, host: str) -> None:
    assert host_of(url) == host


def test_stop_drops_retries_that_come_too_late_and_keeps_the_others() -> None:
    retained = Retained(3)
    loaded(retained, [delivery(1, 1, FCM), delivery(1, 2, FCM), delivery(1, 3, FCM)])
    flying = [take(retained, FCM) for _ in range(3)]
    settle(retained, flying[0], Transient("x", 0), now=0.0)  # due at 10
    settle(retained, flying[1], Transient("x", 60), now=0.0)  # due at 60
    assert retained.stop(20.0) == {FCM: 1}
    assert retained.waiting == 1
    assert settle(retained, flying[2], Transient("x", 60), now=0.0) is Result.FAILED
    assert retained.stop(9.0) == {FCM: 1}, "the deadline came nearer"
    assert retained.is_empty


def test_end_of_the_drain_fails_retries_and_leaves_first_attempts_unmade() -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(1, n) for n in range(1, 4)])
    retry = take(retained)
    assert settle(retained, retry, Transient("x", 0)) is None
    retained.wake(1.0)
    first = take(retained)
    assert retained.expire() == {APNS: 1}
    assert retained.cut(first) is None
    assert retained.waiting == 1
    assert windows.mark == 0


def test_retry_in_flight_at_the_end_of_the_drain_fails() -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery()])
    assert settle(retained, take(retained), Transient("x", 0)) is None
    retained.wake(1.0)
    assert retained.cut(take(retained)) is Result.FAILED
    assert retained.is_empty
    assert windows.mark == 10


def test_lock_loss_forgets_what_waits_and_finishes_what_flies() -> None:
    retained = Retained(3)
    windows = loaded(retained, [delivery(1, n) for n in range(1, 5)])
    flying = [take(retained), take(retained), take(retained)]
    assert settle(retained, flying[0], Transient("x", 0)) is None
    assert retained.discard() == 2
    assert settle(retained, flying[1], Delivered()) is Result.DELIVERED
    assert settle(retained, flying[2], Transient("x", 0)) is Result.FAILED
    assert retained.is_empty
    assert windows.mark == 0
    assert retained.admit(windows, windows.begin(20), [delivery()]) == 0, "a page that was on its way"


def test_stale_retries_do_not_pile_up() -> None:
    retained = Retained(2, Bounds(retained=10, page=5, in_flight=5))
    windows = Windows(0)
    window = windows.begin(1)
    for _ in range(200):
        item = delivery()
        retained.admit(windows, window, [item])
        settle(retained, take(retained), Transient("x", 300))
        assert retained.drop(item.recipient_id, item.config, HASH) == 1
        assert len(retained._due) <= 11
    assert retained.next_due in {300.0, float("inf")}


def test_nothing_private_is_shown() -> None:
    retained = Retained(3)
    loaded(retained, [delivery(1, 1, HTTP, host="private.example")])
    shown = repr(retained) + repr(take(retained, HTTP))
    assert "private" not in shown
    assert "topic" not in shown


OUTCOMES = st.sampled_from(
    [Delivered(), Rejected("x"), Mismatch("x"), Terminal("x"), Gone(404), Transient("x", 0.0), Transient("x", 30.0)]
)
BOUNDS = Bounds(retained=12, page=4, in_flight=3)


class RetainedModel(RuleBasedStateMachine):
    """Lists instead of queues, and every delivery accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.windows = Windows(0)
        self.window: Window | None = None
        self.retained = Retained(3, BOUNDS)
        self.unattempted: dict[int, Delivery] = {}
        self.waiting: dict[int, Delivery] = {}
        self.flying: dict[int, Work] = {}
        self.attempts: Counter[int] = Counter()
        self.barred: set[int] = set()
        self.admitted = 0
        self.results = 0
        self.unmade = 0
        self.is_over = False

    @initialize(maximum=st.integers(1, 3))
    def start(self, maximum: int) -> None:
        self.retained = Retained(maximum, BOUNDS)

    @precondition(lambda self: not self.is_over)
    @rule(
        recipients=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(Channel)), max_size=4),
        is_last=st.booleans(),
    )
    def load(self, recipients: list[tuple[int, Channel]], is_last: bool) -> None:
        has_room = self.retained.has_room
        assert has_room == (len(self.waiting) + BOUNDS.page <= BOUNDS.retained)
        if not has_room:
            assert not self.retained.reserve()
            return
        assert self.retained.reserve()
        if self.window is None:
            self.window = self.windows.begin(self.windows.read_position + 10)
        page = [delivery(self.window.last, number, channel) for number, channel in recipients]
        self.retained.release()
        assert self.retained.admit(self.windows, self.window, page) == len(page)
        self.admitted += len(page)
        for item in page:
            self.unattempted[id(item)] = self.waiting[id(item)] = item
        if is_last:
            self.windows.close(self.window)
            self.window = None

    @rule(channel=st.sampled_from(Channel))
    def take(self, channel: Channel) -> None:
        in_flight = sum(work.delivery.config.channel is channel for work in self.flying.values())
        assert self.retained.in_flight(channel) == in_flight
        startable = self.retained.startable(channel)
        work = self.retained.take(channel)
        assert (work is not None) == (startable > 0)
        if work is None:
            return
        assert in_flight < BOUNDS.in_flight
        item = self.waiting.pop(id(work.delivery))
        if id(item) not in self.unattempted:
            assert not any(
                other.config.channel is channel and id(other) in self.unattempted for other in self.waiting.values()
            ), "a retry went before a first attempt"
        self.flying[id(item)] = work

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), outcome=OUTCOMES)
    def settle(self, data: st.DataObject, outcome: Outcome) -> None:
        key = data.draw(st.sampled_from(list(self.flying)))
        work = self.flying.pop(key)
        had_room = len(self.waiting) < BOUNDS.retained
        result = self.retained.settle(work, outcome, self.now, 0.0)
        self.unattempted.pop(key, None)
        self.attempts[key] += 1
        if result is None:
            assert had_room
            assert key not in self.barred
            assert not self.is_over
            assert work.state is State.WAITING
            self.waiting[key] = work.delivery
        else:
            self.results += 1

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 10.0, 40.0]))
    def wake(self, seconds: float) -> None:
        self.now += seconds
        self.retained.wake(self.now)
        assert self.retained.next_due > self.now

    @rule(recipient=st.integers(1, 3), channel=st.sampled_from(Channel))
    def drop(self, recipient: int, channel: Channel) -> None:
        gone = delivery(1, recipient, channel)

        def matches(item: Delivery) -> bool:
            return item.recipient_id == gone.recipient_id and item.config == gone.config

        doomed = [key for key, item in self.waiting.items() if matches(item)]
        assert self.retained.drop(gone.recipient_id, gone.config, HASH) == len(doomed)
        for key in doomed:
            del self.waiting[key]
            self.unattempted.pop(key, None)
        self.barred |= {key for key, work in self.flying.items() if matches(work.delivery)}
        self.results += len(doomed)

    @precondition(lambda self: not self.is_over)
    @rule(seconds=st.sampled_from([0.0, 2.0, 50.0]))
    def stop(self, seconds: float) -> None:
        failed = self.retained.stop(self.now + seconds).total()
        self._forget_retries(failed)

    @precondition(lambda self: not self.is_over)
    @rule()
    def expire(self) -> None:
        failed = self.retained.expire().total()
        self._forget_retries(failed)
        self.is_over = True
        assert not [key for key in self.waiting if key not in self.unattempted]

    @precondition(lambda self: self.is_over and self.flying)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.flying)))
        result = self.retained.cut(self.flying.pop(key))
        assert (result is None) == (key in self.unattempted)
        if result is None:
            self.unmade += 1
        else:
            self.results += 1

    @precondition(lambda self: not self.is_over)
    @rule()
    def lose_the_lock(self) -> None:
        assert self.retained.discard() == len(self.waiting)
        self.unmade += len(self.waiting)
        self.waiting.clear()
        self.is_over = True

    def _forget_retries(self, failed: int) -> None:
        """Stop gave up some retries; which ones shows in the entries that are left."""
        left = {id(work.delivery) for siblings in self.retained._by_recipient.values() for work in siblings}
        lost = [key for key in self.waiting if key not in left]
        assert len(lost) == failed
        assert not set(lost) & self.unattempted.keys(), "a first attempt was given up"
        for key in lost:
            del self.waiting[key]
        self.results += failed

    @invariant()
    def every_delivery_is_somewhere(self) -> None:
        assert self.admitted == self.results + self.unmade + len(self.waiting) + len(self.flying)
        assert self.retained.waiting == len(self.waiting) <= BOUNDS.retained

    @invariant()
    def mark_stays_below_unattempted_deliveries(self) -> None:
        for item in self.unattempted.values():
            assert self.windows.mark < item.sequence_id

    @invariant()
    def attempts_are_bounded(self) -> None:
        assert max(self.attempts.values(), default=0) <= 3

    def teardown(self) -> None:
        """Let everything left come to its end: it must, and the mark must then be free."""
        if self.is_over:
            return
        while not self.retained.is_empty:
            for channel in Channel:
                while (work := self.retained.take(channel)) is not None:
                    self.flying[id(work.delivery)] = work
            for key, work in list(self.flying.items()):
                del self.flying[key]
                self.retained.settle(work, random.Random(0).choice([Transient("x", 0.0)]), self.now, 0.0)
            self.now += 400.0
            self.retained.wake(self.now)
        if self.window is not None:
            self.windows.close(self.window)
        assert self.windows.mark == self.windows.read_position
        assert all(self.retained.in_flight(channel) == 0 for channel in Channel)
        assert heapq.nsmallest(1, self.retained._due) == []


TestRetainedModel = RetainedModel.TestCase
TestRetainedModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
