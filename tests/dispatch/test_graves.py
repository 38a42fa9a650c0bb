"""Deleting dead recipients apart from the sending."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from pushd.dispatch.graves import BATCH, Graves
from pushd.errors import StoreError, StoreTimeout, StoreUnavailable
from pushd.model import RETAINED_DELIVERIES, Channel, Delivery, DeliveryConfig
from pushd.store.dispatch import Grave
from pushd.telemetry import Metrics


def delivery(number: int) -> Delivery:
    return Delivery(1, b"\x00", number.to_bytes(32, "big"), DeliveryConfig(Channel.APNS, f"t{number}"), b"\x09" * 32)


class Store:
    """Deletes everything it is asked to, unless told to fail."""

    def __init__(self, failures: Sequence[StoreError | None] = ()) -> None:
        self.failures = list(failures)
        self.batches: list[int] = []

    async def delete_dead(self, graves: Sequence[Grave]) -> list[Grave]:
        self.batches.append(len(graves))
        await trio.lowlevel.checkpoint()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return list(graves)


async def run(store: Store, numbers: Sequence[int]) -> tuple[int, int]:
    """Note these, run to the end; how many were dropped and counted."""
    metrics = Metrics()
    graves = Graves(store, metrics)
    for number in numbers:
        graves.note(delivery(number))
    graves.close()
    dropped: list[bytes] = []
    await graves.run(lambda recipient_id, config, secret_hash: dropped.append(recipient_id))
    return len(set(dropped)), int(metrics.push_recipients.labels("dead")._value.get())


async def test_many_go_in_batches_and_each_once() -> None:
    store = Store()
    assert await run(store, [*range(120), *range(120)]) == (120, 120)
    assert store.batches == [BATCH, BATCH, 20]


async def test_batch_that_times_out_is_tried_one_by_one_until_one_of_them_does_again() -> None:
    store = Store([StoreTimeout(), None, None, StoreTimeout()])
    assert await run(store, range(10)) == (2, 2)
    assert store.batches == [10, 1, 1, 1]


async def test_primary_that_is_away_is_asked_once_for_all_that_is_noted() -> None:
    store = Store([StoreUnavailable()])
    assert await run(store, range(400)) == (0, 0)
    assert store.batches == [BATCH]


async def test_statement_that_does_not_return_is_given_up(autojump_clock: object) -> None:
    class Hanging(Store):
        async def delete_dead(self, graves: Sequence[Grave]) -> list[Grave]:
            await trio.sleep_forever()
            raise AssertionError

    with trio.fail_after(11):
        assert await run(Hanging(), range(400)) == (0, 0)


async def test_no_more_is_noted_than_deliveries_are_retained() -> None:
    graves = Graves(Store(), Metrics())
    for number in range(RETAINED_DELIVERIES + 5):
        graves.note(delivery(number))
    assert repr(graves) == f"<Graves pending={RETAINED_DELIVERIES}>"
