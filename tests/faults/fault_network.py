"""Networks that refuse, go deaf, and take their time, in front of the database and of the providers."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from pushd.model import Channel
from tests.faults.cluster import DbProcess, through, until
from tests.faults.proxy import Proxy, open_proxy
from tests.faults.world import Fakes, Tell, open_world


async def test_primary_that_goes_away_and_comes_back_is_found_again(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    async with open_proxy(db.socket) as proxy:
        async with open_world(db, fakes, folder, url=lambda url: through(url, proxy.port)) as world:
            world.latency(100)
            async with world.load(100):
                for _ in range(1 if is_short else 3):
                    await world.received_more(300)
                    terms = len(world.cursors)
                    proxy.refuse()
                    await until(lambda: not any(instance.holds for instance in world.up))
                    await trio.sleep(2)
                    proxy.heal()
                    await until(lambda terms=terms: len(world.cursors) > terms)
                await world.received_more(300)
            report = await world.settle()
            assert report.outcomes == {"delivered": report.received}
            tell(report)


async def test_holder_cut_off_by_a_deaf_network_is_followed_by_another(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """The holder's connections stay open and nothing passes. Its trust in the lock must end before the lock does."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(open_proxy(db.socket)) for _ in range(2)]
        ports = iter(proxy.port for proxy in proxies)
        async with open_world(db, fakes, folder, url=lambda url: through(url, next(ports))) as world:
            world.latency(500)
            holder = await world.holder()
            (other,) = [each for each in world.up if each is not holder]
            (its_proxy,) = [proxy for proxy in proxies if f":{proxy.port}/" in holder.database_url]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.publish, 300)
                await world.received_more(rng.randrange(100, 600))
                its_proxy.go_deaf()
                await until(lambda: not holder.holds)
                assert not other.holds, "the old holder knows before there is a new one"
                await until(lambda: other.holds)
                world.latency(50)
                await world.dispatched()
                its_proxy.heal()
            report = await world.settle()
            assert report.terms == 2
            assert report.outcomes == {"delivered": report.received}
            tell(report)


async def test_slow_database_delays_and_repeats_nothing(db: DbProcess, fakes: Fakes, folder: Path, tell: Tell) -> None:
    """100 ms there and back for every statement, with a jolt of a second in between."""
    async with open_proxy(db.socket) as proxy:
        async with open_world(db, fakes, folder, url=lambda url: through(url, proxy.port)) as world:
            proxy.delay(0.05)
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
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    """Connections are reset under requests in flight, refused for a while, and go deaf. Outcomes are unknown then.

    A retry after such an attempt may repeat a push, up to max_attempts; each delivery ends in one counter all the same.
    """
    async with AsyncExitStack() as stack:
        proxies = {channel: await stack.enter_async_context(open_proxy(fake.port)) for channel, fake in fakes.items()}
        endpoints = {channel: {"endpoint": f"https://127.0.0.1:{proxy.port}"} for channel, proxy in proxies.items()}
        push = {"max_attempts": 10, "apns": endpoints[Channel.APNS], "fcm": endpoints[Channel.FCM]}
        hooks_port = proxies[Channel.HTTP].port
        async with open_world(db, fakes, folder, webhook_port=hooks_port, push=push) as world:
            world.latency(500)
            async with world.load(100):
                for _ in range(1 if is_short else 3):
                    for proxy in proxies.values():
                        await world.received_more(60)
                        proxy.cut()
                    await _bad_minute(proxies[Channel.APNS], deaf_s=2, refuse_s=2)
                    await _bad_minute(proxies[Channel.HTTP], deaf_s=2 if is_short else 12, refuse_s=2)
                    await world.received_more(60)
            report = await world.settle(attempts=10)
            assert report.terms == 1
            assert report.repeats > 0
            assert report.outcomes == {"delivered": report.pushes}
            tell(report)


async def _bad_minute(proxy: Proxy, *, deaf_s: float, refuse_s: float) -> None:
    proxy.go_deaf()
    await trio.sleep(deaf_s)
    proxy.refuse()
    proxy.heal()
    proxy.refuse()
    await trio.sleep(refuse_s)
    proxy.heal()
