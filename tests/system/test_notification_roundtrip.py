"""The registration API of a whole `pushd serve` process, used by a grpcio client in a process of its own."""

from __future__ import annotations

import base64
import hashlib
import random
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from pushd.rpc.client import open_channel
from pushd.rpc.gen.grpc.health.v1 import health_pb2
from tests.support.grpcio_client import GrpcioClient, grpcio_client
from tests.support.postgres import as_url
from tests.support.privacy import PrivateValues, private_bytes, private_text
from tests.support.server import ServerProcess, base_config, running_server

pytestmark = pytest.mark.slow

SERVICES = ("Publish", "Query", "Subscription", "Notification")
METHODS = ("Register", "Unregister", "UpdateSubscriptions")
HTTP_CHANNEL = {"http": {"allow_private_addresses": True}}


@asynccontextmanager
async def serving(
    folder: Path, database_url: str, push: dict[str, Any] | None, **tables: Any
) -> AsyncIterator[tuple[ServerProcess, GrpcioClient]]:
    database = {"url": as_url(database_url), "max_statement_timeout_ms": 500}
    config = base_config(database=database, server={"log_level": "trace"}, **tables)
    if push is not None:
        config["push"] = push
    with trio.fail_after(120):
        async with running_server(folder, config) as server, grpcio_client(server.grpc_port) as client:
            yield server, client


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


class Recipient:
    """A recipient's secrets, all of them known to `values`, and requests made of them."""

    def __init__(self, values: PrivateValues, seed: int) -> None:
        rng = random.Random(seed)
        self.id = values.keep(private_bytes(rng, 32))
        self.secret = values.keep(private_bytes(rng, 32))
        self.url = "https://127.0.0.1/" + values.keep(private_text(rng, 40))
        self.signing_key = values.keep(private_bytes(rng, 32))
        self.topics = [b"\x00" + values.keep(private_bytes(rng, 16)) for _ in range(3)]
        self.keys = [values.keep(private_bytes(rng, 42)) for _ in range(3)]

    def identity(self, **changes: bytes) -> dict[str, Any]:
        values = {"recipientId": self.id, "recipientSecret": self.secret} | changes
        return {name: b64(value) for name, value in values.items()}

    def register(self, **changes: bytes) -> dict[str, Any]:
        return {**self.identity(**changes), "http": {"url": self.url, "signingKey": b64(self.signing_key)}}

    def add(self, number: int) -> dict[str, Any]:
        keys = [b64(key) for key in self.keys[:number]]
        return {"topic": b64(self.topics[number]), "hmacEpochBase": "7", "hmacKeys": keys, "includeCommits": True}


def status(code: str, details: str) -> dict[str, str]:
    return {"code": code, "details": details}


def metric(text: str, name: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


async def metrics_of(server: ServerProcess) -> str:
    def fetch() -> bytes:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=20) as response:
            return response.read()

    return (await trio.to_thread.run_sync(fetch)).decode()


async def test_round_trip_over_grpcio(tmp_path: Path, database_url: str) -> None:
    values = PrivateValues()
    me = Recipient(values, 1)
    outputs: list[str] = []
    async with serving(tmp_path, database_url, HTTP_CHANNEL) as (server, client):
        outputs.append(await metrics_of(server))
        for action in ("registered", "unregistered", "expired", "dead"):
            assert metric(outputs[0], f'xmtp_push_recipients_total{{action="{action}"}}') == 0
        for action in ("added", "removed"):
            assert metric(outputs[0], f'xmtp_push_subscriptions_total{{action="{action}"}}') == 0

        first = await client.call("Register", me.register())
        assert first["response"] == {"channel": "CHANNEL_HTTP", "expiresAtNs": first["response"]["expiresAtNs"]}
        adds = [me.add(number) for number in range(3)]
        second = await client.call("UpdateSubscriptions", {**me.identity(), "adds": adds})
        assert second["response"]["topicCount"] == "3"
        assert int(second["response"]["expiresAtNs"]) > int(first["response"]["expiresAtNs"])
        third = await client.call(
            "UpdateSubscriptions", {**me.identity(), "adds": [me.add(1)], "removes": [b64(me.topics[0])]}
        )
        assert third["response"]["topicCount"] == "2"
        fourth = await client.call("Register", me.register())
        assert fourth["response"]["topicCount"] == "2"

        with psycopg.connect(database_url) as conn:
            rows = conn.execute("SELECT topic, hmac_key_0, hmac_key_1 FROM push_subscription ORDER BY topic").fetchall()
            assert rows == sorted([(me.topics[1], me.keys[0], None), (me.topics[2], me.keys[0], me.keys[1])])
            assert conn.execute("SELECT secret_hash FROM push_recipient").fetchall() == [
                (hashlib.sha256(me.secret).digest(),)
            ]

        stranger = values.keep(private_bytes(random.Random(2), 32))
        refused = [
            await client.call("Register", me.register(recipientSecret=stranger)),
            await client.call("UpdateSubscriptions", me.identity(recipientSecret=stranger)),
            await client.call("Unregister", me.identity(recipientSecret=hashlib.sha256(me.secret).digest())),
        ]
        assert refused == [status("PERMISSION_DENIED", "recipient secret is not valid")] * 3
        assert await client.call("Register", {**me.identity(), "fcm": {"token": "t"}}) == status(
            "FAILED_PRECONDITION", "channel is not configured"
        )
        assert await client.call("UpdateSubscriptions", {**me.identity(), "adds": [me.add(1), me.add(1)]}) == status(
            "INVALID_ARGUMENT", "subscription is malformed"
        )
        plain_http = me.register() | {"http": {"url": "http://127.0.0.1/", "signingKey": b64(me.signing_key)}}
        assert await client.call("Register", plain_http) == status("INVALID_ARGUMENT", "webhook url is not allowed")

        assert await client.call("Unregister", me.identity()) == {"code": "OK", "details": "", "response": {}}
        assert await client.call("Unregister", me.identity()) == status("NOT_FOUND", "recipient is not registered")
        outputs.append(await metrics_of(server))
        for family, action, expected in (
            ("recipients", "registered", 2),
            ("recipients", "unregistered", 1),
            ("subscriptions", "added", 3),
            ("subscriptions", "removed", 3),  # one by the update, the others with their recipient
        ):
            assert metric(outputs[1], f'xmtp_push_{family}_total{{action="{action}"}}') == expected
        for method in METHODS:
            assert f'grpc_method="{method}",grpc_service="xmtp.backend.v1.NotificationService"' in outputs[1]
        outputs += server.lines
    assert values.find_in("\n".join(outputs)) == set()


