"""The queue between hosts: checked against the plainest possible model, and on the cases it exists for."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pushd.core import fairness
from pushd.core.fairness import HostQueue

HOSTS = st.sampled_from("abcdef")


class FairnessModel(RuleBasedStateMachine):
    """Keeps every waiting item in one list and looks all of it through."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: HostQueue[str, int] = HostQueue(ranks=2)
        self.waiting: list[tuple[str, int, int]] = []
        self.in_flight: Counter[str] = Counter()
        self.slow: set[str] = set()
        self.serial = 0

    @rule(host=HOSTS, rank=st.integers(0, 1))
    def put(self, host: str, rank: int) -> None:
        self.serial += 1
        self.queue.put(host, self.serial, rank)
        self.waiting.append((host, self.serial, rank))

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        host, item = self.queue.take()
        best_rank = min(rank for _, _, rank in self.waiting)
        candidates = {h for h, _, rank in self.waiting if rank == best_rank}
        assert host in candidates
        assert self._place(host) == min(map(self._place, candidates))
        oldest = next(entry for entry in self.waiting if entry[0] == host and entry[2] == best_rank)
        assert oldest[1] == item
        self.waiting.remove(oldest)
        self.in_flight[host] += 1

    @precondition(lambda self: self.in_flight.total())
    @rule(data=st.data(), timed_out=st.booleans())
    def done(self, data: st.DataObject, timed_out: bool) -> None:
        host = data.draw(st.sampled_from(sorted(+self.in_flight)))
        self.queue.done(host, timed_out=timed_out)
        self.in_flight[host] -= 1
        (self.slow.add if timed_out else self.slow.discard)(host)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(*entry)
        self.waiting.remove(entry)

    @rule()
    def clear(self) -> None:
        assert sorted(self.queue.clear()) == sorted(serial for _, serial, _ in self.waiting)
        self.waiting.clear()

    def _place(self, host: str) -> tuple[int, bool]:
        return self.in_flight[host], host in self.slow

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert all(self.queue.in_flight(host) == self.in_flight[host] for host in "abcdef")


TestFairnessModel = FairnessModel.TestCase


def test_host_with_a_long_line_gets_only_what_others_leave() -> None:
    queue: HostQueue[str, int] = HostQueue()
    for item in range(1_000):
        queue.put("stalled", item)
    for _ in range(256):
        assert queue.take()[0] == "stalled"
    for item in range(40):
        queue.put("healthy", item)
    # Every permit the stalled host gives up goes to the healthy one, until that has nothing left that waits.
    taken = []
    for _ in range(41):
        queue.done("stalled")
        taken.append(queue.take()[0])
    assert taken == ["healthy"] * 40 + ["stalled"]


def test_equal_hosts_take_turns() -> None:
    queue: HostQueue[str, int] = HostQueue()
    for host in "abc":
        for item in range(3):
            queue.put(host, item)
    assert [queue.take() for _ in range(9)] == [(host, item) for item in range(3) for host in "abc"]


def test_first_attempts_leave_before_retries_of_any_host() -> None:
    queue: HostQueue[str, str] = HostQueue(ranks=2)
    queue.put("idle", "retry", rank=1)
    for n in range(3):
        queue.put("busy", f"first {n}")
    assert [queue.take()[1] for _ in range(4)] == ["first 0", "first 1", "first 2", "retry"]


def test_retries_count_in_flight_for_first_attempts_too() -> None:
    queue: HostQueue[str, str] = HostQueue(ranks=2)
    queue.put("a", "retry", rank=1)
    queue.take()
    queue.put("a", "first")
    queue.put("b", "first")
    assert queue.take()[0] == "b"


def test_healthy_host_keeps_its_permit_among_more_stalled_hosts_than_there_are_permits() -> None:
    queue: HostQueue[str, int] = HostQueue()
    for number in range(300):
        for item in range(10):
            queue.put(f"stalled {number}", item)
    permits = [queue.take()[0] for _ in range(256)]
    for stalled in permits:
        queue.done(stalled, timed_out=True)
    for item in range(100):
        queue.put("healthy", item)
    assert "healthy" in [queue.take()[0] for _ in range(256)]
    for _ in range(99):
        queue.done("healthy")
        assert queue.take()[0] == "healthy"


def test_host_that_answers_again_is_no_longer_slow() -> None:
    queue: HostQueue[str, int] = HostQueue()
    queue.put("a", 0)
    queue.done(queue.take()[0], timed_out=True)
    queue.put("a", 1)
    queue.put("b", 1)
    assert [queue.take()[0] for _ in range(2)] == ["b", "a"]
    queue.done("a")
    queue.done("b")
    queue.put("a", 2)
    queue.put("b", 2)
    assert [queue.take()[0] for _ in range(2)] == ["a", "b"]


def test_slow_hosts_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_SLOW_HOSTS", 3)
    queue: HostQueue[int, int] = HostQueue()
    for host in range(5):
        queue.put(host, 0)
        queue.put(host, 1)
        queue.take()
    for host in range(5):
        queue.done(host, timed_out=True)
    assert [queue.take()[0] for _ in range(5)] == [0, 1, 2, 3, 4], "0 and 1 are forgotten, the others wait behind"
    assert len(queue._slow) == 3


def test_equal_item_that_waits_already_is_refused() -> None:
    queue: HostQueue[str, int] = HostQueue()
    queue.put("private.example", 1)
    with pytest.raises(ValueError, match="equal item") as caught:
        queue.put("private.example", 1)
    assert "private.example" not in str(caught.value)
    assert len(queue) == 1


def test_misuse_is_an_error_and_names_no_host() -> None:
    queue: HostQueue[str, int] = HostQueue()
    with pytest.raises(IndexError):
        queue.take()
    with pytest.raises(KeyError) as caught:
        queue.done("private.example")
    assert "private.example" not in str(caught.value)
    with pytest.raises(KeyError) as caught:
        queue.remove("private.example", 1)
    assert "private.example" not in str(caught.value)
    assert "private.example" not in repr(queue)


def test_nothing_is_kept_for_hosts_that_are_done() -> None:
    queue: HostQueue[int, int] = HostQueue()
    for host in range(100):
        queue.put(host, 0)
    for _ in range(100):
        queue.done(queue.take()[0])
    assert queue._in_flight == {}
    assert queue._ranks[0]._buckets == {}
    assert queue._ranks[0]._items == {}
