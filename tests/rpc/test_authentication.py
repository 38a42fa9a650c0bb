"""Bearer tokens at the edge, with a raw client: when they are asked for, and what the header may hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric import ec
from structlog.testing import capture_logs

from pushd.backend.key_set import KeySet
from pushd.config import Auth
from pushd.core.tokens import TrustedKey
from pushd.errors import Code
from pushd.rpc.authentication import Keys, make_authenticate
from pushd.telemetry import Metrics
from tests.rpc.harness import BIDI, CLIENT, HANG_STREAM, SERVER, UNARY, framed, over_both, raw_client, serving

pytestmark = over_both

KEY = ec.generate_private_key(ec.SECP256R1())
SUBJECT = "somebody-nobody-may-read-about"


def bearer(**claims: Any) -> str:
    body = {"exp": int(time.time()) + 600, "sub": SUBJECT, **claims}
    return "Bearer " + jwt.encode(body, KEY, algorithm="ES256", headers={"kid": "k1"})


def trusting(now_s: Callable[[], float] = time.time) -> dict[str, Any]:
    """Options of a server that trusts KEY."""
    metrics = Metrics()
    keys = KeySet((TrustedKey("k1", "ES256", KEY.public_key()),), metrics)
    return {"metrics": metrics, "authenticate": make_authenticate(Auth(), Keys(keys), metrics, now_s)}


@pytest.mark.parametrize("path", [UNARY, SERVER, CLIENT, BIDI, HANG_STREAM, "/no.Such/Method"])
async def test_headers_alone_are_answered(path: str) -> None:
    """No byte of a message was sent and none will be: the caller is refused all the same."""
    with trio.fail_after(10):
        async with serving(**trusting()) as server, raw_client(server.port) as client:
            answer = await client.answer(await client.open(None, end=False, p_path=path))
            assert (answer.code, answer.text) == (Code.UNAUTHENTICATED, "missing bearer token")
            assert answer.reset is None
            assert server.echo.hanging == 0
            assert server.value("xmtp_auth_rejections_total", reason="missing") == 1
            assert (await client.call(framed(b"x"), authorization=bearer())).code == Code.OK


@pytest.mark.parametrize("second", ["", "Bearer", "good", "Basic dTpw"])
async def test_the_header_given_twice_is_no_token(second: str) -> None:
    values = [bearer(), bearer() if second == "good" else second]
    with trio.fail_after(10), capture_logs() as logs:
        async with serving(**trusting(), log_calls=True) as server, raw_client(server.port) as client:
            for pair in (values, values[::-1]):
                stream_id = await client.open(framed(b"x"), more=[("authorization", value) for value in pair])
                answer = await client.answer(stream_id)
                assert (answer.code, answer.text) == (
                    Code.UNAUTHENTICATED,
                    "authorization header is not a bearer token",
                )
            assert server.value("xmtp_auth_rejections_total", reason="malformed") == 2
    text = repr(logs) + repr(client.answers)
    assert SUBJECT not in text
    assert not any(part in text for value in values for part in value.split(".")[1:])


async def test_an_open_stream_outlives_its_token() -> None:
    """A token is looked at when its call is opened, and not again."""
    now = time.time()
    with trio.fail_after(10):
        async with serving(**trusting(lambda: now)) as server, raw_client(server.port) as client:
            token = bearer()
            stream = await client.open(framed(b"1"), end=False, p_path=BIDI, authorization=token)
            await client.until(lambda: len(client.answers[stream].messages) == 1)
            now += 3_600
            late = await client.call(framed(b"x"), authorization=token)
            assert (late.code, late.text) == (Code.UNAUTHENTICATED, "token has expired")
            client.h2.send_data(stream, framed(b"2"), end_stream=True)
            await client.flush()
            answer = await client.answer(stream)
            assert (len(answer.messages), answer.code) == (2, Code.OK)
