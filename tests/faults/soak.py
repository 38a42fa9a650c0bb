"""Equal loads with rests between them, and whether every rest finds the same: `python -m tests.faults.soak [MINUTES]`.

Two instances on one database, three fakes. Under load messages are published, recipients come and go, others come
whose token is dead, some receivers are rate-limited or fail for ever, and streams are opened on connections of their
own, read and closed or cut. At a rest all of that is over, and only then small leaks show: under load a task more or
less means nothing. So at each rest

- the account of the load is balanced, and the database holds exactly the recipients that are alive;
- tasks, descriptors, sessions and connections are the very numbers of the first rest;
- what the interpreters hold (`inside/sitecustomize.py`) has not grown since the second rest, nor the resident memory.

One load is a few thousand recipients, streams and tokens and some ten thousand deliveries, so that one object kept for
each of them is thousands of objects at the next rest; a longer run has more loads, not longer ones.

Tells of each rest on standard error and prints one JSON line last; the exit code says whether all was in order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, field, frozen

from fakes.launch import launch
from pushd.model import RETAINED_DELIVERIES, Channel
from pushd.rpc.client import ClientCall, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Cursor, Topic, TopicQuery
from tests.faults.cluster import running_db, until
from tests.faults.ledger import Push, Row, Subscriber, expected_pushes, own_pushes
from tests.faults.moments import locked
from tests.faults.proxy import Proxy, open_proxy
from tests.faults.world import Device, Fakes, Instance, World, make_devices, open_world

ROWS_PER_S = 20.0
CHURN_PER_S = 20.0
DEAD_PER_S = 10.0
STREAMS_PER_S = 10.0
WORKERS = 5  # of each kind of load
LIVING = 10  # recipients that come and go, alive at any one time
READ_S = 0.3  # that a stream is read on after its first envelope
ABORTED = 4  # one stream in so many is cut instead of closed
QUOTA_S = 20.0  # at the start of a load, for which FCM refuses one device; its retries come a minute later
SAMPLE_S = 5.0

WARM_UP_S = 40.0
LOAD_S = 150.0  # about; the run is cut into loads of equal length
REST_S = 30.0  # about, of the time of a run
LEVEL_S = 50.0  # until connections are seen as gone; FCM's own would be closed after a minute without a push
SETTLE_S = 240.0  # a quota's two retries

MAX_ATTEMPTS = 3
MAX_SESSIONS = 8  # of an instance's pool; a burst opens all of them before the first rest
# Of the work that a load ought to come to, for the run to say anything.
ENOUGH = 0.5
RATES = {"rows": ROWS_PER_S, "recipients": CHURN_PER_S, "dead tokens": DEAD_PER_S, "streams": STREAMS_PER_S}
# What may be more at the last rest than at the second one, however many loads lie between. Equal rests differ by less
# than a hundred blocks and some ten KiB; one block for each stream of an instance comes to seven hundred in one load.
SPARE_BLOCKS = 600.0
SPARE_KIB = 256.0
# Pages, with what is free in them: they move by a few MiB with what comes together.
SPARE_RSS_MIB = 8.0

_SUBSCRIBE = "/xmtp.backend.v1.SubscriptionService/Subscribe"
_INSIDE = Path(__file__).parent / "inside"


# What is looked at


@frozen
class Vitals:
    """One instance at rest.

    Attributes:
        descriptors: without those of its database sessions.
        connections: from gRPC clients.
        calls: being served.
        topics: followed by streams.
        sessions: on the database, by purpose.
        blocks, malloc_kib: see `inside/sitecustomize.py`.
        types: how many objects there are of each type.
    """

    tasks: float
    descriptors: float
    connections: float
    sessions: Mapping[str, int] = field(repr=False)
    calls: float = 0.0
    topics: float = 0.0
    rss_mib: float = 0.0
    blocks: float = 0.0
    malloc_kib: float = 0.0
    types: Mapping[str, int] = field(factory=dict, repr=False)

    @property
    def level(self) -> dict[str, float]:
        """What has to be the same at each rest."""
        return {
            "tasks": self.tasks,
            "descriptors": self.descriptors,
            "gRPC connections": self.connections,
            "calls": self.calls,
            "topics of streams": self.topics,
        }


@frozen
class Rest:
    """All of it at rest.

    Attributes:
        providers: open connections at each fake.
    """

    instances: Sequence[Vitals]
    providers: Mapping[str, float]

    @property
    def level(self) -> tuple[object, ...]:
        return (*(each.level for each in self.instances), self.providers)


@frozen
class Work:
    """What one load came to.

    Attributes:
        due: the rows of it.
        healthy: subscriptions whose device took every push.
        limited: subscriptions whose device refused pushes.
        passing: devices that came and went.
        dead: devices whose token was dead.
        arrived: pushes at the fakes, with how often each came.
        retained: most deliveries retained at one time ...
        waiting: ... and those still retained at its end.
        stored: recipients in the database at its end.
        living: recipients that were not deleted by then.
    """

    seconds: float
    due: Mapping[int, Row] = field(repr=False)
    healthy: Sequence[Subscriber] = field(repr=False)
    limited: Sequence[Subscriber] = field(repr=False)
    passing: Sequence[Device] = field(repr=False)
    dead: Sequence[Device] = field(repr=False)
    arrived: Counter[Push] = field(repr=False)
    stored: Collection[bytes] = field(repr=False)
    living: Collection[bytes] = field(repr=False)
    streams: int = 0
    retained: float = 0.0
    waiting: float = 0.0

    @property
    def totals(self) -> dict[str, int]:
        """How much was done."""
        return {
            "rows": len(self.due),
            "pushes": self.arrived.total(),
            "recipients": len(self.passing),
            "dead tokens": len(self.dead),
            "streams": self.streams,
        }


# Judgement


def judge_work(work: Work) -> list[str]:
    """What one load shows to be wrong."""
    found = []
    for name, rate in RATES.items():
        if work.totals[name] < ENOUGH * rate * work.seconds:
            found.append(f"too little was done to tell anything: {work.totals[name]} {name} in {work.seconds:.0f} s")
    if missing := set(work.living) - set(work.stored):
        found.append(f"{len(missing)} recipients are gone that nobody deleted")
    if left := set(work.stored) - set(work.living):
        dead = {device.recipient_id for device in work.dead}
        found.append(f"{len(left)} recipients are left over, {len(left & dead)} of them with dead tokens")
    if work.retained > RETAINED_DELIVERIES:
        found.append(f"{work.retained:g} deliveries were retained at one time")
    if work.waiting:
        found.append(f"{work.waiting:g} deliveries still wait or are in flight")
    return found + balance(work)


def judge_totals(
    outcomes: Mapping[str, int], *, taken: int, refused: int, own: int, deleted: float, dead: int
) -> list[str]:
    """What the product counted otherwise than the fakes did, over all loads.

    Args:
        outcomes: of the product's deliveries.
        taken: pushes the fakes took.
        refused: pushes due to devices that refused them, who took some in the end.
        own: pushes that would have told a device of its own message.
        deleted: recipients the product deleted as dead.
        dead: tokens that were.
    """
    found = []
    if outcomes.get("delivered", 0) != taken:
        found.append(f"{outcomes.get('delivered', 0)} deliveries counted, {taken} taken by the fakes")
    if outcomes.get("failed", 0) > refused:
        found.append(f"{outcomes['failed']} deliveries failed, {refused} were refused")
    if outcomes.get("suppressed", 0) != own:
        found.append(f"{outcomes.get('suppressed', 0)} deliveries suppressed, {own} were of one's own messages")
    known = ("delivered", "failed", "dead", "suppressed")
    if others := {name: count for name, count in outcomes.items() if name not in known}:
        found.append(f"deliveries ended otherwise: {others}")
    if deleted != dead:
        found.append(f"{deleted:g} recipients deleted as dead, {dead} tokens were")
    return found


def balance(work: Work) -> list[str]:
    """What is wrong with the account of one load's pushes."""
    found = []
    healthy = expected_pushes(work.due, work.healthy)
    limited = expected_pushes(work.due, work.limited)
    passing = {device.name: device for device in work.passing}
    dead = {device.name: device for device in work.dead}
    if lost := (healthy | limited) - work.arrived.keys():
        found.append(f"{len(lost)} pushes lost, rows {sorted({row for _, row in lost})[:5]}")
    invented = 0
    repeated = 0
    for push, count in work.arrived.items():
        device, number = push
        if push not in healthy and push not in limited:
            coming = passing.get(device) or dead.get(device)
            row = work.due.get(number)
            if coming is None or row is None or not row.eligible or (row.commit and not coming.commits):
                invented += 1
        allowed = MAX_ATTEMPTS if push in limited or device in dead else 1
        repeated += count > allowed
    if invented:
        found.append(f"{invented} pushes that nobody asked for")
    if repeated:
        found.append(f"{repeated} pushes repeated")
    if untold := dead.keys() - {device for device, _ in work.arrived}:
        found.append(f"{len(untold)} dead tokens never tried")
    return found


