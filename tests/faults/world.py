"""An installation under load: several `pushd serve` on one database, three fake providers, publishers, and the account.

    async with open_world(db, fakes, folder, instances=2) as world:
        async with world.load():
            ...break something...
        report = await world.settle()

Everything is a process of its own. Publishers go round the instances and repeat what was not acknowledged; a message is
known by its hash, so a repeat stores nothing new. `settle` waits for the end of all work and balances the account.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import trio
from attrs import evolve, field, frozen

from fakes.launch import RunningFake
from pushd.errors import Code, StatusError
from pushd.model import Channel
from pushd.rpc.client import ChannelSettings, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope
from tests.faults.cluster import DbProcess, until
from tests.faults.instance import Instance as Instance
from tests.faults.instance import Outcome
from tests.faults.judge import Report, arrival_of, by_outcome, complaints, miscounted
from tests.faults.judge import Tell as Tell
from tests.faults.ledger import Arrival, Ledger, Push, Row, Subscriber, Term, expected_pushes, own_pushes
from tests.faults.watch import CursorWatch
from tests.support.envelopes import APPLICATION, COMMIT, group_envelope, private_message
from tests.support.server import base_config, running_server

TOPICS = 4
DEVICES_PER_CHANNEL = 3
WORKERS = 4  # publishers
SETTLE_S = 120.0
CALL_S = 180.0  # of one call with all its repeats; no fault lasts nearly as long
RUN_S = 900.0
EPOCH_S = 30 * 86_400  # of which a subscription brings three keys
KEY_BYTES = 42
_SERVICE = "/xmtp.backend.v1."
# What a client repeats (gRPC's meaning of the two); anything else is a defect here.
_REPEATED = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED}
_CHANNEL = ChannelSettings(connect_s=2.0, idle_s=2.0, ping_s=2.0, backoff_min_s=0.1, backoff_max_s=0.5)

Fakes = Mapping[Channel, RunningFake]


@frozen
class Device:
    """A recipient."""

    name: str
    channel: Channel
    recipient_id: bytes = field(repr=False)
    secret: bytes = field(repr=False)
    commits: bool = False
    key: bytes = field(default=b"", repr=False)
    """With which its owner tags what they send, and which keeps that from coming back to them."""
    topics: int = TOPICS
    """How many topics it follows, the first ones."""


def make_devices(per_channel: int, channels: Iterable[Channel] = Channel) -> list[Device]:
    """So many recipients on each channel; every other one also wants commits."""
    devices = []
    for channel, number in itertools.product(channels, range(per_channel)):
        recipient_id = secrets.token_bytes(32)
        name = recipient_id.hex() if channel is Channel.HTTP else hashlib.sha256(recipient_id).hexdigest()
        devices.append(Device(name, channel, recipient_id, secrets.token_bytes(32), commits=number % 2 == 1))
    return devices


class World:
    """See the module."""

    def __init__(
        self,
        nursery: trio.Nursery,
        db: DbProcess,
        url: str,
        fakes: Fakes,
        folder: Path,
        environ: Mapping[str, str],
        tables: Mapping[str, Any],
    ) -> None:
        self.db = db
        self.url = url
        self.fakes = fakes
        self.instances: list[Instance] = []
        self.devices: list[Device] = []
        self.topics = [b"\0" + secrets.token_bytes(16) for _ in range(TOPICS)]
        self.rows: dict[int, Row] = {}
        self.repeated = 0
        """Publishes that had to be repeated."""
        self.deleted: set[str] = set()
        """Devices whose recipients were deleted on the way: what arrives for them is tolerated, nothing is due."""
        self.since: dict[str, int] = {}
        """Start positions other than 0."""
        self.until: dict[str, int] = {}
        """Above which row nothing may arrive for a deleted device. Set on deletion, and to be set anew where pages are
        read from a replica that shows it later."""
        self.refused = 0
        """Requests that a fake was told to refuse."""
        self.watch = CursorWatch(url)
        self._rng = random.Random(random.random())
        self._nursery = nursery
        self._session: psycopg.Connection[Any] | None = None
        self._folder = folder
        self._numbers = itertools.count(1)
        self._environ = dict(environ)
        self._tables = dict(tables)

    # Instances

    async def start(
        self, *, url: str | None = None, environ: Mapping[str, str] | None = None, **tables: Any
    ) -> Instance:
        """One more instance; `tables` change its configuration."""
        name = f"instance{next(self._numbers)}"
        document = self.configuration(url or self.url, **{**self._tables, **tables})
        # APNs is told it with each push, and so the account knows who sent what.
        bundle_id = document["push"]["apns"]["bundle_id"] = f"org.example.faults.{name}"
        folder = self._folder / name
        running = running_server(folder, document, environ={**self._environ, **(environ or {})})

        async def host(*, task_status: trio.TaskStatus[Instance]) -> None:
            async with running as server, open_channel("127.0.0.1", server.grpc_port, settings=_CHANNEL) as channel:
                started = Instance(server, channel, document["database"]["url"], folder / "pushd.toml", bundle_id)
                task_status.started(started)
                await trio.sleep_forever()

        instance: Instance = await self._nursery.start(host)
        self.instances.append(instance)
        return instance

    def configuration(self, url: str, **tables: Any) -> dict[str, Any]:
        """For an instance with every channel led to its fake."""
        apns, fcm, hooks = (self.fakes[channel] for channel in Channel)
        document = base_config(
            database={"url": url},
            server={"request_logger": False},
            push={
                "apns": {
                    "key": Path(apns.facts["key"]).read_text(),
                    "key_id": apns.facts["key_id"],
                    "team_id": apns.facts["team_id"],
                    "bundle_id": "org.example.faults",
                    "environment": "sandbox",
                    "endpoint": apns.endpoint,
                    "ca_file": str(apns.ca),
                },
                "fcm": {
                    "service_account": Path(fcm.facts["service_account"]).read_text(),
                    "endpoint": fcm.endpoint,
                    "ca_file": str(fcm.ca),
                },
                "http": {"allow_private_addresses": True, "ca_file": str(hooks.ca)},
            },
        )
        for name, table in tables.items():
            merged = document.setdefault(name, {})
            for key, value in table.items():
                merged[key] = {**merged[key], **value} if isinstance(merged.get(key), dict) else value
        return document

    @property
    def up(self) -> list[Instance]:
        """The instances that were not ended."""
        return [instance for instance in self.instances if instance.is_up]

    async def holder(self) -> Instance:
        """The instance that dispatches, once there is one."""
        await until(lambda: sum(instance.holds for instance in self.up) == 1)
        return next(instance for instance in self.up if instance.holds)

    @property
    def cursors(self) -> tuple[int, ...]:
        """Where the terms of all instances began, in the order in which they began."""
        started = [event for each in self.instances for event in each.terms if event["event"] == "term_started"]
        return tuple(event["cursor"] for event in sorted(started, key=lambda event: str(event["timestamp"])))

    def terms(self) -> list[str]:
        """What the instances said about their terms, time first; for people who look into a failure."""
        return [
            f"{event['timestamp'][11:26]} {instance.pid} {event['event']} cursor={event['cursor']}"
            f" {event.get('reason', '')} {event.get('discarded', '')}"
            for instance in self.instances
            for event in instance.terms
        ]

    # Recipients

    async def register(self, devices: Iterable[Device], *, port: int | None = None) -> None:
        """Register and subscribe each to its topics. `port` is a proxy's, for webhooks."""
        for device in devices:
            identity: dict[str, Any] = {"recipient_id": device.recipient_id, "recipient_secret": device.secret}
            request = wire.RegisterRequest(**identity)
            match device.channel:
                case Channel.APNS:
                    request.apns.token = device.name
                case Channel.FCM:
                    request.fcm.token = device.name
                case Channel.HTTP:
                    hooks = self.fakes[Channel.HTTP]
                    request.http.url = f"https://localhost:{port or hooks.port}/hooks/{device.name[:8]}"
                    request.http.signing_key = device.secret
                    hooks.tell("/keys", {device.recipient_id.hex(): base64.b64encode(device.secret).decode()})
            keys: dict[str, Any] = {}
            if device.key:  # in the epochs before, now and next
                keys = {"hmac_epoch_base": int(time.time()) // EPOCH_S - 1, "hmac_keys": [device.key] * 3}
            adds = [
                wire.Subscription(topic=topic, include_commits=device.commits, **keys)
                for topic in self.topics[: device.topics]
            ]
            update = wire.UpdateSubscriptionsRequest(**identity, adds=adds)
            await self.call("NotificationService/Register", request, wire.RecipientState)
            await self.call("NotificationService/UpdateSubscriptions", update, wire.RecipientState)
            self.devices.append(device)

    async def unregister(self, device: Device) -> None:
        request = wire.UnregisterRequest(recipient_id=device.recipient_id, recipient_secret=device.secret)
        await self.call("NotificationService/Unregister", request, wire.UnregisterResponse, done=Code.NOT_FOUND)
        self.deleted.add(device.name)
        self.until[device.name] = self.ask("SELECT last_value FROM envelope_sequence")[0][0]

    async def call(
        self, method: str, request: Any, response: Any, deadline_s: float = 5.0, *, done: Code | None = None
    ) -> Any:
        """Call some instance, and another one until it worked.

        Args:
            done: what answers a repeated call when an earlier one, whose answer was lost, has worked.
        """
        last: StatusError | None = None
        with trio.move_on_after(CALL_S):
            for turn in itertools.count(self._rng.randrange(100)):
                if up := self.up:
                    channel = up[turn % len(up)].channel
                    try:
                        return await channel.unary(f"{_SERVICE}{method}", request, response, deadline_s=deadline_s)
                    except StatusError as error:
                        if done is not None and last is not None and error.code is done:
                            return response()
                        if error.code not in _REPEATED:
                            raise AssertionError(f"{method} answered {error}") from error
                        last = error
                    self.repeated += 1
                await trio.sleep(0.05)
        raise AssertionError(f"{method} did not work for {CALL_S} s on any of {len(self.up)} instances: {last}")

    # Load

    async def publish(self, count: int, *, batch: int = 4, pause_s: float = 0.0) -> None:
        """Publish `count` messages of all kinds to all topics, some at a time."""
        messages = iter([self._message(number) for number in range(count)])

        async def worker() -> None:
            while chunk := list(itertools.islice(messages, batch)):
                await self._publish(chunk)
                await trio.sleep(pause_s)

        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(worker)

    @asynccontextmanager
    async def load(self, rate_per_s: float = 100.0, batch: int = 2) -> AsyncIterator[None]:
        """Publish steadily for the length of the block; everything begun is acknowledged at its end."""
        stop = trio.Event()
        pause_s = WORKERS * batch / rate_per_s

        async def worker(first: int) -> None:
            for number in itertools.count(first, WORKERS * batch):
                if stop.is_set():
                    return
                await self._publish([self._message(number + offset) for offset in range(batch)])
                with trio.move_on_after(self._rng.uniform(0.5, 1.5) * pause_s):
                    await stop.wait()

        async with trio.open_nursery() as nursery:
            for first in range(WORKERS):
                nursery.start_soon(worker, first * batch)
            yield
            stop.set()

    def _message(self, number: int) -> tuple[ClientEnvelope, Row]:
        topic = self.topics[number % TOPICS]
        kind = COMMIT if number % 10 == 3 else APPLICATION
        quiet = number % 10 == 7
        data = private_message(topic[1:], kind, ciphertext=secrets.token_bytes(16))
        author = next((device for device in self.devices if device.key), None) if number % 5 == 3 else None
        tag = hmac.digest(author.key, data, "sha256") if author else b""
        # A commit is pushed whatever its sender said about it (PUSH-030).
        envelope = group_envelope(data=data, should_push=not quiet and kind == APPLICATION, sender_hmac=tag)
        return envelope, Row(topic, eligible=not quiet, commit=kind == COMMIT, author=author.name if author else "")

    async def _publish(self, messages: Sequence[tuple[ClientEnvelope, Row]]) -> None:
        request = publish_pb2.PublishRequest(envelopes=[envelope for envelope, _ in messages])
        answer = await self.call("PublishService/Publish", request, publish_pb2.PublishResponse)
        for meta, (_, row) in zip(answer.envelope_metas, messages, strict=True):
            assert meta.cursor.sequence_id not in self.rows
            self.rows[meta.cursor.sequence_id] = row

    # Moments

    def start_position(self, device: Device) -> int:
        """Above which row a device's subscriptions begin; the same for all of them."""
        statement = "SELECT max(since_sequence_id) FROM push_subscription WHERE recipient_id = %s"
        return int(self.ask(statement, device.recipient_id)[0][0])

    def cursor(self) -> int:
        """The persisted cursor."""
        return int(self.ask("SELECT sequence_id FROM push_cursor")[0][0])

    def ask(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement on the primary, past every proxy."""
        if self._session is None or self._session.closed:
            self._session = psycopg.connect(self.url, autocommit=True)
        cursor = self._session.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """End the session of `ask`."""
        if self._session is not None:
            self._session.close()

    def terminate(self, purpose: str, pid: int) -> int:
        """End the sessions an instance opened for this purpose; how many."""
        name = f"pushd {purpose} %:{pid}"
        rows = self.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s", name)
        return len(rows)

    async def requests(self) -> int:
        """Pushes the fakes have received."""
        return sum([(await self.statistics(channel))["requests"] for channel in Channel])

    async def in_flight(self, *channels: Channel) -> int:
        """Requests the fakes have received and not answered; of these channels, or of all."""
        return sum([(await self.statistics(channel))["in_flight"] for channel in channels or Channel])

    @asynccontextmanager
    async def next_term(self) -> AsyncIterator[None]:
        """Leave the block only once a further term has begun."""
        terms = len(self.cursors)
        yield
        await until(lambda: len(self.cursors) > terms)

    async def arrivals(self) -> list[Arrival]:
        """Every push at the fakes, in the order of their arrival."""
        found = []
        for channel in Channel:
            kept = await trio.to_thread.run_sync(self.fakes[channel].requests, abandon_on_cancel=True)
            found += [arrival_of(channel, request) for request in kept]
        return sorted(found, key=lambda each: each.wall_s)

    async def statistics(self, channel: Channel) -> dict[str, Any]:
        return await trio.to_thread.run_sync(self.fakes[channel].stats, abandon_on_cancel=True)

    async def received_more(self, count: int) -> None:
        """Return once so many further pushes have arrived."""
        before = await self.requests()

        async def enough() -> bool:
            return await self.requests() >= before + count

        await until(enough)

    async def dispatched(self) -> None:
        """Return once the cursor has passed everything acknowledged so far."""
        last = max((number for number, row in self.rows.items() if row.eligible), default=0)
        await until(lambda: self.cursor() >= last, SETTLE_S)

    def latency(self, ms: float) -> None:
        """How long the fakes take to answer."""
        for channel in (Channel.APNS, Channel.FCM):
            self.fakes[channel].tell("/latency", {"ms": ms})
        self.fakes[Channel.HTTP].tell("/default", {"delay_ms": ms})

    def refuse(self, device: Device, times: int, status: int = 503) -> None:
        """Answer the device's next requests so. Each is a push that will be sent again."""
        if not times:
            return
        target = f"/hooks/{device.name[:8]}" if device.channel is Channel.HTTP else device.name
        self.fakes[device.channel].script(target, *[{"status": status}] * times)
        self.refused += times

    # The end

    async def settle(self, *, unknown: int = 0) -> Report:
        """Wait until nothing is on its way any more, and balance the account.

        Args:
            unknown: see `Ledger`.
        """
        self.latency(0)
        await self.dispatched()
        await until(self._is_idle, SETTLE_S)
        assert sum(instance.holds for instance in self.up) == 1, "one holds the lock, and nobody else believes so"
        arrivals = await self.arrivals()
        # Here, where nothing is on its way: elsewhere the two are asked for one after the other.
        assert len(arrivals) == await self.requests(), "a fake keeps too few requests"
        stored = self.ask("SELECT array_agg(sequence_id) FROM envelopes")[0][0] or []
        assert sorted(stored) == sorted(self.rows), "what was acknowledged is stored, and nothing else"
        refused = [sum(n for status, n in told.items() if status[0] != "2") for told in await self._statuses()]
        assert sum(refused) <= self.refused, "a fake refused what no run told it to refuse"
        assert all(each.topic == self.rows[each.row].topic for each in arrivals), "a push names another topic"
        failures = sum([await instance.failures() for instance in self.up])
        ledger = evolve(
            self._ledger(arrivals),
            unknown=unknown,
            refused=sum(refused),
            failures=max(0, failures - sum(refused)),
        )
        counted = {instance.bundle_id: await instance.counters() for instance in self.up}
        totals = sum((by_outcome(each) for each in counted.values()), Counter[str]())
        suppressed = totals.pop("suppressed", 0)
        report = Report(
            len(self.rows),
            len(ledger.expected),
            len(arrivals),
            ledger.repeats,
            len(ledger.terms),
            dict(sorted(totals.items())),
            suppressed,
            sum(len(ledger.late_of(place)) for place in range(len(ledger.terms))),
        )
        for place, term in enumerate(ledger.terms):
            if late_ones := [each.wall_s for each in ledger.late_of(place)]:
                span = f"{min(late_ones):.3f} to {max(late_ones):.3f}"
                print(f"[{term.line()}] ended at {term.ended_s}, {len(late_ones)} pushes arrived later, at {span}")
        found = ledger.faults()
        assert not found, "\n".join([*found, report.line(), *(term.line() for term in ledger.terms)])
        if not unknown:
            wrong = miscounted(
                ledger,
                counted,
                self.own(),
                {device.name: device.channel for device in self.devices},
                nobody_ended=len(counted) == len(self.instances),
                nobody_left=not self.deleted,
            )
            assert wrong == []
        await self._check_webhooks(arrivals)
        self.check_logs()
        return report

    async def _statuses(self) -> list[dict[str, int]]:
        return [(await self.statistics(channel))["statuses"] for channel in Channel]

    def by_channel(self, pushes: Iterable[Push]) -> Counter[Channel]:
        """How many of these go over which channel."""
        channels = {device.name: device.channel for device in self.devices}
        return Counter(channels[device] for device, _ in pushes)

    async def _check_webhooks(self, arrivals: Sequence[Arrival]) -> None:
        """Each is signed with its recipient's key, and its id is the same when it comes again."""
        judged = await self.statistics(Channel.HTTP)
        assert judged["no_key"] == 0
        if "LD_CLOCK_OFFSET_FILE" not in self._environ:  # a stepped clock makes stamps that no receiver may accept
            assert judged["bad_signature"] == 0, "a receiver would not accept these"
        distinct = {each.push for each in arrivals if each.channel is Channel.HTTP}
        assert judged["distinct_ids"] == len(distinct), "the id of a webhook is its own, and stays"

    def check_logs(self) -> None:
        """No instance complains, and none tells what is private."""
        private = [
            text
            for device in self.devices
            for text in (device.name, device.recipient_id.hex(), device.secret.hex(), device.key.hex())
            if text
        ]
        private += [text for topic in self.topics for text in (topic.hex(), base64.b64encode(topic).decode())]
        for instance in self.instances:
            assert complaints(instance, private) == []

    def explain(self) -> None:
        """Print what the instances said, for people who look into a failure."""
        for instance in self.instances:
            print(
                f"instance {instance.pid} {'' if instance.is_up else '(ended)'}",
                *instance.server.lines[-60:],
                sep="\n  ",
            )
        print("\n".join(sorted(self.terms())))

    def _ledger(self, arrivals: Sequence[Arrival]) -> Ledger:
        expected = expected_pushes(self.rows, [each for each in self._subscribers() if each.device not in self.deleted])
        gone = expected_pushes(self.rows, [each for each in self._subscribers() if each.device in self.deleted])
        return Ledger(
            expected,
            arrivals,
            self.held,
            list(self.watch.samples),
            tolerated={(device, row) for device, row in gone if row <= self.until.get(device, row)},
        )

    def _subscribers(self) -> list[Subscriber]:
        return [
            Subscriber(device.name, topic, device.commits, self.since.get(device.name, 0))
            for device in self.devices
            for topic in self.topics[: device.topics]
        ]

    @property
    def held(self) -> list[Term]:
        """The terms of all instances, in the order in which they began."""
        return sorted((term for each in self.instances for term in each.held), key=lambda term: term.began_s)

    def due(self) -> set[Push]:
        """Every push that has to arrive of what was published so far."""
        return set(self._ledger([]).expected)

    def own(self) -> set[Push]:
        """Every push suppressed because it would tell somebody of their own message."""
        return own_pushes(self.rows, self._subscribers())

    def due_above(self, cursor: int) -> int:
        """How many pushes are due of rows above `cursor`."""
        return sum(row > cursor for _, row in self.due())

    async def arrived(self) -> Counter[Push]:
        """Every push at the fakes, with how often it came."""
        return Counter(each.push for each in await self.arrivals())

    async def signing_clocks(self) -> set[int]:
        """By how many hours the timestamps of the webhooks that arrived were off."""
        kept = await trio.to_thread.run_sync(self.fakes[Channel.HTTP].requests)
        return {round((int(each["headers"]["webhook-timestamp"]) - each["wall_s"]) / 3_600) for each in kept}

    async def outcomes(self) -> Counter[str]:
        """Outcomes counted by the instances that are up."""
        return sum([by_outcome(await instance.counters()) for instance in self.up], Counter[str]())

    async def counters(self, instance: Instance) -> Counter[Outcome]:
        """What an instance counted, by channel and outcome."""
        return await instance.counters()

    async def _is_idle(self) -> bool:
        return all([await instance.is_idle() for instance in self.up])


@asynccontextmanager
async def open_world(
    db: DbProcess,
    fakes: Fakes,
    folder: Path,
    *,
    instances: int = 2,
    url: Callable[[str], str] | None = None,
    replica_url: Callable[[str], str] | None = None,
    environ: Mapping[str, str] | None = None,
    devices: int | Sequence[Device] = DEVICES_PER_CHANNEL,
    webhook_port: int | None = None,
    within_s: float = RUN_S,
    **tables: Any,
) -> AsyncIterator[World]:
    """A world on a new database of `db`, its recipients registered.

    Args:
        url: what the instances are told instead of the database's own URL, for instance one through a proxy.
        replica_url: the replica's URL, made of the database's.
        environ: of the instances.
        devices: the recipients, or how many of them on each channel.
        webhook_port: of a proxy in front of the webhook receiver.
        within_s: the run fails, rather than hangs, when the block takes longer.
        tables: of every instance's configuration.
    """
    database = await db.create()
    for fake in fakes.values():
        fake.tell("/reset")
    with trio.fail_after(within_s):
        async with trio.open_nursery() as nursery:
            if replica_url is not None:
                tables["database"] = {**tables.get("database", {}), "replica_url": replica_url(database)}
            world = World(nursery, db, database, fakes, folder, environ or {}, tables)
            world.latency(0)
            async with trio.open_nursery() as starting:
                for _ in range(instances):
                    starting.start_soon(partial(world.start, url=url(database) if url else None))
            try:
                nursery.start_soon(world.watch.run)
                coming = make_devices(devices) if isinstance(devices, int) else list(devices)
                coming[1] = evolve(coming[1], key=secrets.token_bytes(KEY_BYTES))
                await world.register(coming, port=webhook_port)
                yield world
            except BaseException:
                world.explain()
                raise
            finally:
                world.close()
            nursery.cancel_scope.cancel()
    if not db.has_ended:
        db.drop(database)
