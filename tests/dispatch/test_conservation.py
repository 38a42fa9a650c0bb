"""Random workloads and faults: nothing is lost, nothing is counted twice, no bound is broken."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis  # noqa: F401  # trio keeps an order of tasks that a seed decides only once this is imported
import pytest
import trio

from pushd.core.retained import Retained
from pushd.errors import StoreTimeout, StoreUnavailable
from pushd.model import ATTEMPT_S, Channel, Delivered, Delivery, Gone, Mismatch, Outcome, Rejected, Terminal, Transient
from tests.dispatch.memory import MemoryStore, Provider, Row, Subscription, dispatching, until
from tests.dispatch.seed import recipient_id, topic

APNS, FCM, HTTP = Channel


class Ledger:
    """Hears what is admitted, discarded and left, from the objects that know."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.admitted = 0
        self.discarded = 0
        self.cut = 0
        self.most_waiting = 0
        self.retained: list[Retained] = []
        real_init, real_admit, real_discard, real_cut = (
            Retained.__init__,
            Retained.admit,
            Retained.discard,
            Retained.cut,
        )

        def init(retained, *args, **kwargs):  # type: ignore[no-untyped-def]
            real_init(retained, *args, **kwargs)
            self.retained.append(retained)

        def admit(retained, *args):  # type: ignore[no-untyped-def]
            count = real_admit(retained, *args)
            self.admitted += count
            self.most_waiting = max(self.most_waiting, retained.waiting)
            return count

        def discard(retained):  # type: ignore[no-untyped-def]
            count = real_discard(retained)
            self.discarded += count
            return count

        def cut(retained, work):  # type: ignore[no-untyped-def]
            result = real_cut(retained, work)
            self.cut += result is None
            return result

        for name, function in (("__init__", init), ("admit", admit), ("discard", discard), ("cut", cut)):
            monkeypatch.setattr(Retained, name, function)

    @property
    def unmade(self) -> int:
        """First attempts that a deadline cut or did not let begin."""
        return self.cut + sum(retained.waiting for retained in self.retained)


def random_outcome(rng: random.Random) -> Outcome:
    return rng.choices(
        [
            Delivered(),
            Rejected("x"),
            Mismatch("x"),
            Terminal("x"),
            Gone(404),
            Transient("x", 0.0),
            Transient("x", rng.uniform(0, 30)),
        ],
        [60, 5, 3, 1, 6, 15, 10],
    )[0]


def random_store(rng: random.Random) -> MemoryStore:
    store = MemoryStore()
    numbers = list(range(1, 400))
    channels = {number: rng.choice(list(Channel)) for number in numbers}
    for number, channel in channels.items():
        store.add_recipients([number], channel)
    for group in range(1, 30):
        for number in rng.sample(numbers, rng.choice([0, 1, 5, 50, 200])):
            store.subscriptions.append(Subscription(number, topic(group), since=rng.choice([0, 0, 0, 100])))
    store.rows = [
        Row(sequence_id, topic(rng.randrange(1, 40)), commit=rng.random() < 0.1)
        for sequence_id in range(1, 300)
        if rng.random() < 0.9
    ]
    store.boundary = store.rows[-1].sequence_id
    return store


@pytest.mark.parametrize("seed", range(4))
async def test_every_delivery_ends_once_whatever_happens(
    seed: int, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    trio._core._run._r.seed(seed)
    store = random_store(rng)
    ledger = Ledger(monkeypatch)
    sent: set[tuple[int, bytes]] = set()
    settled_cursor = 0

    async def answer(delivery: Delivery) -> Outcome:
        limit = trio.current_time() + ATTEMPT_S
        try:
            await trio.sleep(rng.choice([0.0, 0.01, 0.1, 1.0, 11.0] if rng.random() < 0.02 else [0.0, 0.005, 0.05]))
        except trio.Cancelled:
            # An attempt that used up its time was made. One that a stop cut short was not: its window stays open.
            if trio.current_time() >= limit:
                sent.add((delivery.sequence_id, delivery.recipient_id))
            raise
        outcome = random_outcome(rng)
        sent.add((delivery.sequence_id, delivery.recipient_id))
        return outcome

    providers = {channel: Provider(lambda delivery, attempt: answer(delivery)) for channel in Channel}
    counted: Counter[str] = Counter()
    terms = 0
    while store.cursor < store.boundary:
        terms += 1
        async with dispatching(store, providers, drain_s=rng.choice([0.0, 0.05, 20.0])) as run:
            for _ in range(rng.randrange(1, 30)):
                await trio.sleep(rng.expovariate(20))
                fault(store, rng)
                assert store.cursor >= settled_cursor
                settled_cursor = store.cursor
            if terms > 12:
                store.failures.clear()
                await until(lambda: store.cursor == store.boundary)
            await run.stopped(rng.choice([0.0, 0.05, 30.0]))
        counted.update(run.counts())
    assert ledger.admitted == counted.total() + ledger.discarded + ledger.unmade
    assert ledger.most_waiting <= 10_000
    assert all(provider.most_in_flight <= 256 for provider in providers.values())
    assert missed(store, sent) == []


def fault(store: MemoryStore, rng: random.Random) -> None:
    match rng.randrange(12):
        case 0:
            store.failures["probe"].append(StoreUnavailable())
        case 1:
            store.failures["move_cursor"].append(StoreUnavailable())
        case 2:
            store.failures["read"].append(rng.choice([StoreTimeout(), StoreUnavailable()]))
        case 3:
            store.failures["delete_dead"].append(StoreUnavailable())
        case 4:
            store.step_down_asked = True


def missed(store: MemoryStore, sent: set[tuple[int, bytes]]) -> list[tuple[int, int]]:
    """Deliveries that should have had an attempt and had none; recipients deleted on the way are not owed any."""
    by_topic: dict[bytes, list[Subscription]] = {}
    for subscription in store.subscriptions:
        by_topic.setdefault(subscription.topic, []).append(subscription)
    return [
        (row.sequence_id, subscription.recipient)
        for row in store.rows
        for subscription in by_topic.get(row.topic, [])
        if recipient_id(subscription.recipient) in store.recipients
        and subscription.since < row.sequence_id
        and (not row.commit or subscription.commits)
        and (row.sequence_id, recipient_id(subscription.recipient)) not in sent
    ]
