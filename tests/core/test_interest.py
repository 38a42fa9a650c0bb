"""Registrations: tables for single decisions, and a model in which everything happens in every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushd.core.interest import TURN_ROWS, TURN_TOPICS, Asked, Interest, Registration

A, B, C, D = b"a", b"b", b"c", b"d"


def following(cursors: dict[bytes, int], heads: dict[bytes, int]) -> tuple[Interest, dict[bytes, Registration]]:
    interest = Interest()
    registrations = [interest.add(topic, cursor) for topic, cursor in cursors.items()]
    interest.found_heads(registrations, [heads.get(topic, 0) for topic in cursors])
    return interest, {one.topic: one for one in registrations}


def topics_of(turn: list[Asked]) -> list[bytes]:
    return [asked.registration.topic for asked in turn]


@pytest.mark.parametrize(("cursor", "head", "is_live"), [(0, 0, True), (5, 5, True), (9, 5, True), (4, 5, False)])
def test_a_topic_without_news_is_live_at_once(cursor: int, head: int, is_live: bool) -> None:
    interest, registrations = following({A: cursor}, {A: head})
    assert registrations[A].is_live is is_live
    assert interest.is_behind is not is_live


def test_an_envelope_at_or_below_the_cursor_is_not_due() -> None:
    interest, registrations = following({A: 9}, {A: 5})
    assert [interest.is_due(registrations[A], n) for n in (6, 9, 10)] == [False, False, True]


def test_an_envelope_seen_before_the_head_is_known_is_fetched() -> None:
    interest = Interest()
    registration = interest.add(A, 0)
    assert not interest.is_due(registration, 7)
    interest.found_heads([registration], [0])
    assert topics_of(interest.next_turn()) == [A]


def test_a_registration_goes_live_once_it_has_what_was_noted() -> None:
    interest, registrations = following({A: 0}, {A: 2})
    turn = interest.next_turn()
    assert not interest.is_due(registrations[A], 3)  # seen while the page is being read
    assert interest.end_turn(turn, [(0, 1), (0, 2)], is_cut=False) == [True, True]
    assert not registrations[A].is_live
    turn = interest.next_turn()
    assert turn[0].position == 2
    interest.end_turn(turn, [(0, 3)], is_cut=False)
    assert registrations[A].is_live
    assert [interest.is_due(registrations[A], n) for n in (3, 4)] == [False, True]


def test_a_page_may_run_ahead_of_what_was_seen() -> None:
    interest, registrations = following({A: 0}, {A: 1})
    interest.end_turn(interest.next_turn(), [(0, 1), (0, 5)], is_cut=False)
    assert registrations[A].is_live
    assert not interest.is_due(registrations[A], 5)


def test_what_is_there_no_more_does_not_keep_a_registration_behind() -> None:
    interest, registrations = following({A: 0}, {A: 7})
    interest.end_turn(interest.next_turn(), [], is_cut=False)
    assert registrations[A].is_live
    assert not interest.is_behind


def test_a_deferred_envelope_is_fetched_and_later_ones_are_noted() -> None:
    interest, registrations = following({A: 0}, {})
    assert interest.is_due(registrations[A], 4)
    interest.defer(registrations[A], 4)
    assert not interest.is_due(registrations[A], 6)
    turn = interest.next_turn()
    assert (turn[0].position, turn[0].known) == (0, 6)


def test_a_removed_topic_takes_nothing_from_a_turn_under_way() -> None:
    interest, _ = following({A: 0, B: 0}, {A: 5, B: 5})
    turn = interest.next_turn()
    interest.remove(A)
    assert interest.end_turn(turn, [(0, 5), (1, 5)], is_cut=False) == [False, True]


def test_a_topic_added_again_is_another_registration() -> None:
    interest, _ = following({A: 0}, {A: 5})
    turn = interest.next_turn()
    interest.remove(A)
    again = interest.add(A, 3)
    assert interest.end_turn(turn, [(0, 5)], is_cut=False) == [False]
    interest.found_heads([again], [5])
    assert interest.next_turn()[0].position == 3


def test_a_removed_topic_leaves_the_line() -> None:
    interest, _ = following({A: 0, B: 0}, {A: 5, B: 5})
    interest.remove(A)
    assert topics_of(interest.next_turn()) == [B]


def test_a_turn_is_bounded_and_the_line_is_served_in_order() -> None:
    topics = [n.to_bytes(2, "big") for n in range(TURN_TOPICS + 10)]
    interest, _ = following(dict.fromkeys(topics, 0), dict.fromkeys(topics, TURN_ROWS + 1))
    first = interest.next_turn()
    assert topics_of(first) == topics[:TURN_TOPICS]
    page = [(place, n + 1) for place in range(len(first)) for n in range(TURN_ROWS)]
    interest.end_turn(first, page, is_cut=False)
    assert topics_of(interest.next_turn()) == topics[TURN_TOPICS:] + topics[: TURN_TOPICS - 10]


def test_after_a_cut_the_unserved_come_first_and_the_cut_one_last() -> None:
    interest, registrations = following(dict.fromkeys([A, B, C, D], 0), dict.fromkeys([A, B, C, D], 9))
    turn = interest.next_turn()
    interest.end_turn(turn, [(0, 9), (1, 4)], is_cut=True)
    assert registrations[A].is_live
    turn = interest.next_turn()
    assert topics_of(turn) == [C, D, B]
    assert turn[2].position == 4


def test_a_full_page_of_a_topic_is_not_its_end() -> None:
    interest, registrations = following({A: 0}, {A: 500})
    interest.end_turn(interest.next_turn(), [(0, n + 1) for n in range(TURN_ROWS)], is_cut=False)
    assert not registrations[A].is_live
    assert interest.next_turn()[0].position == TURN_ROWS


@given(pages=st.lists(st.integers(1, 40), min_size=1, max_size=12), cuts=st.lists(st.integers(1, 9), min_size=60))
def test_nobody_gets_a_second_page_before_all_others_had_one(pages: list[int], cuts: list[int]) -> None:
    """Topic n owes pages[n] envelopes; every turn is cut after a few of them."""
    topics = [bytes((n,)) for n in range(len(pages))]
    interest, registrations = following(dict.fromkeys(topics, 0), dict(zip(topics, pages, strict=True)))
    served: list[bytes] = []
    for cut in cuts:
        turn = interest.next_turn()
        page = [
            (place, n)
            for place, asked in enumerate(turn)
            for n in range(asked.position + 1, pages[asked.registration.topic[0]] + 1)
        ]
        owing = {asked.registration.topic for asked in turn}
        found = page[:cut]
        for topic in dict.fromkeys(turn[place].registration.topic for place, _ in found):
            since = served[len(served) - served[::-1].index(topic) :] if topic in served else []
            if topic in served:
                assert owing - {topic} <= set(since), "somebody who owes was passed over"
            served.append(topic)
        interest.end_turn(turn, found, is_cut=len(page) > cut)
        if not interest.is_behind:
            break
    for topic in topics:
        assert registrations[topic].position <= pages[topic[0]]


class Simulation:
    """One stream over a few topics, the database behind it, and a tailer; all steps can interleave.

    Publishers of a topic take turns, so the ids of a topic become visible in ascending order.
    """

    def __init__(self) -> None:
        self.next_id = 1
        self.visible: list[tuple[int, bytes]] = []  # in commit order
        self.tailed = 0  # how much of `visible` the tailer has offered
        self.interest = Interest()
        self.registrations: dict[bytes, Registration] = {}
        self.got: dict[Registration, list[int]] = {}
        self.cursors: dict[Registration, int] = {}
        self.heads: Callable[[], None] | None = None
        self.page: Callable[[], None] | None = None
        self.selected: list[tuple[int, bytes]] | None = None

    def publish(self, topic: bytes) -> None:
        self.visible.append((self.next_id, topic))
        self.next_id += 1

    def skip_id(self) -> None:
        self.next_id += 1

    def add(self, topic: bytes, back: int) -> None:
        """Register; the heads are read from a snapshot taken now or later, and known later still."""
        if topic in self.registrations or self.heads is not None:
            return
        registration = self.interest.add(topic, max(0, self.next_id - 1 - back))
        self.registrations[topic] = registration
        self.got[registration] = []
        self.cursors[registration] = registration.position
        self.heads = lambda: self._read_heads(registration)

    def _read_heads(self, registration: Registration) -> None:
        head = max((n for n, topic in self.visible if topic == registration.topic), default=0)
        self.heads = lambda: self._know_heads(registration, head)

    def _know_heads(self, registration: Registration, head: int) -> None:
        self.heads = None
        self.interest.found_heads([registration], [head])

    def step_heads(self) -> None:
        if self.heads is not None:
            self.heads()

    def remove(self, topic: bytes) -> None:
        if self.heads is None and topic in self.registrations:
            self.interest.remove(topic)
            del self.registrations[topic]

    def step_page(self, limit: int) -> None:
        """Begin a turn, read its page, or hand the page over."""
        if self.page is None:
            turn = self.interest.next_turn()
            if turn:
                self.page = lambda: self._read_page(turn, limit)
        else:
            self.page()

    def _read_page(self, turn: list[Asked], limit: int) -> None:
        rows = [
            (place, n)
            for place, asked in enumerate(turn)
            for n in [n for n, topic in self.visible if topic == asked.registration.topic and n > asked.position][
                :TURN_ROWS
            ]
        ]
        self.page = lambda: self._end_page(turn, rows[:limit], len(rows) > limit)

    def _end_page(self, turn: list[Asked], found: list[tuple[int, int]], is_cut: bool) -> None:
        self.page = None
        wanted = self.interest.end_turn(turn, found, is_cut=is_cut)
        for (place, n), is_wanted in zip(found, wanted, strict=True):
            if is_wanted:
                self.got[turn[place].registration].append(n)

    def step_tailer(self, count: int) -> None:
        """Select from what became visible, or deliver what was selected."""
        if self.selected is None:
            seen = self.visible[self.tailed : self.tailed + count]
            self.selected = [
                (n, topic)
                for n, topic in seen
                if topic in self.registrations and self.interest.is_due(self.registrations[topic], n)
            ]
            self.tailed += len(seen)
            return
        for n, topic in self.selected:
            registration = self.registrations.get(topic)
            if registration is not None and self.interest.is_due(registration, n):
                if n % 7 == 0:
                    self.interest.defer(registration, n)
                else:
                    self.interest.hand_over(registration, n)
                    self.got[registration].append(n)
        self.selected = None

    def settle(self) -> None:
        while self.heads or self.page or self.selected is not None or self.tailed < len(self.visible):
            self.step_heads()
            self.step_tailer(100)
            self.step_page(100)
        while self.interest.is_behind or self.page:
            self.step_page(100)

    def check(self) -> None:
        for registration, got in self.got.items():
            due = [n for n, topic in self.visible if topic == registration.topic and n > self.cursors[registration]]
            if self.registrations.get(registration.topic) is registration:
                assert got == due
                assert registration.is_live
            else:
                assert got == due[: len(got)], "what a removed registration got is a beginning of what it was due"


topics = st.sampled_from([A, A, B])
alternatives = {
    "publish": (6, st.tuples(topics)),
    "skip_id": (1, st.tuples()),
    "add": (3, st.tuples(topics, st.integers(0, 6))),
    "remove": (1, st.tuples(topics)),
    "step_heads": (4, st.tuples()),
    "step_page": (6, st.tuples(st.integers(1, 5))),
    "step_tailer": (6, st.tuples(st.integers(1, 4))),
}
# `one_of` would count each alternative once, however often it is named.
steps = st.sampled_from([name for name, (weight, _) in alternatives.items() for _ in range(weight)]).flatmap(
    lambda name: alternatives[name][1].map(lambda arguments: (name, *arguments))
)


@settings(max_examples=100, deadline=None)
@given(script=st.lists(steps, min_size=60, max_size=80))
def test_every_registration_gets_everything_once_and_in_order(script: list[tuple[Any, ...]]) -> None:
    world = Simulation()
    for name, *arguments in script:
        getattr(world, name)(*arguments)
    world.settle()
    world.check()
