"""grpcio as the client, in its own process, with and without TLS: one child a mode plays everything."""

from __future__ import annotations

import json
import sys

import pytest
import trio

from tests.rpc.grpcio_peer import message
from tests.rpc.harness import SERVICE, Tls, serving
from tests.rpc.test_malformed import Notification


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
async def test_grpcio_gets_what_gRPC_promises(secure: bool, tls: Tls) -> None:
    with trio.fail_after(90):
        async with serving(services=[Notification()], tls=tls.server if secure else None) as server:
            command = [sys.executable, "-m", "tests.rpc.grpcio_peer", "client", str(server.port)]
            done = await trio.run_process(command + ([str(tls.ca_pem)] if secure else []), capture_stdout=True)
            assert server.echo.hanging == 0, "neither the deadline nor the cancelled call left its handler behind"
    said = json.loads(done.stdout)
    reflection = said.pop("reflection")
    assert said == {
        "unary": message(b"hello").hex(),
        "server": [message(b).hex() for b in (b"a", b"b", b"c")],
        "client": message(b"ab").hex(),
        "bidi": [message(b"1").hex(), message(b"2").hex()],
        "deadline": ["DEADLINE_EXCEEDED", said["deadline"][1]],
        "cancelled": True,
        "gzip": ["UNIMPLEMENTED", "compressed messages are not supported"],
        "unknown": ["UNIMPLEMENTED", "method is not served"],
        "garbage": ["INVALID_ARGUMENT", "request is malformed"],
        "large": True,
        "many": 300,
        "request id": 36,
        "health": "0801",
    }
    assert reflection == {
        "services": [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            SERVICE,
            "xmtp.backend.v1.NotificationService",
        ],
        "methods": ["Register", "Unregister", "UpdateSubscriptions"],
        "field": 5,
    }
