"""Suppression of a sender's own messages, page by page."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import attrs
import pytest
import trio

from pushd.core.retained import Retained
from pushd.core.suppression import HmacCheck
from pushd.core.window import Window, Windows
from pushd.dispatch import own_messages
from pushd.dispatch.own_messages import CHUNK_BYTES, OwnMessages
from pushd.model import Channel, Delivered, Delivery, Outcome, Transient
from tests.dispatch.memory import MemoryPages, MemoryStore, Provider, Row, Subscription, dispatching, until
from tests.dispatch.seed import client_envelope, recipient_id, topic

APNS, FCM, HTTP = Channel
KEYS = tuple(bytes([n]) * 42 for n in (1, 2, 3))
TOPIC = topic(1)


def signed(sequence_id: int, key: bytes, *, epoch: int = 10, size: int = 20) -> Row:
    data = bytes([sequence_id % 251]) * size
    tag = hmac.new(key, data, hashlib.sha256).digest()
    return Row(sequence_id, TOPIC, epoch, sender_hmac=tag, payload=client_envelope(data))


def check(place: int, row: Row, key: bytes) -> HmacCheck:
    assert row.sender_hmac is not None
    return HmacCheck(place, row.sequence_id, key, row.sender_hmac)


async def test_t082_key_of_the_rows_epoch_decides_and_nothing_is_merged(autojump_clock: object) -> None:
    store = MemoryStore(boundary=5)
    store.rows = [signed(n, KEYS[min(n - 1, 2)], epoch=8 + n) for n in range(1, 5)] + [Row(5, TOPIC, 13)]
    store.add_recipients([1, 2])
    store.subscriptions = [Subscription(1, TOPIC, epoch_base=9, keys=KEYS), Subscription(2, TOPIC)]
    provider = Provider()
    async with dispatching(store, {APNS: provider}) as run:
        await until(lambda: store.cursor == 5)
        await run.stopped()
    assert run.counts() == {"delivered": 7, "suppressed": 3}
    assert sorted(row for _, row, who in provider.attempts if who == recipient_id(1)) == [4, 5]
    assert sorted(row for _, row, who in provider.attempts if who == recipient_id(2)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("spoil", ["payload", "missing", "tag", "welcome"])
async def test_whatever_cannot_be_checked_is_sent(spoil: str, autojump_clock: object) -> None:
    row = signed(1, KEYS[1])
    broken = {
        "payload": Row(1, TOPIC, sender_hmac=row.sender_hmac, payload=b"\xff\xff"),
        "missing": Row(1, TOPIC, sender_hmac=row.sender_hmac, payload=b""),
        "tag": Row(1, TOPIC, sender_hmac=bytes(32), payload=row.payload),
        "welcome": Row(1, TOPIC, sender_hmac=row.sender_hmac, payload=b"\x12" + row.payload[1:]),
    }[spoil]
    store = MemoryStore(rows=[broken], boundary=1)
    store.add_recipients([1])
    store.subscriptions = [Subscription(1, TOPIC, epoch_base=9, keys=KEYS)]
    async with dispatching(store, {APNS: Provider()}) as run:
        await until(lambda: store.cursor == 1)
        await run.stopped()
    assert run.counts() == {"delivered": 1}


async def test_t083_only_the_last_payload_is_kept() -> None:
    rows = [signed(n, KEYS[1], size=1_000) for n in range(1, 6)]
    judge = OwnMessages()
    own = await judge.find([check(n, row, KEYS[1]) for n, row in enumerate(rows)], MemoryPages(MemoryStore(rows=rows)))
    assert own == {0, 1, 2, 3, 4}
    assert repr(judge) == "<OwnMessages held=1000>"


async def test_t084_row_over_two_pages_is_judged_from_the_payload_of_the_first() -> None:
    first, second = signed(1, KEYS[1], size=2_000_000), signed(2, KEYS[1], size=2_000_000)
    store = MemoryStore(rows=[first, second])
    judge, reader = OwnMessages(), MemoryPages(store)
    assert await judge.find(
        [check(0, first, KEYS[1]), check(5, second, KEYS[1]), check(6, second, KEYS[2])], reader
    ) == {
        0,
        5,
    }
    assert store.payload_reads == [[1, 2]]
    store.rows = []
    assert await judge.find([check(0, second, KEYS[1]), check(1, second, KEYS[0])], reader) == {0}
    assert store.payload_reads == [[1, 2]], "nothing had to be read again"
    assert await judge.find([check(0, first, KEYS[1])], reader) == set(), "an older row is not kept"


async def test_payloads_come_in_one_statement_and_in_chunks_when_they_are_large() -> None:
    small = [signed(n, KEYS[1]) for n in range(1, 200)]
    store = MemoryStore(rows=small)
    await OwnMessages().find([check(n, row, KEYS[1]) for n, row in enumerate(small)], MemoryPages(store))
    assert len(store.payload_reads) == 1

    large = [signed(n, KEYS[1], size=3 * 2**20) for n in range(1, 6)]
    store = MemoryStore(rows=large)
    own = await OwnMessages().find([check(n, row, KEYS[1]) for n, row in enumerate(large)], MemoryPages(store))
    assert own == {0, 1, 2, 3, 4}
    assert store.payload_reads == [[1, 2, 3, 4, 5], [3, 4, 5], [5]]
    assert CHUNK_BYTES == 8 * 2**20


async def test_verdict_is_remembered_for_every_recipient_with_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[set[bytes]] = []
    real = own_messages.own_keys

    def counting(data: bytes, keys: set[bytes], tag: bytes) -> set[bytes]:
        hashed.append(set(keys))
        return real(data, keys, tag)

    monkeypatch.setattr(own_messages, "own_keys", counting)
    row = signed(1, KEYS[1])
    judge, reader = OwnMessages(), MemoryPages(MemoryStore(rows=[row]))
    checks = [check(n, row, KEYS[n % 2]) for n in range(1_000)]
    assert await judge.find(checks, reader) == set(range(1, 1_000, 2))
    assert await judge.find(checks, reader) == set(range(1, 1_000, 2))
    assert hashed == [{KEYS[0], KEYS[1]}]


@pytest.mark.parametrize(("size", "keys", "in_thread"), [(65_536, 1, False), (65_537, 1, True), (1_000, 66, True)])
async def test_much_hashing_is_done_in_a_worker_thread(
    size: int, keys: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[object] = []
    real = trio.to_thread.run_sync

    async def watching(function, *args, **kwargs):  # type: ignore[no-untyped-def]
        threads.append(function)
        return await real(function, *args, **kwargs)

    monkeypatch.setattr(trio.to_thread, "run_sync", watching)
    row = signed(1, KEYS[1], size=size)
    others = [n.to_bytes(42, "big") for n in range(1, keys)]
    checks = [check(n, row, key) for n, key in enumerate([KEYS[1], *others])]
    assert await OwnMessages().find(checks, MemoryPages(MemoryStore(rows=[row]))) == {0}
    assert bool(threads) is in_thread


async def test_page_cut_for_lack_of_room_is_read_again_from_the_cut_and_nothing_is_counted_twice(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a page is on its way retries take the room it had reserved; a tenth of its deliveries are suppressed."""
    admitted: list[tuple[int, int]] = []
    real = Retained.admit

    def watching(
        retained: Retained, windows: Windows, window: Window, deliveries: Sequence[Delivery], now: float
    ) -> int:
        admitted.append((len(deliveries), real(retained, windows, window, deliveries, now)))
        return admitted[-1][1]

    monkeypatch.setattr(Retained, "admit", watching)
    store = MemoryStore()
    store.simple(1, recipients=9_256, channel=HTTP)
    store.simple(1, recipients=256, channel=APNS, first_row=2)
    members = range(10, 1_510)
    store.add_recipients(members, FCM)
    row = attrs.evolve(signed(3, KEYS[1]), topic=topic(50))
    store.rows.append(row)
    store.subscriptions += [
        Subscription(n, row.topic, epoch_base=9, keys=KEYS) if n % 10 == 0 else Subscription(n, row.topic)
        for n in members
    ]
    stalled, failing = trio.Event(), trio.Event()

    async def fail_late() -> Outcome:
        await failing.wait()
        return Transient("x", 0.0)

    hooks = Provider(lambda delivery, attempt: stalled)
    apns = Provider(lambda delivery, attempt: fail_late() if attempt == 1 else Delivered())
    fcm = Provider()
    async with dispatching(store, {HTTP: hooks, APNS: apns, FCM: fcm}) as run:
        await until(lambda: (hooks.in_flight, apns.in_flight) == (256, 256))
        await until(lambda: store.requests[-1][0].floor == 2)  # 9,000 wait, and a page may be asked for
        gate = store.gates["read"] = trio.Event()
        await trio.sleep(0.2)
        store.boundary = 3
        failing.set()
        await until(lambda: apns.in_flight == 0)
        del store.gates["read"]
        gate.set()
        await until(lambda: run.channel_counts(FCM) == {"delivered": 1_350, "suppressed": 150})
        assert (900, 744) in admitted
        stalled.set()
        await until(lambda: store.cursor == 3)
        await run.stopped()
    assert len(fcm.attempts) == len({who for _, _, who in fcm.attempts}) == 1_350
    assert run.counts() == {"delivered": 9_256 + 256 + 1_350, "suppressed": 150}
