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
import http.client
import itertools
import json
import random
import re
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import trio
from attrs import define, evolve, field, frozen

from fakes.launch import RunningFake
from pushd.errors import Code, StatusError
from pushd.model import IN_FLIGHT_PER_CHANNEL, Channel
from pushd.rpc.client import Channel as RpcChannel
from pushd.rpc.client import ChannelSettings, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope
from tests.faults.cluster import DbProcess, until
from tests.faults.ledger import Arrival, Ledger, Push, Row, Subscriber, Term, expected_pushes, own_pushes
from tests.faults.watch import CursorWatch
from tests.support.envelopes import APPLICATION, COMMIT, group_envelope, private_message
from tests.support.server import ServerProcess, base_config, running_server

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


def make_devices(per_channel: int, channels: Iterable[Channel] = Channel) -> list[Device]:
    """So many recipients on each channel; every other one also wants commits."""
    devices = []
    for channel, number in itertools.product(channels, range(per_channel)):
        recipient_id = secrets.token_bytes(32)
        name = recipient_id.hex() if channel is Channel.HTTP else hashlib.sha256(recipient_id).hexdigest()
        devices.append(Device(name, channel, recipient_id, secrets.token_bytes(32), commits=number % 2 == 1))
    return devices


class Instance:
    """One `pushd serve` and a channel to it."""

    def __init__(
        self, server: ServerProcess, channel: RpcChannel, database_url: str, config: Path, bundle_id: str = ""
    ) -> None:
        self.server = server
        self.config = config
        self.bundle_id = bundle_id
        self.database_url = database_url
        self.channel = channel
        self.is_up = True

    @property
    def pid(self) -> int:
        return self.server.process.pid

    @property
    def terms(self) -> list[dict[str, Any]]:
        """Its `term_started` and `term_ended` events so far."""
        return [event for event in self.server.events if event.get("event") in ("term_started", "term_ended")]

    @property
    def held(self) -> list[Term]:
        """Its holds of the lock so far."""
        found: list[Term] = []
        drained_by_s: float | None = None
        for event in self.server.events:
            at_s = _seconds(event)
            match event.get("event"):
                case "stopping" | "stepping_down":
                    drained_by_s = min(at_s + event["drain_s"], drained_by_s or at_s + event["drain_s"])
                case "term_started":
                    found.append(Term(self.bundle_id, event["cursor"], at_s))
                case "term_ended":
                    reason = event["reason"]
                    was_asked = reason in ("stopped", "stepped_down")
                    is_drained = was_asked and drained_by_s is not None and at_s < drained_by_s
                    found[-1] = evolve(
                        found[-1], end=event["cursor"], ended_s=at_s, reason=reason, is_drained=is_drained
                    )
                    if reason == "stepped_down":
                        drained_by_s = None
        return found

    @property
    def holds(self) -> bool:
        """Whether its last word about the lock was that it has it."""
        return bool(self.terms) and self.terms[-1]["event"] == "term_started"

    async def end(self, signum: signal.Signals) -> int:
        """Send a signal that ends it; the exit code."""
        self.is_up = False
        self.server.send_signal(signum)
        with trio.fail_after(120):
            code = await self.server.wait_exit()
            await self.server.wait_ended()
        return code

    async def command(self, *argv: str) -> None:
        """Run one of the operator's commands with its configuration; it has to succeed."""
        await trio.run_process(
            [sys.executable, "-m", "pushd", *argv, "--config", str(self.config)], capture_stdout=True
        )

    async def metrics(self) -> dict[str, float]:
        """Every sample of its metrics page by its whole name."""
        text = await trio.to_thread.run_sync(partial(_get, self.server.metrics, "/metrics"), abandon_on_cancel=True)
        samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


def _seconds(event: Mapping[str, Any]) -> float:
    """When an event was told, in seconds since 1970."""
    stamp = event.get("timestamp")
    return datetime.fromisoformat(stamp).timestamp() if isinstance(stamp, str) else 0.0


def _get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@define
class Report:
    """What a run came to."""

    rows: int
    pushes: int
    received: int
    repeats: int
    terms: int
    outcomes: dict[str, int]
    """Without those suppressed."""
    suppressed: int = 0
    late: int = 0
    """Pushes to APNs that arrived when their term had ended, because it was lost or its instance killed."""

    def line(self) -> str:
        """For people."""
        counted = {**self.outcomes, "suppressed": self.suppressed}
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counted.items() if count)
        return (
            f"{self.rows} rows, {self.pushes} pushes due, {self.received} arrived, {self.repeats} repeats, "
            f"{self.terms} terms, {self.late} late; counted by whoever lives: {outcomes or 'nothing'}"
        )