def judge_levels(rests: Sequence[Rest]) -> list[str]:
    """What the last rest has more or less of than the first, and sessions that should not be there at any of them."""
    found = []
    first, last = rests[0], rests[-1]
    for number, (before, after) in enumerate(zip(first.instances, last.instances, strict=True), 1):
        for name, level in after.level.items():
            if level != before.level[name]:
                found.append(f"instance {number}: {name} at rest went from {before.level[name]:g} to {level:g}")
    for name, count in last.providers.items():
        expected = 0 if name == Channel.HTTP.label else first.providers[name]  # those to webhooks are not kept
        if count != expected:
            found.append(f"{count:g} connections to {name} at rest instead of {expected:g}")
    for rest in rests:
        found += [each for each in _judge_sessions(rest) if each not in found]
    return found


def _judge_sessions(rest: Rest) -> list[str]:
    found = []
    for number, instance in enumerate(rest.instances, 1):
        sessions = dict(instance.sessions)
        pooled = sessions.pop("primary", 0)
        if pooled > MAX_SESSIONS:
            found.append(f"instance {number}: {pooled} sessions of a pool of {MAX_SESSIONS}")
        sessions.pop("loader", None)
        if sessions != {"dispatcher": 1, "tailer": 1}:
            found.append(f"instance {number}: sessions {sessions} instead of a dispatcher's and a tailer's")
    loaders = sum(instance.sessions.get("loader", 0) for instance in rest.instances)
    if loaders != 1:
        found.append(f"{loaders} sessions load pages")
    return found