async def test_bodies_that_do_not_decode_are_malformed(tmp_path: Path, database_url: str) -> None:
    """T050, as far as a well-behaved gRPC library can send it; and the server answers the next call.

    T054: the service is healthy beside the others.
    """
    bodies = {
        "bad tag": b"\xff",
        "truncated field": b"\x0a\x20abc",
        "field number 0": b"\x02\x00",
        "group that never ends": b"\x0b",
        "not UTF-8 in a string": b"\x1a\x03\x0a\x01\xff",
    }
    malformed = status("INVALID_ARGUMENT", "request is malformed")
    async with serving(tmp_path, database_url, HTTP_CHANNEL) as (server, client):
        for method in METHODS:
            for name, body in bodies.items():
                assert await client.send(method, body) == malformed, (method, name)
            assert await client.send(method, b"") == malformed, (method, "empty: no id")
            assert await client.send(method, bytes(100), gzip=True) == malformed, (method, "compressed")
        values = PrivateValues()
        assert (await client.call("Register", Recipient(values, 3).register()))["code"] == "OK"
        async with open_channel("127.0.0.1", server.grpc_port) as channel:
            for name in ("", *(f"xmtp.backend.v1.{service}Service" for service in SERVICES)):
                health = await channel.unary(
                    "/grpc.health.v1.Health/Check",
                    health_pb2.HealthCheckRequest(service=name),
                    health_pb2.HealthCheckResponse,
                    deadline_s=30,
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING, ("T054", name)


async def test_server_without_push_config_refuses_every_register(tmp_path: Path, database_url: str) -> None:
    """PUSH-070, and T005: a recipient of a channel that is no longer configured can still leave."""
    me = Recipient(PrivateValues(), 4)
    async with serving(tmp_path / "with", database_url, HTTP_CHANNEL) as (_, client):
        assert (await client.call("Register", me.register()))["code"] == "OK"
    async with serving(tmp_path / "without", database_url, None) as (_, client):
        for delivery in ({"apns": {"token": "ab"}}, {"fcm": {"token": "t"}}, {"http": {"url": "x"}}, {}):
            assert await client.call("Register", {**me.identity(), **delivery}) == status(
                "FAILED_PRECONDITION", "channel is not configured"
            )
        updated = await client.call("UpdateSubscriptions", {**me.identity(), "adds": [me.add(1)]})
        assert updated["response"]["topicCount"] == "1"
        assert (await client.call("Unregister", me.identity()))["code"] == "OK"
    with psycopg.connect(database_url) as conn:
        assert conn.execute("SELECT count(*) FROM push_subscription").fetchone() == (0,)


async def test_database_trouble_has_constant_statuses_and_quotes_nothing(tmp_path: Path, database_url: str) -> None:
    """T008 and S092: what PostgreSQL says about the failing row reaches neither the caller nor the log."""
    values = PrivateValues()
    me = Recipient(values, 5)
    calls = [
        ("Register", me.register()),
        ("UpdateSubscriptions", {**me.identity(), "adds": [me.add(1)]}),
        ("Unregister", me.identity()),
    ]
    async with serving(tmp_path, database_url, HTTP_CHANNEL) as (server, client):
        assert (await client.call("Register", me.register()))["code"] == "OK"
        with psycopg.connect(database_url, autocommit=True) as conn:
            with conn.transaction():
                conn.execute("SELECT 1 FROM push_recipient FOR UPDATE")
                for method, request in calls:
                    assert await client.call(method, request) == status(
                        "DEADLINE_EXCEEDED", "database operation timed out"
                    )
            conn.execute("ALTER TABLE push_recipient ADD CONSTRAINT never CHECK (channel = 0) NOT VALID")
            for method, request in calls[:2]:
                assert await client.call(method, request) == status("INTERNAL", "storage invariant failed")
            conn.execute("ALTER TABLE push_recipient DROP CONSTRAINT never")
            conn.execute("ALTER TABLE push_recipient RENAME TO elsewhere")
            for method, request in calls:
                assert await client.call(method, request) == status("UNAVAILABLE", "database operation failed")
            conn.execute("ALTER TABLE elsewhere RENAME TO push_recipient")
        assert (await client.call("UpdateSubscriptions", calls[1][1]))["code"] == "OK"
        text = await metrics_of(server)
        assert metric(text, 'xmtp_db_errors_total{kind="timeout"}') == 3
        assert metric(text, 'xmtp_db_errors_total{kind="invariant"}') == 2
        assert metric(text, 'xmtp_db_errors_total{kind="other"}') == 3
        assert values.find_in("\n".join([text, *server.lines])) == set()
