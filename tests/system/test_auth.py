"""Authentication in front of a real server: who is let in, what is public, and what happens when keys run out."""

from __future__ import annotations

import http.server
import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from joserfc import jwt
from joserfc.jwk import ECKey

from pushd.errors import Code, StatusError
from pushd.rpc.client import Channel, open_channel
from pushd.rpc.gen.grpc.health.v1 import health_pb2
from pushd.rpc.gen.grpc.reflection.v1 import reflection_pb2
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from tests.support.server import base_config, running_server

KEY = ECKey.generate_key("P-256")
IDENTITY: dict[str, Any] = {"recipient_id": b"\x11" * 32, "recipient_secret": b"\x22" * 32}
REGISTER = wire.RegisterRequest(**IDENTITY, http=wire.HttpDelivery(url="https://127.0.0.1/hook", signing_key=b"k" * 16))
CALLS: list[tuple[str, Any, Any]] = [
    ("Register", REGISTER, wire.RecipientState),
    ("UpdateSubscriptions", wire.UpdateSubscriptionsRequest(**IDENTITY), wire.RecipientState),
    ("Unregister", wire.UnregisterRequest(**IDENTITY), wire.UnregisterResponse),
]
SUBJECT = "somebody-nobody-may-read-about"


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="pushd-"))  # not tmp_path: too long for a socket
    yield place
    shutil.rmtree(place)


def token(scope: str = "notifications", **claims: Any) -> str:
    body = {"exp": int(time.time()) + 600, "scope": scope, "sub": SUBJECT, **claims}
    return jwt.encode({"alg": "ES256", "kid": "k1"}, body, KEY)


INLINE_KEY = f"""
[[auth.keys]]
kid = "k1"
alg = "ES256"
public_key = {json.dumps(KEY.as_pem(private=False).decode())}
"""


def config(auth: dict[str, Any]) -> dict[str, Any]:
    return base_config(push={"http": {"allow_private_addresses": True}}, auth=auth)


async def call(channel: Channel, method: str, request: Any, answer: Any, bearer: str | None) -> Code:
    metadata = [] if bearer is None else [(b"authorization", b"Bearer " + bearer.encode())]
    path = f"/xmtp.backend.v1.NotificationService/{method}"
    try:
        await channel.unary(path, request, answer, deadline_s=30, metadata=metadata)
    except StatusError as error:
        return error.code
    return Code.OK


async def test_only_holders_of_a_good_token_are_let_in(folder: Path) -> None:
    async with running_server(folder, config({"required_scopes": ["notifications"]}), extra_toml=INLINE_KEY) as server:
        async with open_channel("127.0.0.1", server.grpc_port) as channel:
            good, unscoped, expired = token(), token("other"), token(exp=1)
            for method, request, answer in CALLS:
                empty = type(request)()
                assert await call(channel, method, empty, answer, None) is Code.UNAUTHENTICATED
                assert await call(channel, method, empty, answer, expired) is Code.UNAUTHENTICATED
                assert await call(channel, method, empty, answer, unscoped) is Code.PERMISSION_DENIED
            for method, request, answer in CALLS:
                assert await call(channel, method, request, answer, good) is Code.OK
            health = await channel.unary(
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest(service="xmtp.backend.v1.NotificationService"),
                health_pb2.HealthCheckResponse,
                deadline_s=30,
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            async with channel.stream(path, reflection_pb2.ServerReflectionResponse, deadline_s=30) as stream:
                await stream.send(reflection_pb2.ServerReflectionRequest(list_services=""))
                stream.half_close()
                async for reply in stream:
                    names = {service.name for service in reply.list_services_response.service}
            assert "xmtp.backend.v1.NotificationService" in names
        async with httpx2.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(f"http://{server.metrics}/metrics")).text
        for reason in ("missing", "expired", "scope"):
            assert f'xmtp_auth_rejections_total{{reason="{reason}"}} 3.0' in metrics
        assert "xmtp_auth_keys 1.0" in metrics
        log = "\n".join(server.lines)
    for private in (SUBJECT, good, good.split(".")[1], good.split(".")[2], unscoped, expired):
        assert private not in log


class KeyServer(http.server.ThreadingHTTPServer):
    """Serves KEY as a key set until told to fail."""

    broken = False

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, KeyServer)
            body = json.dumps({"keys": [{**KEY.as_dict(private=False), "kid": "k1", "alg": "ES256"}]}).encode()
            self.send_response(500 if self.server.broken else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass


@contextmanager
def key_server() -> Iterator[KeyServer]:
    with KeyServer(("127.0.0.1", 0), KeyServer.Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_keys_of_an_issuer_serve_until_they_are_too_old_and_then_the_server_drains_and_fails(
    folder: Path,
) -> None:
    with key_server() as issuer:
        url = f"http://127.0.0.1:{issuer.server_port}/keys"
        auth = {"jwks_url": url, "jwks_refresh_seconds": 1, "jwks_max_stale_seconds": 12}
        async with running_server(folder, config(auth)) as server:
            async with open_channel("127.0.0.1", server.grpc_port) as channel:
                assert await call(channel, *CALLS[0], token()) is Code.OK
                issuer.broken = True
                await server.wait_event("key_set_refresh_failed")
                assert await call(channel, *CALLS[0], token()) is Code.OK
            with trio.fail_after(60):
                await server.wait_event("key_set_stale")
                await server.wait_event("stopping")
                assert await server.wait_exit() == 70


async def test_issuer_that_is_away_at_the_start_is_named(folder: Path) -> None:
    with trio.fail_after(60):
        auth = {"jwks_url": "http://127.0.0.1:1/keys"}
        async with running_server(folder, config(auth), wait_ready=False) as server:
            assert await server.wait_exit() == 1
            await server.wait_ended()
    assert "pushd: auth.jwks_url: no usable key set could be fetched" in server.lines


async def test_without_the_block_the_header_is_not_read(folder: Path) -> None:
    document = config({})
    del document["auth"]
    async with running_server(folder, document) as server, open_channel("127.0.0.1", server.grpc_port) as channel:
        assert await call(channel, *CALLS[0], "nonsense") is Code.OK
        server.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await server.wait_exit() == 0
