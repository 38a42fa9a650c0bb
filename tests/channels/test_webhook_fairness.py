"""Hosts that stall, with 256 permits handed out as the dispatcher does: how much the others notice."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest
import trio
import trio.testing
from attrs import define, field

from pushd.channels import resolver as resolver_module
from pushd.channels import webhook as webhook_module
from pushd.channels.resolver import ThreadResolver
from pushd.channels.webhook import WebhookRequest, WebhookSender, open_webhook_sender, parse_target
from pushd.core import webhook_answers as answers
from pushd.core.addresses import Address
from pushd.core.fairness import HostQueue
from pushd.model import IN_FLIGHT_PER_CHANNEL, Delivered, Outcome
from tests.channels.webhook_peer import NO_CONTENT, Names, Peer, Stream, open_peer, open_sender, trusting_context

LOOPBACK = (ip_address("127.0.0.1"),)
HEALTHY = [f"{n}.hosts.invalid" for n in range(32)]


@define
class Ended:
    host: str
    outcome: Outcome
    at_s: float


@define(eq=False)
class Dispatch:
    """256 permits; a freed one goes to the waiting host with the fewest in flight."""

    sender: WebhookSender
    queue: HostQueue[str, WebhookRequest] = field(factory=HostQueue)
    ended: list[Ended] = field(factory=list)
    serial: int = 0

    def put(self, url: str) -> None:
        parsed = parse_target(url)
        assert parsed is not None
        self.serial += 1
        self.queue.put(parsed.host, WebhookRequest(parsed, b"\x07" * 32, str(self.serial), b"{}"))

    async def run(self) -> None:
        started = trio.current_time()

        async def hold_a_permit() -> None:
            while self.queue:
                host, item = self.queue.take()
                outcome = await self.sender.send(item)
                self.ended.append(Ended(host, outcome, trio.current_time() - started))
                self.queue.done(host, timed_out=outcome == answers.TIMED_OUT)

        async with trio.open_nursery() as sending:
            for _ in range(IN_FLIGHT_PER_CHANNEL):
                sending.start_soon(hold_a_permit)

    def of(self, *hosts: str) -> list[Ended]:
        return [end for end in self.ended if end.host in hosts]


@pytest.fixture
def jumping_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0.05)


@asynccontextmanager
async def silent_and_healthy() -> AsyncIterator[tuple[Dispatch, Peer]]:
    async def by_host(stream: Stream) -> None:
        if peer.requests[-1]["host"].startswith("silent."):
            await stream.receive_some()
        else:
            await stream.send_all(NO_CONTENT)

    names = Names(**{host: ["127.0.0.1"] for host in [*HEALTHY, "silent.hosts.invalid"]})
    async with open_peer(by_host) as peer, open_sender(names) as sender:
        yield Dispatch(sender), peer


async def test_silent_host_at_the_head_of_the_line_does_not_delay_the_others(
    jumping_clock: trio.testing.MockClock,
) -> None:
    """300 for a host that takes connections and never answers, then 5 for each of 32 others, all at once.

    Figures: the silent host gets 8 of the first 256 permits; the others are done before its first time-out.
    """
    async with silent_and_healthy() as (dispatch, peer):
        for _ in range(300):
            dispatch.put(peer.url(host="silent.hosts.invalid"))
        for n in range(160):
            dispatch.put(peer.url(host=HEALTHY[n % 32]))
        await dispatch.run()
    healthy, silent = dispatch.of(*HEALTHY), dispatch.of("silent.hosts.invalid")
    assert [end.outcome for end in healthy] == [Delivered()] * 160
    assert max(end.at_s for end in healthy) < min(end.at_s for end in silent) == pytest.approx(10)
    assert [end.outcome for end in silent] == [answers.TIMED_OUT] * 300
    assert max(end.at_s for end in silent) == pytest.approx(20)  # 300 at 256 in ten seconds


async def test_silent_host_that_holds_every_permit_delays_the_others_by_one_attempt(
    jumping_clock: trio.testing.MockClock,
) -> None:
    """The others arrive when all 256 permits are taken: they wait for the first time-outs, not for 300 of them."""
    async with silent_and_healthy() as (dispatch, peer):
        for _ in range(300):
            dispatch.put(peer.url(host="silent.hosts.invalid"))
        async with trio.open_nursery() as running:
            running.start_soon(dispatch.run)
            await trio.sleep(1)
            assert dispatch.queue.in_flight("silent.hosts.invalid") == IN_FLIGHT_PER_CHANNEL
            for n in range(160):
                dispatch.put(peer.url(host=HEALTHY[n % 32]))
    healthy = dispatch.of(*HEALTHY)
    assert [end.outcome for end in healthy] == [Delivered()] * 160
    assert max(end.at_s for end in healthy) == pytest.approx(10, abs=0.5)


class StalledNames:
    """A blocking lookup: *.stalled never answer while the test runs."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, host: str) -> tuple[Address, ...]:
        if host.endswith(".stalled"):
            assert self.release.wait(60)
        return LOOPBACK


@pytest.fixture
def stalled_names() -> Iterator[StalledNames]:
    names = StalledNames()
    yield names
    names.release.set()


async def test_s041_256_hosts_with_stalled_lookups_leave_hosts_that_answer_alone(
    stalled_names: StalledNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three deliveries for each of 256 hosts whose names hang hold all permits, then 4 for each of 32 known hosts.

    Figures: no lookup of a known host waits for a thread, although 192 threads are stuck for good; every one of the
    128 is delivered, before a second round of the stalled hosts is over.
    """
    monkeypatch.setattr(webhook_module, "ATTEMPT_S", 3.0)  # threads live in real time
    resolver = ThreadResolver(stalled_names)
    async with open_peer() as peer:
        async with open_webhook_sender(
            resolver=resolver, tls=trusting_context(), allow_private_addresses=True
        ) as sender:
            known = Dispatch(sender)
            for host in HEALTHY:
                known.put(peer.url(host=host))
            await known.run()
            dispatch = Dispatch(sender)
            for n in range(3 * 256):
                dispatch.put(peer.url(host=f"{n % 256}.stalled"))
            async with trio.open_nursery() as running:
                running.start_soon(dispatch.run)
                await trio.sleep(0.5)
                assert f"unproven={resolver_module.MAX_UNPROVEN_LOOKUPS}," in repr(resolver)
                for n in range(128):
                    dispatch.put(peer.url(host=HEALTHY[n % 32]))
                with trio.fail_after(60):
                    while len(dispatch.of(*HEALTHY)) < 128:  # noqa: ASYNC110
                        await trio.sleep(0.05)
                running.cancel_scope.cancel()
    assert [end.outcome for end in dispatch.of(*HEALTHY)] == [Delivered()] * 128
    stalled_before = dispatch.ended[: dispatch.ended.index(dispatch.of(*HEALTHY)[-1])]
    assert sum(end.host.endswith(".stalled") for end in stalled_before) <= 512