Tell = Callable[[Report], None]
Outcome = tuple[Channel, str]
"""A channel and how a delivery over it ended."""


class World:
    """See the module."""

    def __init__(self, nursery: trio.Nursery, db: DbProcess, url: str, fakes: Fakes, folder: Path) -> None:
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
        self._environ: dict[str, str] = {}
        self._tables: dict[str, Any] = {}

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
        """Register and subscribe each to every topic. `port` is a proxy's, for webhooks."""
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
            keys = {"hmac_epoch_base": int(time.time()) // EPOCH_S - 1, "hmac_keys": [device.key] * 3}
            adds = [
                wire.Subscription(topic=topic, include_commits=device.commits, **(keys if device.key else {}))
                for topic in self.topics
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
        cursor = self._session.execute(statement, parameters or None)  # type: ignore[call-overload]
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
            found += [_arrival(channel, request) for request in kept]
        return sorted(found, key=lambda each: each.wall_s)

    async def statistics(self, channel: Channel) -> dict[str, Any]:
        return await trio.to_thread.run_sync(self.fakes[channel].stats, abandon_on_cancel=True)

    async def quiet(self) -> None:
        """Return once nothing has arrived for a while."""
        before = -1
        while (now := await self.requests()) != before:
            before = now
            await trio.sleep(1)

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

    async def settle(self, *, attempts: int = 1, unknown: int = 0, late: int = IN_FLIGHT_PER_CHANNEL) -> Report:
        """Wait until nothing is on its way any more, and balance the account.

        Args:
            attempts, unknown, late: see `Ledger`.
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
        ledger = evolve(self._ledger(arrivals), attempts=attempts, unknown=unknown, refused=sum(refused), late=late)
        counted = {instance.bundle_id: await self.counters(instance) for instance in self.up}
        totals = sum((_by_outcome(each) for each in counted.values()), Counter[str]())
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
        assert ledger.faults() == [], f"{report.line()}; {'; '.join(term.line() for term in ledger.terms)}"
        if attempts == 1 and not unknown:
            assert self._miscounted(ledger, counted) == []
        await self._check_webhooks(arrivals)
        self.check_logs()
        return report

    def _miscounted(self, ledger: Ledger, counted: Mapping[str, Counter[Outcome]]) -> list[str]:
        """Where the counters of those who live do not say what arrived."""
        found = []
        last = ledger.terms[-1]
        if (
            not self.deleted
            and last.instance in counted
            and [x.instance for x in ledger.terms].count(last.instance) == 1
        ):
            # All that is due above the cursor was the last holder's, and it counted each delivery once.
            own = self.by_channel(push for push in self.own() if push[1] > last.start)
            due = self.by_channel(push for push in ledger.expected if push[1] > last.start)
            for channel in Channel:
                outcomes = _of_channel(counted[last.instance], channel)
                if outcomes.pop("suppressed", 0) != own[channel]:
                    found.append(f"{channel.name}: {own[channel]} own messages were the last holder's to suppress")
                if outcomes.total() != due[channel]:
                    found.append(f"{channel.name}: {due[channel]} were due from the last holder, counted {outcomes}")
        for name, counters in counted.items():
            if not ledger.refused:
                sent = sum(each.sender == name for each in ledger.arrivals)
                found += _unequal(f"APNS of {name}", sent, _of_channel(counters, Channel.APNS))
        if len(counted) == len(self.instances) and not ledger.refused:
            arrived = Counter(each.channel for each in ledger.arrivals)
            for channel in Channel:
                outcomes = sum((_of_channel(counters, channel) for counters in counted.values()), Counter[str]())
                found += _unequal(channel.name, arrived[channel], outcomes)
        return found

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
        if "CLOCK_OFFSET_FILE" not in self._environ:  # a stepped clock makes stamps that no receiver may accept
            assert judged["bad_signature"] == 0, "a receiver would not accept these"
        distinct = {each.push for each in arrivals if each.channel is Channel.HTTP}
        assert judged["distinct_ids"] == len(distinct), "the id of a webhook is its own, and stays"

    def check_logs(self) -> None:
        """No fault from outside is a defect to any instance, and none makes it tell what is private."""
        private = [
            text
            for device in self.devices
            for text in (device.name, device.recipient_id.hex(), device.secret.hex(), device.key.hex())
            if text
        ]
        private += [text for topic in self.topics for text in (topic.hex(), base64.b64encode(topic).decode())]
        for instance in self.instances:
            levels = {event.get("level") for event in instance.server.events}
            assert levels <= {"debug", "info", "warning"}, instance.server.lines[-30:]
            assert len(instance.server.events) == len(instance.server.lines), "something that is no event was printed"
            text = "\n".join(instance.server.lines)
            assert not any(value in text for value in private)

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
            for topic in self.topics
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
        return sum([_by_outcome(await self.counters(instance)) for instance in self.up], Counter[str]())

    async def counters(self, instance: Instance) -> Counter[Outcome]:
        """What an instance counted, by channel and outcome."""
        found: Counter[Outcome] = Counter()
        for name, value in (await instance.metrics()).items():
            if name.startswith("xmtp_push_deliveries_total{"):
                found[Channel[_label(name, "channel").upper()], _label(name, "outcome")] = int(value)
        assert found, "there is no such metric"
        return found

    async def _is_idle(self) -> bool:
        for instance in self.up:
            measured = await instance.metrics()
            busy = [value for name, value in measured.items() if re.match("pushd_push_(retained|in_flight)", name)]
            assert len(busy) == 1 + len(Channel), "there are no such metrics"
            if any(busy):
                return False
        return True


def _by_outcome(counters: Counter[Outcome]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, outcome), count in counters.items():
        found[outcome] += count
    return +found


def _of_channel(counters: Counter[Outcome], wanted: Channel) -> Counter[str]:
    return +Counter({outcome: count for (channel, outcome), count in counters.items() if channel is wanted})


def _unequal(what: str, sent: int, outcomes: Counter[str]) -> list[str]:
    """An attempt that failed may have arrived or not; all others have."""
    delivered, failed = outcomes["delivered"], outcomes["failed"]
    if delivered <= sent <= delivered + failed:
        return []
    return [f"{what}: {sent} arrived, {delivered} counted as delivered and {failed} as failed"]


async def hold(world: World, statement: str, seconds: float) -> None:
    """Keep the locks of a statement for so long."""
    conn = await trio.to_thread.run_sync(lambda: psycopg.connect(world.url))
    try:
        await trio.to_thread.run_sync(conn.execute, statement.encode())
        await trio.sleep(seconds)
    finally:
        conn.close()


def _label(sample: str, label: str) -> str:
    found = re.search(f'{label}="([^"]*)"', sample)
    assert found
    return found[1]


def _arrival(channel: Channel, request: Mapping[str, Any]) -> Arrival:
    """The three channels carry the same fields in different places."""
    body, headers = json.loads(request["body"]), request["headers"]
    match channel:
        case Channel.APNS:
            device = headers[":path"].removeprefix("/3/device/")
        case Channel.FCM:
            device, body = body["message"]["token"], body["message"]["data"]
        case Channel.HTTP:
            device = body["recipient_id"]
    topic = base64.b64decode(body["topic"], validate=True)
    return Arrival(device, int(body["sequence_id"]), topic, channel, request["wall_s"], headers.get("apns-topic"))


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
    devices: int = DEVICES_PER_CHANNEL,
    webhook_port: int | None = None,
    within_s: float = RUN_S,
    **tables: Any,
) -> AsyncIterator[World]:
    """A world on a new database of `db`, its recipients registered.

    Args:
        url: what the instances are told instead of the database's own URL, for instance one through a proxy.
        replica_url: the replica's URL, made of the database's.
        environ: of the instances.
        webhook_port: of a proxy in front of the webhook receiver.
        within_s: the run fails, rather than hangs, when the block takes longer.
        tables: of every instance's configuration.
    """
    database = await db.create()
    for fake in fakes.values():
        fake.tell("/reset")
    with trio.fail_after(within_s):
        async with trio.open_nursery() as nursery:
            world = World(nursery, db, database, fakes, folder)
            world._environ = dict(environ or {})
            world._tables = tables
            if replica_url is not None:
                world._tables["database"] = {**tables.get("database", {}), "replica_url": replica_url(database)}
            world.latency(0)
            async with trio.open_nursery() as starting:
                for _ in range(instances):
                    starting.start_soon(partial(world.start, url=url(database) if url else None))
            try:
                nursery.start_soon(world.watch.run)
                coming = make_devices(devices)
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
