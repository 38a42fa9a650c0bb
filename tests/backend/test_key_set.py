"""The issuer's key set: fetched in the background, bounded, kept through failures, given up when too old."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from joserfc.jwk import ECKey

from pushd.backend.key_set import FETCH_S, MAX_BODY_BYTES, KeySet, KeySetSettings, KeySetStale, http_fetch, run_key_set
from pushd.errors import StartError
from pushd.telemetry import Metrics

SETTINGS = KeySetSettings(refresh_s=300, max_stale_s=3_600)


def document(*kids: str) -> bytes:
    return json.dumps(
        {"keys": [{**ECKey.generate_key("P-256").as_dict(private=False), "alg": "ES256", "kid": kid} for kid in kids]}
    ).encode()


class Script:
    """Answers each fetch with the next body, the last one for ever, and notes when it was asked."""

    def __init__(self, *bodies: bytes | None) -> None:
        self.bodies = list(bodies)
        self.times: list[float] = []

    async def __call__(self) -> bytes | None:
        self.times.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        return self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


async def test_rotation_replaces_the_whole_set(autojump_clock: trio.testing.MockClock, metrics: Metrics) -> None:
    keys, script = KeySet((), metrics), Script(document("a"), document("b", "c"))
    async with trio.open_nursery() as nursery:
        await nursery.start(run_key_set, keys, script, SETTINGS, metrics)
        assert [key.kid for key in keys.keys] == ["a"]
        assert value(metrics, "xmtp_auth_keys") == 1
        await trio.sleep(331)
        assert [key.kid for key in keys.keys] == ["b", "c"]
        assert value(metrics, "xmtp_auth_keys") == 2
        assert 300 <= script.times[1] - script.times[0] <= 330
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("useless", [None, b"", b'{"keys":[]}', b"<html>"])
async def test_start_fails_after_three_useless_fetches_a_second_apart(
    autojump_clock: trio.testing.MockClock, metrics: Metrics, useless: bytes | None
) -> None:
    script = Script(useless)
    with pytest.raises(StartError, match=r"^auth\.jwks_url"):
        await run_key_set(KeySet((), metrics), script, SETTINGS, metrics)
    assert [at - script.times[0] for at in script.times] == [0, 1, 2]
    assert value(metrics, "xmtp_auth_jwks_refresh_total", result="error") == 3


async def test_start_survives_two_failures(autojump_clock: trio.testing.MockClock, metrics: Metrics) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(run_key_set, KeySet((), metrics), Script(None, b"", document("a")), SETTINGS, metrics)
        nursery.cancel_scope.cancel()


async def test_old_keys_serve_through_an_outage_and_no_longer_than_allowed(
    autojump_clock: trio.testing.MockClock, metrics: Metrics
) -> None:
    keys, script = KeySet((), metrics), Script(document("a"), None)
    start = trio.current_time()
    with pytest.RaisesGroup(KeySetStale):
        async with trio.open_nursery() as nursery:
            await nursery.start(run_key_set, keys, script, SETTINGS, metrics)
            await trio.sleep(3_599)
            assert [key.kid for key in keys.keys] == ["a"]
            await trio.sleep_forever()
    assert trio.current_time() - start == 3_600


async def test_recovery_starts_the_allowance_anew(autojump_clock: trio.testing.MockClock, metrics: Metrics) -> None:
    keys, script = KeySet((), metrics), Script(document("a"), *[None] * 9, document("b"), None)
    start = trio.current_time()
    with pytest.RaisesGroup(KeySetStale):
        async with trio.open_nursery() as nursery:
            await nursery.start(run_key_set, keys, script, SETTINGS, metrics)
    assert [key.kid for key in keys.keys] == ["b"]
    assert script.times[10] - start + 3_600 == trio.current_time() - start


Handle = Callable[[trio.SocketStream], Awaitable[None]]


@asynccontextmanager
async def http_server(handle: Handle) -> AsyncIterator[str]:
    async def guarded(stream: trio.SocketStream) -> None:
        try:
            await stream.receive_some(65_536)
            await handle(stream)
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, guarded, 0)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/keys"
        nursery.cancel_scope.cancel()


def answer(head: str, body: bytes = b"") -> Handle:
    async def handle(stream: trio.SocketStream) -> None:
        await stream.send_all(f"HTTP/1.1 {head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    return handle


async def endless(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        await stream.send_all(b"4000\r\n" + b" " * 0x4000 + b"\r\n")


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        (answer("200 OK", b"keys"), b"keys"),
        (answer("200 OK", b" " * MAX_BODY_BYTES), b" " * MAX_BODY_BYTES),
        (answer("200 OK", b" " * (MAX_BODY_BYTES + 1)), None),
        (answer("302 Found\r\nlocation: /elsewhere"), None),
        (answer("500 Oops", b"keys"), None),
        (answer("nonsense"), None),
        (endless, None),
    ],
    ids=["good", "largest", "too-large", "redirect", "error", "not-http", "endless"],
)
async def test_fetch_takes_a_bounded_200_and_nothing_else(handle: Handle, expected: bytes | None) -> None:
    with trio.fail_after(30):
        async with http_server(handle) as url:
            assert await http_fetch(url)() == expected


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/keys", "http://127.0.0.1:1/keys\n", "https://[v1.a]/", "https://issuer..example/"],
    ids=["refused", "line-break", "future-address", "empty-label"],
)
async def test_what_nothing_can_be_fetched_from_is_no_answer(url: str) -> None:
    with trio.fail_after(30):
        assert await http_fetch(url)() is None


async def test_slow_answer_is_given_up_in_time(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = 0.2  # real sockets: let them settle before time jumps

    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with http_server(silent) as url:
        start = trio.current_time()
        assert await http_fetch(url)() is None
        assert FETCH_S <= trio.current_time() - start < FETCH_S + 1


async def test_proxy_variables_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with trio.fail_after(30):
        async with http_server(answer("200 OK", b"keys")) as url:
            assert await http_fetch(url)() == b"keys"
