"""Networks that refuse, go deaf, and take their time, in front of the database and of the providers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import trio

from pushd.model import Channel
from tests.faults.cluster import DbProcess, through, until
from tests.faults.fault_instances import recipients, saturate
from tests.faults.moments import moment
from tests.faults.proxy import Proxy, open_proxy
from tests.faults.world import Fakes, Tell, World, open_world

ON_THE_WAY = 10  # requests and answers that a channel has on the wire at any moment, at most


async def test_primary_that_goes_away_and_comes_back_is_found_again(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    async with open_proxy(db.socket) as proxy:
        async with open_world(db, fakes, folder, url=lambda url: through(url, proxy.port)) as world:
            world.latency(100)
            async with world.load(100):
                for _ in range(1 if is_short else 3):
                    await world.received_more(300)
                    async with world.next_term():
                        proxy.refuse()
                        await until(lambda: not any(instance.holds for instance in world.up))
                        refused = proxy.accepted
                        await until(lambda refused=refused: proxy.accepted > refused + 10)
                        proxy.heal()
                await world.received_more(300)
            report = await world.settle()
            assert report.outcomes == {"delivered": report.received}
            tell(report)


async def test_holder_cut_off_by_a_deaf_network_is_followed_by_another(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """The holder's connections stay open and nothing passes. Its trust in the lock must end before the lock does.

    Every permit is taken and as much again waits, so a holder that went on, then or when its attempts end, would be
    seen: the other one sends all of that.
    """
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(open_proxy(db.socket)) for _ in range(2)]
        ports = iter(proxy.port for proxy in proxies)
        async with open_world(
            db, fakes, folder, url=lambda url: through(url, next(ports)), devices=recipients()
        ) as world:
            holder = await world.holder()
            (other,) = [each for each in world.up if each is not holder]
            (its_proxy,) = [proxy for proxy in proxies if f":{proxy.port}/" in holder.database_url]
            in_flight = await saturate(world)
            world.latency(50)
            async with trio.open_nursery() as nursery:
                async with world.next_term():
                    its_proxy.go_deaf()
                    nursery.start_soon(partial(world.publish, 30, batch=8))
            await world.dispatched()
            its_proxy.heal()
            report = await world.settle()
            ended, began = holder.terms[-1], other.terms[0]
            assert ended["reason"].startswith("database_")
            assert ended["discarded"] > 0, "there was more to send"
            assert moment(ended) < moment(began), "the old holder knows before there is a new one"
            sent_before = sum(arrival.wall_s < moment(began) for arrival in await world.arrivals())
            assert report.received == sent_before + world.due_above(world.cursors[1]), "the old holder went on sending"
            assert report.terms == 2
            # What the old holder had in flight was never answered.
            assert report.outcomes == {"delivered": report.received - in_flight, "failed": in_flight}
            tell(report)


async def test_slow_database_delays_and_repeats_nothing(db: DbProcess, fakes: Fakes, folder: Path, tell: Tell) -> None:
    """100 ms there and back for every statement, with a jolt of a second in between."""
    async with open_proxy(db.socket) as proxy:
        async with open_world(db, fakes, folder, url=lambda url: through(url, proxy.port)) as world:
            proxy.delay(0.05)
            began = trio.current_time()
            await world.publish(1)
            assert trio.current_time() - began >= 0.1, "the delay took place"
            async with world.load(60):
                await world.received_more(200)
                proxy.delay(0.5)
                await trio.sleep(1)
                proxy.delay(0.05)
                await world.received_more(200)
            report = await world.settle()
            assert report.terms == 1
            assert report.repeats == 0
            assert report.outcomes == {"delivered": report.received}
            tell(report)


async def test_providers_whose_connections_break_get_everything_in_the_end(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, is_short: bool, tell: Tell
) -> None:
    """Connections of all three are reset under requests in flight, go deaf, are refused and are slow; those of one stay
    deaf until attempts run out of time, and meanwhile the other two are served.

    A request without an answer when its connection broke has an unknown outcome and is sent again. Nothing else is.
    """
    async with AsyncExitStack() as stack:
        proxies = {channel: await stack.enter_async_context(open_proxy(fake.port)) for channel, fake in fakes.items()}
        endpoints = {channel: {"endpoint": f"https://127.0.0.1:{proxy.port}"} for channel, proxy in proxies.items()}
        push = {"max_attempts": 10, "apns": endpoints[Channel.APNS], "fcm": endpoints[Channel.FCM]}
        hooks_port = proxies[Channel.HTTP].port
        async with open_world(db, fakes, folder, webhook_port=hooks_port, push=push) as world:
            providers = [Provider(world, channel, proxies[channel]) for channel in Channel]
            world.latency(500)
            async with world.load(100):
                for _ in range(1 if is_short else 3):
                    for provider in providers:
                        await provider.under_load(provider.proxy.cut)
                    victim, *others = rng.sample(providers, len(providers))
                    if is_short and victim.channel is Channel.FCM:  # which is tried again 10 s after each failure
                        victim, others[0] = others[0], victim
                    await victim.under_load(victim.proxy.go_deaf)
                    async with trio.open_nursery() as nursery:
                        for provider in others:
                            nursery.start_soon(provider.bad_minute)
                        await until(victim.timed_out)
                    await victim.refuse()
                    await victim.more(50)
            report = await world.settle(unknown=sum(provider.unknown for provider in providers))
            for provider in providers:
                repeats = await provider.repeats()
                print(f"{provider.channel.label}: {repeats} repeats of {provider.unknown} unknown outcomes")
                assert 0 < repeats <= provider.unknown
            assert report.terms == 1
            assert report.outcomes == {"delivered": report.pushes}
            tell(report)


class Provider:
    """A provider behind a proxy, with an account of the attempts whose outcome a break left unknown."""

    def __init__(self, world: World, channel: Channel, proxy: Proxy) -> None:
        self._world = world
        self._timeouts = 0
        self.channel = channel
        self.proxy = proxy
        self.unknown = 0
        """At most so many requests had arrived, and their answers had not."""

    async def under_load(self, break_it: Callable[[], None]) -> None:
        """Break it with requests in flight."""

        async def busy() -> bool:
            return await self._world.in_flight(self.channel) >= 10

        await until(busy)
        self._timeouts = await self._count("pushd_push_attempt_failures_total", 'reason="timeout"')
        before = await self._world.statistics(self.channel)
        break_it()
        after = await self._world.statistics(self.channel)
        # What came in between, and what was on its way just then, either way.
        self.unknown += before["in_flight"] + after["requests"] - before["requests"] + ON_THE_WAY

    async def bad_minute(self) -> None:
        """Deaf for a while, then refused, then slow, and then served."""
        await self.under_load(self.proxy.go_deaf)
        heard = (await self._world.statistics(self.channel))["requests"]

        async def many_wait() -> bool:
            return await self._count("pushd_push_in_flight", "") >= 100

        await until(many_wait)
        assert (await self._world.statistics(self.channel))["requests"] <= heard + ON_THE_WAY, "it was deaf"
        await self.refuse()
        self.proxy.delay(0.2)
        await self.more(50)
        self.proxy.heal()
        await self.more(50)

    async def refuse(self) -> None:
        """Refuse connections until some were."""
        accepted = self.proxy.accepted
        self.proxy.refuse()
        await until(lambda: self.proxy.accepted >= accepted + 3)
        self.proxy.heal()

    async def more(self, count: int) -> None:
        """Return once so many further requests have arrived."""
        before = (await self._world.statistics(self.channel))["requests"]

        async def enough() -> bool:
            return (await self._world.statistics(self.channel))["requests"] >= before + count

        await until(enough)

    async def timed_out(self) -> bool:
        """Whether an attempt took too long since the last break."""
        return await self._count("pushd_push_attempt_failures_total", 'reason="timeout"') > self._timeouts

    async def repeats(self) -> int:
        """Arrivals beyond the first of each push."""
        pushes = [arrival.push for arrival in await self._world.arrivals() if arrival.channel is self.channel]
        return len(pushes) - len(set(pushes))

    async def _count(self, family: str, label: str) -> int:
        pages = [await instance.metrics() for instance in self._world.up]
        return sum(
            int(value)
            for page in pages
            for name, value in page.items()
            if name.startswith(family) and f'channel="{self.channel.label}"' in name and label in name
        )
