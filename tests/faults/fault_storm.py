"""One fault after the other, at random, under load: three instances, each behind a proxy of its own."""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import trio

from tests.faults.cluster import DbProcess, through
from tests.faults.moments import locked
from tests.faults.proxy import Proxy, open_proxy
from tests.faults.world import Fakes, Instance, Tell, World, open_world

INSTANCES = 3
TABLES = ("envelopes", "push_subscription", "push_recipient", "push_cursor", "allocation_boundary")
KINDS = ("dispatcher", "loader", "primary", "tailer", "%")


class Storm:
    """What can go wrong, each as one call that leaves everything mended."""

    def __init__(self, world: World, proxies: list[Proxy], rng: random.Random) -> None:
        self._world = world
        self._proxies = proxies
        self._rng = rng
        self.history: list[str] = []

    async def blow(self, faults: int) -> None:
        """Let so many faults happen, one after the other, with a breath between them."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.kill,
            self.stop,
            self.freeze,
            self.freeze,
            self.terminate,
            self.terminate,
            self.lock,
            self.hang,
            self.network,
            self.network,
            self.restart_database,
            self.crash_database,
        ]
        for _ in range(faults):
            fault = self._rng.choice(kinds)
            self._note(fault.__name__)
            await fault()
            await self._world.received_more(self._rng.randrange(1, 150))

    def _any(self) -> Instance:
        """Some instance, the holder more often than not."""
        up = self._world.up
        holders = [instance for instance in up if instance.holds]
        instance = self._rng.choice(up + 3 * holders)
        self._note(f"  to {instance.pid}")
        return instance

    def _note(self, text: str) -> None:
        self.history.append(f"{datetime.now(UTC):%H:%M:%S.%f} {text}")

    def _proxy_of(self, instance: Instance) -> Proxy:
        return next(proxy for proxy in self._proxies if f":{proxy.port}/" in instance.database_url)

    async def _replace(self, instance: Instance, signum: signal.Signals) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(instance.end, signum)
            await self._world.start(url=instance.database_url)

    async def kill(self) -> None:
        await self._replace(self._any(), signal.SIGKILL)

    async def stop(self) -> None:
        await self._replace(self._any(), signal.SIGTERM)

    async def freeze(self) -> None:
        instance = self._any()
        instance.server.send_signal(signal.SIGSTOP)
        await trio.sleep(self._rng.choice([0.2, 1, 3, 5, 6]))
        instance.server.send_signal(signal.SIGCONT)

    async def terminate(self) -> None:
        self._world.terminate(self._rng.choice(KINDS), self._any().pid)

    async def lock(self) -> None:
        await self._hold(f"LOCK TABLE {self._rng.choice(TABLES)} IN ACCESS EXCLUSIVE MODE")

    async def hang(self) -> None:
        """Publishes to some topics stop between taking their ids and committing, perhaps until they run out of time."""
        await self._hold("SELECT 1 FROM topic_watermark LIMIT 2 FOR UPDATE")

    async def _hold(self, statement: str) -> None:
        """Keep the locks of a statement for some seconds."""
        async with locked(self._world, statement):
            await trio.sleep(self._rng.uniform(0.1, 6))

    async def network(self) -> None:
        proxy = self._proxy_of(self._any())
        kind, seconds = self._rng.choice(["cut", "refuse", "deaf", "slow"]), self._rng.choice([0.1, 1, 6])
        self._note(f"  {kind} for {seconds} s")
        match kind:
            case "cut":
                proxy.cut()
            case "refuse":
                proxy.refuse()
            case "deaf":
                proxy.go_deaf()
            case _:
                proxy.delay(self._rng.uniform(0.01, 0.3))
        await trio.sleep(seconds)
        proxy.heal()

    async def restart_database(self) -> None:
        self._world.close()
        await self._world.db.stop()
        await self._world.db.start()

    async def crash_database(self) -> None:
        self._world.close()
        await self._world.db.crash()
        await self._world.db.start()


async def test_storm_of_random_faults_leaves_a_balanced_account(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, is_short: bool, tell: Tell
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(open_proxy(db.socket)) for _ in range(INSTANCES)]
        ports = iter(proxy.port for proxy in proxies)
        async with open_world(
            db, fakes, folder, instances=INSTANCES, url=lambda url: through(url, next(ports)), within_s=3_600
        ) as world:
            world.latency(100)
            storm = Storm(world, proxies, rng)
            try:
                async with world.load(60):
                    await storm.blow(4 if is_short else 25)
                report = await world.settle()
            finally:
                print("\n".join(sorted([*storm.history, *world.terms()])))
            tell(report)