def judge_memory(rests: Sequence[Rest]) -> list[str]:
    """What has grown since the second rest; the first one is before lazy things were all made."""
    found: list[str] = []
    if len(rests) < 3:
        return found
    for number, (before, after) in enumerate(zip(rests[1].instances, rests[-1].instances, strict=True), 1):
        who = f"instance {number}"
        if after.blocks > before.blocks + SPARE_BLOCKS:
            grown = Counter(after.types)
            grown.subtract(before.types)
            most = ", ".join(f"{count} {name}" for name, count in grown.most_common(5) if count > 0)
            found.append(f"{who}: {after.blocks - before.blocks:g} more blocks; of objects {most or 'nothing'}")
        if after.malloc_kib > before.malloc_kib + SPARE_KIB:
            found.append(f"{who}: {after.malloc_kib - before.malloc_kib:.0f} KiB more taken by malloc")
        if after.rss_mib > before.rss_mib + SPARE_RSS_MIB:
            found.append(f"{who}: resident memory grew by {after.rss_mib - before.rss_mib:.1f} MiB")
    return found


# The run


class Soak:
    """Load and rests of one run."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._healthy = list(world.devices)
        self._limited: list[Device] = []
        self._living: dict[bytes, None] = {device.recipient_id: None for device in world.devices}
        self._hooks: set[str] = set()
        self._passing: list[Device] = []
        self._dead: list[Device] = []
        self._streams = 0
        self._retained = 0.0
        self._counted = 0
        self._answers: Counter[str] = Counter()
        self._tokens_dead = 0
        self._refused = 0
        self._own = 0
        self.peak_rss_mib = 0.0

    async def prepare(self) -> None:
        """Register those who stay, and have the pools open all their sessions."""
        self._limited = [device for channel in Channel for device in self._make(channel, 1)]
        await self._register(self._limited)

        async def is_open() -> bool:
            async with (
                trio.open_nursery() as nursery,
                locked(self._world, "LOCK TABLE envelopes IN ACCESS EXCLUSIVE MODE"),
            ):
                for _ in range(MAX_SESSIONS * 6):  # they meet before the lock
                    nursery.start_soon(self._world.publish, 1)
                await trio.sleep(0.4)
            return all(self._sessions(each).get("primary") == MAX_SESSIONS for each in self._world.instances)

        await until(is_open)

    async def load(self, seconds: float) -> Work:
        """Load for so long, and wait until all of it is done."""
        world = self._world
        self._passing, self._dead, self._streams, self._retained = [], [], 0, 0.0
        self._ends_at = trio.current_time() + seconds
        async with world.load(ROWS_PER_S), AsyncExitStack() as stack:
            proxies = [
                [await stack.enter_async_context(open_proxy(each.server.grpc_port)) for each in world.instances]
                for _ in range(WORKERS)
            ]
            async with trio.open_nursery() as nursery:  # its tasks end by themselves when it is time
                nursery.start_soon(self._limit, seconds)
                nursery.start_soon(self._watch)
                for own in proxies:
                    nursery.start_soon(self._follow, own)
                    nursery.start_soon(self._churn)
                    nursery.start_soon(self._bury)
        await world.publish(40)  # so that something is due for every token
        await world.dispatched()
        with suppress(trio.TooSlowError):  # what is not done then is found by the judgement
            await until(self._is_done, SETTLE_S)
        rows = dict(itertools.islice(world.rows.items(), self._counted, None))
        self._counted = len(world.rows)
        self._tokens_dead += len(self._dead)
        work = Work(
            seconds,
            rows,
            self._subscribers(self._healthy),
            self._subscribers(self._limited),
            self._passing,
            self._dead,
            await world.arrived(),
            stored=self._stored(),
            living=set(self._living),
            streams=self._streams,
            retained=self._retained,
            waiting=sum([await self._waiting(each) for each in world.instances]),
        )
        self._refused += len(expected_pushes(rows, work.limited))
        self._own += len(own_pushes(rows, work.healthy))
        for channel in Channel:
            self._answers.update((await world.statistics(channel))["statuses"])
            world.fakes[channel].tell("/reset")
        world.latency(50)
        return work

    async def rest(self, like: Rest | None) -> Rest:
        """Look once everything is as it was at the rest `like`, or has had the time for that.

        The first time nobody knows what to wait for: then until it is the same four times in a row.
        """
        looks: list[Rest] = []
        with trio.move_on_after(LEVEL_S):
            while not _is_level(looks, like):
                await trio.sleep(2 if looks else 0)
                looks.append(await self._look())
        found = looks[-1]
        inside = [await self._look_inside(each) for each in self._world.instances]
        return Rest([evolve(each, **more) for each, more in zip(found.instances, inside, strict=True)], found.providers)

    async def totals(self) -> list[str]:
        """Compare the counters with the fakes', over all loads."""
        name = 'xmtp_push_recipients_total{action="dead"}'
        deleted = sum([(await each.metrics())[name] for each in self._world.instances])
        taken = self._answers["200"] + self._answers["204"]
        return judge_totals(
            await self._world.outcomes(),
            taken=taken,
            refused=self._refused,
            own=self._own,
            deleted=deleted,
            dead=self._tokens_dead,
        )

    # Recipients

    def _make(self, channel: Channel, count: int) -> list[Device]:
        """New devices; no two webhooks share a path, by which the receiver is told what to answer."""
        made: list[Device] = []
        while len(made) < count:
            (device,) = make_devices(1, [channel])
            if _hook(device) not in self._hooks:
                self._hooks.add(_hook(device))
                made.append(device)
        return made

    async def _register(self, devices: Sequence[Device]) -> None:
        await self._world.register(devices)
        self._living.update((device.recipient_id, None) for device in devices)

    async def _unregister(self, device: Device) -> None:
        await self._world.unregister(device)
        del self._living[device.recipient_id]

    def _stored(self) -> set[bytes]:
        return {bytes(row[0]) for row in self._world.ask("SELECT recipient_id FROM push_recipient")}

    def _subscribers(self, devices: Iterable[Device]) -> list[Subscriber]:
        return [Subscriber(device.name, topic, device.commits) for device in devices for topic in self._world.topics]

    # Looking

    async def _look(self) -> Rest:
        instances = []
        for each in self._world.instances:
            measured = await each.metrics()
            sessions = self._sessions(each)
            instances.append(
                Vitals(
                    tasks=measured["pushd_tasks"],
                    descriptors=measured["process_open_fds"] - sum(sessions.values()),
                    connections=measured["grpc_server_connections"],
                    sessions=sessions,
                    calls=sum(value for name, value in measured.items() if name.startswith("grpc_server_in_flight{")),
                    topics=measured["xmtp_stream_topics_registered"],
                    rss_mib=measured["process_resident_memory_bytes"] / 2**20,
                )
            )
        providers = {}
        for channel in Channel:
            told = await self._world.statistics(channel)
            providers[channel.label] = told["open" if channel is Channel.HTTP else "connections_open"]
        return Rest(instances, providers)

    async def _look_inside(self, instance: Instance) -> dict[str, Any]:
        path = self._folder / str(instance.pid)
        instance.server.send_signal(signal.SIGUSR1)
        await until(path.exists)
        told = json.loads(path.read_text())
        path.unlink()
        assert "error" not in told, told["error"]
        return {"blocks": told["blocks"], "malloc_kib": told["malloc_bytes"] / 2**10, "types": told["types"]}

    def _sessions(self, instance: Instance) -> dict[str, int]:
        statement = """
            SELECT split_part(application_name, ' ', 2), count(*)
            FROM pg_stat_activity WHERE application_name LIKE %s GROUP BY 1
        """
        return dict(self._world.ask(statement, f"pushd % %:{instance.pid}"))

    async def _waiting(self, instance: Instance) -> float:
        """Deliveries an instance holds, whether they wait or are in flight."""
        measured = await instance.metrics()
        flying = [measured[f'pushd_push_in_flight{{channel="{channel.label}"}}'] for channel in Channel]
        return measured["pushd_push_retained"] + sum(flying)

    async def _is_done(self) -> bool:
        """Nothing waits for an attempt, none is being made, and whoever should be gone is."""
        if any([await self._waiting(each) for each in self._world.instances]):
            return False
        return len(self._stored()) <= len(self._living)

    async def _watch(self) -> None:
        async for _ in self._turns(SAMPLE_S):
            measured = [await each.metrics() for each in self._world.instances]
            self._retained = max(self._retained, sum(each["pushd_push_retained"] for each in measured))
            rss = max(each["process_resident_memory_bytes"] for each in measured)
            self.peak_rss_mib = max(self.peak_rss_mib, rss / 2**20)

    # Load

    async def _turns(self, pause_s: float) -> AsyncIterator[None]:
        """At fixed distances until the load ends; late ones follow at once."""
        due = trio.current_time()
        while due < self._ends_at:
            await trio.sleep_until(due)
            yield
            due += pause_s

    async def _churn(self) -> None:
        """One recipient comes, and the oldest goes."""
        living: deque[Device] = deque()
        channels = itertools.cycle(Channel)
        async for _ in self._turns(WORKERS / CHURN_PER_S):
            (coming,) = self._make(next(channels), 1)
            self._passing.append(coming)
            await self._register([coming])
            living.append(coming)
            if len(living) > LIVING / WORKERS:
                await self._unregister(living.popleft())
        for device in living:
            await self._unregister(device)

    async def _bury(self) -> None:
        """A recipient comes whose token is dead; the first push to it ends it."""
        channels = itertools.cycle(Channel)
        async for _ in self._turns(WORKERS / DEAD_PER_S):
            channel = next(channels)
            (device,) = self._make(channel, 1)
            # A webhook is dead when it said so at every attempt; meanwhile it is told of all that comes.
            answers: dict[Channel, tuple[dict[str, Any], int]] = {
                Channel.APNS: ({"status": 410, "reason": "Unregistered"}, 100),
                Channel.FCM: ({"status": 404, "code": "UNREGISTERED"}, 100),
                Channel.HTTP: ({"status": 410}, 400),
            }
            answer, count = answers[channel]
            await self._script(device, *[answer] * count)
            self._dead.append(device)
            await self._world.register([device])

    async def _limit(self, seconds: float) -> None:
        """One device is told to wait again and again, one has used up its quota, and one webhook always fails."""
        apns, fcm, hook = self._limited
        await self._script(fcm, *[{"status": 429}] * 2_000)
        freed_at = trio.current_time() + min(QUOTA_S, 0.15 * seconds)
        async for _ in self._turns(1.0):
            await self._script(apns, *[{"status": 429}] * 300)
            await self._script(hook, *[{"status": 503}] * 300)
            if trio.current_time() > freed_at:
                await self._script(fcm)

    async def _follow(self, proxies: Sequence[Proxy]) -> None:
        """Connect, open a stream a little behind the newest message, read on for a while, and close or cut it."""
        turn = itertools.count()
        async for _ in self._turns(WORKERS / STREAMS_PER_S):
            number = next(turn)
            proxy = proxies[number % len(proxies)]
            instance = self._world.instances[number % len(proxies)]
            is_cut = number // len(proxies) % ABORTED == 0
            async with open_channel("127.0.0.1", proxy.port if is_cut else instance.server.grpc_port) as channel:
                async with channel.stream(_SUBSCRIBE, wire.SubscribeResponse, deadline_s=math.inf) as call:
                    since = Cursor(sequence_id=max(0, max(self._world.rows) - 40))
                    adds = [TopicQuery(topic=Topic(topic=topic), cursor=since) for topic in self._world.topics]
                    await call.send(wire.SubscribeRequest(update=wire.SubscribeRequest.Update(id=1, adds=adds)))
                    await self._read(call)
                    if is_cut:
                        proxy.cut()
                    else:
                        with trio.move_on_after(READ_S):
                            while True:
                                await self._read(call)
            self._streams += 1

    async def _read(self, call: ClientCall[wire.SubscribeResponse]) -> None:
        """Read until an envelope has come."""
        with trio.fail_after(30):
            async for answer in call:
                if answer.messages.envelopes:
                    return
        raise AssertionError("a stream ended by itself")

    async def _script(self, device: Device, *answers: dict[str, Any]) -> None:
        token = _hook(device) if device.channel is Channel.HTTP else device.name
        script = partial(self._world.fakes[device.channel].script, token, *answers)
        await trio.to_thread.run_sync(script)


