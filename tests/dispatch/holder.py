"""A dispatcher in a process of its own, to be stopped, killed and watched: prints one line an attempt.

Usage: python -m tests.dispatch.holder DATABASE_URL ATTEMPT_S GRACE_S POLL_S

Lines are `ready`, `term` when the lock is won and `no term` when it is gone, `begin ROW RECIPIENT` when an attempt
begins, `end ROW RECIPIENT` when it was delivered, and `stopped`. SIGTERM requests a stop GRACE_S from then.
"""

from __future__ import annotations

import signal
import sys

import trio

from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.model import Channel, Delivered, Delivery, Outcome
from pushd.stop import StopSignal
from pushd.store.database import DatabaseSettings, open_database
from pushd.store.dispatch import DispatchStore
from pushd.telemetry import Metrics, configure_logging


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Printing:
    def __init__(self, attempt_s: float) -> None:
        self._attempt_s = attempt_s

    async def attempt(self, delivery: Delivery) -> Outcome:
        name = f"{delivery.sequence_id} {int.from_bytes(delivery.recipient_id[24:], 'big')}"
        say(f"begin {name}")
        await trio.sleep(self._attempt_s)
        say(f"end {name}")
        return Delivered()


class NoBoundary:
    """Everything is settled; nobody advances."""

    def request(self) -> None:
        pass

    async def wait_above(self, sequence_id: int) -> int:
        await trio.sleep_forever()
        raise AssertionError


async def tell_terms(metrics: Metrics) -> None:
    """Watch the gauge, as an operator would."""
    held = 0.0
    while True:
        value = metrics.push_dispatcher._value.get()
        if value != held:
            say("term" if value else "no term")
            held = value
        await trio.sleep(0.01)


async def main(url: str, attempt_s: float, grace_s: float, poll_s: float) -> None:
    stop = StopSignal()
    metrics = Metrics()
    async with open_database(DatabaseSettings(url), metrics) as database, trio.open_nursery() as nursery:
        nursery.start_soon(tell_terms, metrics)

        async def heed_signals() -> None:
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                say("ready")
                async for _ in signals:
                    stop.request(trio.current_time() + grace_s)

        nursery.start_soon(heed_signals)
        sender = Printing(attempt_s)
        await run_dispatcher(
            DispatchStore(database),
            dict.fromkeys(Channel, sender),
            DispatchSettings(poll_interval_s=poll_s),
            metrics=metrics,
            boundary=NoBoundary(),
            stop=stop,
        )
        nursery.cancel_scope.cancel()
    say("stopped")


if __name__ == "__main__":
    configure_logging("warn")
    trio.run(main, sys.argv[1], *map(float, sys.argv[2:5]))
