"""Random publishers and random subscribers: every registration gets what is visible, once, in order.

Publishers keep their transactions open for a while, and commit or abort in any order. Subscribers start at any cursor,
change their topics, leave, and lose their connections, while envelopes keep coming. Everything runs for real: database,
boundary task, tailer, hub, HTTP/2.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import psycopg
import trio
from attrs import define, field, frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pushd.errors import StatusError
from pushd.rpc.client import ClientCall, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.store.database import DatabaseSettings, open_database
from pushd.telemetry import Metrics
from tests.support.streams import DYNAMIC, STATIC, Publishing, World, streaming, topic, topic_queries, update

TOPICS = 4
numbers = st.integers(0, TOPICS - 1)


@frozen
class Store:
    """Publish to some topics in a transaction that stays open."""

    topics: list[int]
    size: int


@frozen
class Settle:
    """Commit or abort one of the open transactions."""

    which: int
    commits: bool


@frozen
class Subscribe:
    """A new subscriber; `back` ids behind the newest one that may exist."""

    topics: list[int]
    back: int
    is_static: bool


@frozen
class Change:
    """An update of one of the subscribers."""

    which: int
    adds: list[int]
    removes: list[int]
    back: int


@frozen
class Leave:
    """A subscriber is gone: it says so, or its connection breaks."""

    which: int
    is_cut: bool


@frozen
class Pause:
    milliseconds: int


some = st.lists(numbers, min_size=1, max_size=TOPICS, unique=True)
back = st.integers(0, 12)
weighted = {
    st.builds(Store, st.lists(numbers, min_size=1, max_size=6), st.sampled_from([16, 16, 16, 400_000])): 8,
    st.builds(Settle, st.integers(0, 9), st.sampled_from([True, True, True, False])): 7,
    st.builds(Subscribe, some, back, st.booleans()): 4,
    st.builds(Change, st.integers(0, 9), some, st.lists(numbers, max_size=2), back): 4,
    st.builds(Leave, st.integers(0, 9), st.booleans()): 1,
    st.builds(Pause, st.integers(0, 15)): 4,
}
steps = st.sampled_from([one for one, weight in weighted.items() for _ in range(weight)]).flatmap(lambda one: one)


@define(eq=False)
class Registered:
    """A topic of a subscriber, and what it got of it."""

    topic: bytes
    cursor: int
    got: list[int] = field(factory=list)


@define(eq=False)
class Subscriber:
    """Reads its stream and files what comes under the registration it belongs to."""

    is_static: bool
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    call: ClientCall[Any] | None = None
    current: dict[bytes, Registered] = field(factory=dict)
    ended: list[Registered] = field(factory=list)
    asked: dict[int, tuple[dict[bytes, int], list[bytes]]] = field(factory=dict)
    answered: int = 0
    has_left: bool = False
    changed: trio.Event = field(factory=trio.Event)

    async def run(self, port: int, cursors: dict[bytes, int], *, task_status: trio.TaskStatus[None]) -> None:
        """Subscribe over a connection of its own and read until it leaves; started when it has asked."""
        path, response = (STATIC, wire.SubscribeStaticResponse) if self.is_static else (DYNAMIC, wire.SubscribeResponse)
        with self.scope:
            async with open_channel("127.0.0.1", port) as channel:
                async with channel.stream(path, response, deadline_s=math.inf) as self.call:
                    if self.is_static:
                        self.current = {one: Registered(one, cursor) for one, cursor in cursors.items()}
                        await self.call.send(wire.SubscribeStaticRequest(topics=topic_queries(cursors)))
                        self.call.half_close()
                    else:
                        await self.change(cursors, [])
                    task_status.started()
                    try:
                        await self._read()
                    except StatusError:
                        if not self.has_left:
                            raise

    async def _read(self) -> None:
        assert self.call is not None
        while (response := await self.call.receive()) is not None:
            self._take(response)
            self.changed.set()
            self.changed = trio.Event()

    def _take(self, response: Any) -> None:
        match response.WhichOneof("response"):
            case "messages":
                for envelope in response.messages.envelopes:
                    # A KeyError here is an envelope that nobody asked for, or one after its topic's removal.
                    registered = self.current[envelope.meta.topic.topic]
                    registered.got.append(envelope.meta.cursor.sequence_id)
            case "applied":
                self.answered += 1
                assert response.applied.id == self.answered, "answers come in order"
                adds, removes = self.asked[self.answered]
                for one in removes:
                    if one in self.current:
                        self.ended.append(self.current.pop(one))
                fresh = {one: Registered(one, cursor) for one, cursor in adds.items() if one not in self.current}
                assert [target.topic.topic for target in response.applied.added_targets] == list(fresh)
                self.current |= fresh

    async def change(self, adds: dict[bytes, int], removes: list[bytes]) -> None:
        assert self.call is not None
        self.asked[len(self.asked) + 1] = adds, removes
        await self.call.send(update(len(self.asked), adds, removes))

    def leave(self, *, is_cut: bool) -> None:
        assert self.call is not None
        self.has_left = True
        if is_cut:
            self.scope.cancel(reason="the connection breaks")
        else:
            self.call.close()


class Script:
    """Plays the steps and compares in the end."""

    def __init__(self, world: World, database_url: str, nursery: trio.Nursery) -> None:
        self.world = world
        self.nursery = nursery
        self.database_url = database_url
        self.connections = ExitStack()
        self.open: list[tuple[Publishing, list[tuple[int, bytes]]]] = []
        self.visible: list[tuple[int, bytes]] = []
        self.newest = 0
        self.subscribers: list[Subscriber] = []

    async def play(self, step: Any) -> None:
        match step:
            case Store(topics, size):
                self._store([topic(number) for number in topics], size)
            case Settle(which, commits) if self.open:
                self._settle(which % len(self.open), commits)
            case Subscribe(topics, back, is_static):
                await self._subscribe({topic(number): self._cursor(back) for number in topics}, is_static)
            case Change(which, adds, removes, back) if self._changeable:
                subscriber = self._changeable[which % len(self._changeable)]
                wanted = {topic(number): self._cursor(back) for number in adds if number not in removes}
                await subscriber.change(wanted, [topic(number) for number in dict.fromkeys(removes)])
            case Leave(which, is_cut) if self._present:
                self._present[which % len(self._present)].leave(is_cut=is_cut)
            case Pause(milliseconds):
                await trio.sleep(milliseconds / 1_000)

    @property
    def _present(self) -> list[Subscriber]:
        return [one for one in self.subscribers if not one.has_left]

    @property
    def _changeable(self) -> list[Subscriber]:
        return [one for one in self._present if not one.is_static]

    def _cursor(self, back: int) -> int:
        return max(0, self.newest - back)

    def _store(self, topics: list[bytes], size: int) -> None:
        locked = {one for _, stored in self.open for _, one in stored}
        free = [one for one in topics if one not in locked]  # else this thread would wait for itself
        if not free:
            return
        publisher = Publishing(self.connections.enter_context(psycopg.connect(self.database_url)))
        ids = publisher.store(free, size)
        self.newest = ids[-1]
        self.open.append((publisher, list(zip(ids, free, strict=True))))

    def _settle(self, which: int, commits: bool) -> None:
        publisher, stored = self.open.pop(which)
        if commits:
            publisher.conn.commit()
            self.visible += stored
        else:
            publisher.conn.rollback()
        publisher.conn.close()

    async def _subscribe(self, cursors: dict[bytes, int], is_static: bool) -> None:
        subscriber = Subscriber(is_static)
        self.subscribers.append(subscriber)
        await self.nursery.start(subscriber.run, self.world.port, cursors)

    async def finish(self) -> None:
        """Settle what is open, wait for what is due, and compare."""
        while self.open:
            self._settle(0, len(self.open) % 2 == 0)
        # What is visible now is due to everybody who is still there, and the last thing that can come is this.
        publisher = Publishing(self.connections.enter_context(psycopg.connect(self.database_url)))
        every = [topic(number) for number in range(TOPICS)]
        self.visible += zip(publisher.publish(every), every, strict=True)
        for subscriber in self._present:
            while not self._is_done(subscriber):
                await subscriber.changed.wait()
        for subscriber in self.subscribers:
            for registered in subscriber.current.values():
                due = self._due(registered)
                if subscriber.has_left:
                    assert registered.got == due[: len(registered.got)]
                else:
                    assert registered.got == due
            for registered in subscriber.ended:
                assert registered.got == self._due(registered)[: len(registered.got)]

    def _is_done(self, subscriber: Subscriber) -> bool:
        if subscriber.answered < len(subscriber.asked):
            return False
        return all(len(one.got) >= len(self._due(one)) for one in subscriber.current.values())

    def _due(self, registered: Registered) -> list[int]:
        return sorted(n for n, one in self.visible if one == registered.topic and n > registered.cursor)


async def play(database_url: str, script: list[Any]) -> None:
    metrics = Metrics()
    async with open_database(DatabaseSettings(database_url), metrics) as database:
        clear(database_url)
        with trio.fail_after(60):
            async with streaming(database, metrics, poll_s=0.005) as world, trio.open_nursery() as nursery:
                player = Script(world, database_url, nursery)
                with player.connections:
                    for step in script:
                        await player.play(step)
                    await player.finish()
                nursery.cancel_scope.cancel()


def clear(database_url: str) -> None:
    """Nothing of the example before is there any more."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("TRUNCATE envelopes, topic_watermark")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(script=st.lists(steps, min_size=40, max_size=70))
def test_every_registration_gets_what_is_visible_once_and_in_order(database_url: str, script: list[Any]) -> None:
    trio.run(play, database_url, script)