def _is_level(looks: Sequence[Rest], like: Rest | None) -> bool:
    """Whether the newest look is like that rest; without one, whether idle connections closed and nothing moves."""
    if like is not None:
        return bool(looks) and looks[-1].level == like.level
    last = looks[-4:]
    closed = not any(each.providers[Channel.HTTP.label] for each in last)
    return len(last) == 4 and closed and all(each.level == last[0].level for each in last)


def _hook(device: Device) -> str:
    """The path of a webhook's URL, as `World.register` makes it."""
    return f"/hooks/{device.name[:8]}"


async def soak(fakes: Fakes, folder: Path, minutes: float) -> dict[str, object]:
    """Run it; the JSON line."""
    loads = max(3, round((minutes * 60 - WARM_UP_S - REST_S) / (LOAD_S + REST_S)))
    seconds = max(10.0, (minutes * 60 - WARM_UP_S - REST_S) / loads - REST_S)
    (folder / "inside").mkdir()
    path = os.pathsep.join(filter(None, [str(_INSIDE), os.environ.get("PYTHONPATH")]))
    environ = {"PYTHONPATH": path, "PUSHD_SOAK_INSIDE": str(folder / "inside")}
    found: list[str] = []
    rests: list[Rest] = []
    done: Counter[str] = Counter()
    retained = 0.0
    with running_db(folder / "db") as db:
        async with open_world(
            db,
            fakes,
            folder,
            instances=2,
            environ=environ,
            within_s=600 + 180 * minutes,
            database={"max_connections": MAX_SESSIONS},
        ) as world:
            run = Soak(world, folder / "inside")
            await world.holder()
            world.latency(50)
            await run.prepare()
            for turn in range(loads + 1):
                work = await run.load(seconds if turn else WARM_UP_S)
                rests.append(await run.rest(rests[0] if rests else None))
                found += [f"load {turn}: {each}" for each in judge_work(work)]
                done.update(work.totals)
                retained = max(retained, work.retained)
                print(_line(work, rests[-1]), file=sys.stderr, flush=True)
                if found:
                    break  # it would be no better after the next one
            found += judge_levels(rests) + judge_memory(rests) + await run.totals()
            world.check_logs()
            if len(world.cursors) != 1:
                found.append(f"the lock changed hands: {len(world.cursors)} terms")
            outcomes = dict(sorted((await world.outcomes()).items()))
    return {
        "name": "soak",
        "ok": not found,
        "found": found,
        "minutes": minutes,
        "loads": loads,
        "load_s": round(seconds),
        **done,
        "deliveries": outcomes,
        "calls_repeated": world.repeated,
        "retained_peak": retained,
        "rss_peak_mib": round(run.peak_rss_mib, 1),
        "at_rest": [
            {
                name: [round(getattr(rest.instances[number], name), 1) for rest in rests]
                for name in ("tasks", "descriptors", "connections", "rss_mib", "blocks", "malloc_kib")
            }
            for number in range(len(rests[0].instances))
        ],
    }


def _line(work: Work, rest: Rest) -> str:
    done = ", ".join(f"{count} {name}" for name, count in work.totals.items())
    instances = " | ".join(
        f"{each.tasks:g} tasks, {each.descriptors:g} descriptors, {each.connections:g} connections, "
        f"{each.rss_mib:.1f} MiB, {each.blocks:g} blocks, {each.malloc_kib:.0f} KiB"
        for each in rest.instances
    )
    return f"{work.seconds:.0f} s: {done}; at rest {instances}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    folder = Path(tempfile.mkdtemp(prefix="pushd-"))
    try:
        with ExitStack() as stack:
            names = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
            fakes = {
                channel: stack.enter_context(launch(name, "--record", "10000000")) for channel, name in names.items()
            }
            result = trio.run(soak, fakes, folder, minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
