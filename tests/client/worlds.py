"""Two backends behind one face: a model of the registration API in memory, and a real server with its database."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import psycopg
import trio
from attrs import define, field, frozen

from pushd.client.backend import Backend
from pushd.client.errors import CallFailed
from pushd.client.grpc_backend import open_backend, read_address
from pushd.errors import Code
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2, query_pb2
from tests.config.support import pem, service_account
from tests.support.server import START_S, base_config, toml


@frozen
class Stored:
    """One subscription as the backend holds it."""

    epoch_base: int | None
    keys: tuple[bytes, ...]
    include_commits: bool


class World(Protocol):
    """What a test may look at and do on the backend's side."""

    backend: Backend

    async def topics(self, recipient_id: bytes) -> dict[bytes, Stored]: ...

    async def delivery(self, recipient_id: bytes) -> str | None: ...

    async def forget(self, recipient_id: bytes) -> None: ...


@define
class _Recipient:
    secret_hash: bytes
    channel: int
    delivery: str
    topics: dict[bytes, Stored] = field(factory=dict)


class MemoryWorld:
    """The registration API's rules without network or database."""

    def __init__(self, max_topics: int = 100_000, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.backend: Backend = self
        self.max_topics = max_topics
        self.now_ns = now_ns
        self.recipients: dict[bytes, _Recipient] = {}

    async def topics(self, recipient_id: bytes) -> dict[bytes, Stored]:
        found = self.recipients.get(recipient_id)
        return dict(found.topics) if found else {}

    async def delivery(self, recipient_id: bytes) -> str | None:
        found = self.recipients.get(recipient_id)
        return found.delivery if found else None

    async def forget(self, recipient_id: bytes) -> None:
        self.recipients.pop(recipient_id, None)

    async def register(self, request: wire.RegisterRequest) -> wire.RecipientState:
        await trio.lowlevel.checkpoint()
        kind = request.WhichOneof("delivery")
        assert kind is not None
        channel = {"apns": 1, "fcm": 2, "http": 3}[kind]
        delivery = request.http.url if kind == "http" else getattr(request, kind).token
        secret_hash = hashlib.sha256(request.recipient_secret).digest()
        found = self.recipients.get(request.recipient_id)
        if found is None:
            found = self.recipients[request.recipient_id] = _Recipient(secret_hash, channel, delivery)
        elif found.secret_hash != secret_hash:
            raise CallFailed(Code.PERMISSION_DENIED)
        found.channel, found.delivery = channel, delivery
        return self._state(found)

    async def unregister(self, request: wire.UnregisterRequest) -> None:
        await trio.lowlevel.checkpoint()
        self._owned(request.recipient_id, request.recipient_secret)
        del self.recipients[request.recipient_id]

    async def update_subscriptions(self, request: wire.UpdateSubscriptionsRequest) -> wire.RecipientState:
        await trio.lowlevel.checkpoint()
        found = self._owned(request.recipient_id, request.recipient_secret)
        topics = dict(found.topics)
        for topic in request.removes:
            topics.pop(topic, None)
        for add in request.adds:
            base = add.hmac_epoch_base if add.hmac_keys else None
            topics[add.topic] = Stored(base, tuple(add.hmac_keys), add.include_commits)
        if len(topics) > max(self.max_topics, len(found.topics)):
            raise CallFailed(Code.RESOURCE_EXHAUSTED)
        found.topics = topics
        return self._state(found)

    async def publish(self, request: publish_pb2.PublishRequest) -> publish_pb2.PublishResponse:
        await trio.lowlevel.checkpoint()
        response = publish_pb2.PublishResponse()
        for _ in request.envelopes:
            response.envelope_metas.add()
        return response

    async def query(self, request: query_pb2.QueryRequest) -> query_pb2.QueryResponse:
        await trio.lowlevel.checkpoint()
        return query_pb2.QueryResponse()

    def _owned(self, recipient_id: bytes, secret: bytes) -> _Recipient:
        found = self.recipients.get(recipient_id)
        if found is None:
            raise CallFailed(Code.NOT_FOUND)
        if found.secret_hash != hashlib.sha256(secret).digest():
            raise CallFailed(Code.PERMISSION_DENIED)
        return found

    def _state(self, recipient: _Recipient) -> wire.RecipientState:
        ttl_ns = 30 * 86_400 * 10**9
        return wire.RecipientState(
            topic_count=len(recipient.topics),
            channel=wire.Channel.ValueType(recipient.channel),
            expires_at_ns=self.now_ns() + ttl_ns,
        )


class ServerWorld:
    """A whole server, called over a socket and looked at through its database."""

    def __init__(self, backend: Backend, database_url: str) -> None:
        self.backend = backend
        self._database_url = database_url

    async def topics(self, recipient_id: bytes) -> dict[bytes, Stored]:
        rows = await self._sql(
            "SELECT topic, hmac_epoch_base, hmac_key_0, hmac_key_1, hmac_key_2, include_commits"
            " FROM push_subscription WHERE recipient_id = %s",
            recipient_id,
        )
        return {
            topic: Stored(base, tuple(key for key in keys if key is not None), commits)
            for topic, base, *keys, commits in rows
        }

    async def delivery(self, recipient_id: bytes) -> str | None:
        rows = await self._sql("SELECT delivery FROM push_recipient WHERE recipient_id = %s", recipient_id)
        return rows[0][0] if rows else None

    async def forget(self, recipient_id: bytes) -> None:
        await self._sql("DELETE FROM push_recipient WHERE recipient_id = %s RETURNING 1", recipient_id)

    async def _sql(self, statement: str, recipient_id: bytes) -> list[tuple]:
        def run() -> list[tuple]:
            with psycopg.connect(self._database_url, autocommit=True) as connection:
                return connection.execute(statement, (recipient_id,)).fetchall()

        return await trio.to_thread.run_sync(run)


@frozen
class ServerAddress:
    """A running server and its database."""

    grpc: str
    database_url: str


@contextmanager
def server_process(database_url: str, folder: Path, max_topics: int) -> Iterator[ServerAddress]:
    """`pushd serve` with all three channels configured. Nothing is published to it, so it sends nothing.

    One process serves many tests, each with a recipient of its own: a registration knows of no other.
    """
    config = base_config(
        database={"url": database_url},
        push={
            "apns": {
                "key": "env:TEST_APNS_KEY",
                "key_id": "ABC123DEFG",
                "team_id": "TEAM123456",
                "bundle_id": "org.example.app",
                "environment": "production",
            },
            "fcm": {"service_account": "env:TEST_SERVICE_ACCOUNT"},
            "http": {"allow_private_addresses": True},
        },
        limits={"max_push_topics": max_topics},
    )
    (folder / "pushd.toml").write_text(toml(config))
    argv = [sys.executable, "-m", "pushd", "serve", "--config", str(folder / "pushd.toml"), "--data-dir", str(folder)]
    environ = {**os.environ, "TEST_APNS_KEY": pem(), "TEST_SERVICE_ACCOUNT": service_account()}
    log = folder / "log"
    with log.open("wb") as stderr, subprocess.Popen(argv, stderr=stderr, env=environ) as process:
        try:
            yield ServerAddress(_wait_ready(process, log), database_url)
        finally:
            process.terminate()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if '"ready"' in line:
                return str(json.loads(line)["grpc"])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@asynccontextmanager
async def server_world(server: ServerAddress) -> AsyncIterator[ServerWorld]:
    """A real server, called as an app calls it."""
    address = read_address(f"http://{server.grpc}", None, allow_plaintext=False)
    async with open_backend(address) as backend:
        yield ServerWorld(backend, server.database_url)
