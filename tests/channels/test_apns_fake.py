"""APNs over real TLS: against the fake in its own process, and against servers nobody should talk to."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import hpack
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fakes._hpack import Decoder
from fakes._tls import Authority, server_context
from fakes.launch import RunningFake, launch
from pushd.channels.apns import ApnsChannel, ApnsRequest, make_apns_channel
from pushd.channels.http2 import Http2Client, open_http2_client, provider_origin
from pushd.model import Channel, Delivered, Delivery, DeliveryConfig, Mismatch, Outcome, Rejected, Terminal, Transient
from tests.support.privacy import captured_logs

BUNDLE_ID = "org.example.app"


@pytest.fixture(scope="module")
def process() -> Iterator[RunningFake]:
    with launch("apns") as fake:
        yield fake


@pytest.fixture
def fake(process: RunningFake) -> RunningFake:
    while process.stats()["connections_open"]:  # the last test's have to be gone before requests are counted
        time.sleep(0.001)
    process.tell("/settings", {"max_concurrent_streams": 1_000})
    process.tell("/latency", {"ms": 0})
    process.tell("/reset")
    return process


def delivery(token: str, sequence_id: int = 1, topic: bytes = b"\x01" * 33) -> Delivery:
    return Delivery(sequence_id, topic, b"r" * 32, DeliveryConfig(Channel.APNS, token), b"\x09" * 32)


def make_channel(client: Http2Client, fake: RunningFake, *, ca_file: Path | None = None, url: str = "") -> ApnsChannel:
    return make_apns_channel(
        client,
        key_pem=Path(fake.facts["key"]).read_text(),
        key_id=fake.facts["key_id"],
        team_id=fake.facts["team_id"],
        bundle_id=BUNDLE_ID,
        environment="production",
        endpoint=url or fake.endpoint,
        ca_file=ca_file or fake.ca,
    )


@asynccontextmanager
async def open_channel(fake: RunningFake) -> AsyncIterator[ApnsChannel]:
    with trio.fail_after(60):
        async with open_http2_client() as client:
            yield make_channel(client, fake)


async def push_many(channel: ApnsChannel, count: int) -> list[Outcome]:
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        outcomes.append(await channel.attempt(delivery(f"{number:064x}", number)))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    return outcomes


async def until_in_flight(fake: RunningFake, count: int) -> None:
    while fake.stats()["in_flight"] < count:  # noqa: ASYNC110  another process has no event to give
        await trio.sleep(0.001)


async def test_a_push_arrives_and_its_provider_token_verifies(fake: RunningFake) -> None:
    async with open_channel(fake) as channel:
        assert await channel.attempt(delivery("ab" * 32)) == Delivered()
    (request,) = fake.requests()
    assert request["headers"][":path"] == "/3/device/" + "ab" * 32
    assert request["headers"]["apns-topic"] == BUNDLE_ID


async def test_scripted_answers_by_token(fake: RunningFake) -> None:
    fake.script("01", {"status": 410, "reason": "Unregistered"})
    fake.script("02", {"status": 400, "reason": "BadDeviceToken", "chunks": 5, "trailing_ms": 20})
    fake.script("03", {"status": 503, "stall": "body", "body": "{}"}, {"status": 200})
    fake.script("04", {"reset": 2})
    fake.script("05", {"reset": 7}, {"status": 200})
    fake.script("06", {"status": 403, "reason": "ExpiredProviderToken"})
    async with open_channel(fake) as channel:
        expected: list[tuple[str, Outcome]] = [
            ("01", Terminal("Unregistered")),
            ("02", Mismatch("BadDeviceToken")),
            ("03", Transient("http_503", 1.0)),
            ("03", Delivered()),
            ("04", Transient("reset", 1.0)),
            ("05", Delivered()),
            ("06", Delivered()),
        ]
        for token, outcome in expected:
            assert await channel.attempt(delivery(token)) == outcome


async def test_the_fake_refuses_what_apple_refuses(fake: RunningFake) -> None:
    async with open_channel(fake) as channel:
        sender, origin = channel._sender, channel._origin
        wrong_type = ApnsRequest(origin, "ab", BUNDLE_ID, b"{}", push_type="silent")
        wrong_priority = ApnsRequest(origin, "ab", BUNDLE_ID, b"{}", priority=7)
        too_large = ApnsRequest(origin, "ab", BUNDLE_ID, b"x" * 4_097)
        long_collapse = ApnsRequest(origin, "ab", BUNDLE_ID, b"{}", collapse_id="x" * 65)
        assert await sender.send(wrong_type) == Rejected("InvalidPushType")
        assert await sender.send(wrong_priority) == Rejected("BadPriority")
        assert await sender.send(too_large) == Rejected("PayloadTooLarge")
        assert await sender.send(long_collapse) == Rejected("BadCollapseId")


async def test_the_stream_limit_falls_to_1_and_rises_again_under_load_B039_B043(fake: RunningFake) -> None:
    fake.tell("/latency", {"ms": 5})
    async with open_channel(fake) as channel:
        assert await channel.attempt(delivery("ab")) == Delivered()
        fake.tell("/settings", {"max_concurrent_streams": 1})
        assert await push_many(channel, 20) == [Delivered()] * 20
        fake.tell("/settings", {"max_concurrent_streams": 1_000})
        assert await push_many(channel, 256) == [Delivered()] * 256


async def test_goaway_under_load_loses_no_push(fake: RunningFake) -> None:
    fake.tell("/latency", {"ms": 50})
    async with open_channel(fake) as channel, trio.open_nursery() as nursery:

        async def leave() -> None:
            await until_in_flight(fake, 100)
            fake.tell("/goaway", {"code": 0, "debug": '{"reason":"Shutdown"}'})

        assert await channel.attempt(delivery("ab")) == Delivered()
        nursery.start_soon(leave)
        assert await push_many(channel, 200) == [Delivered()] * 200
    assert fake.stats()["requests"] >= 201


async def test_cut_connections_fail_fast_and_the_next_send_reconnects_B031(fake: RunningFake) -> None:
    fake.tell("/latency", {"ms": 60_000})
    async with open_channel(fake) as channel, trio.open_nursery() as nursery:

        async def cut() -> None:
            await until_in_flight(fake, 32)
            fake.tell("/close")

        nursery.start_soon(cut)
        assert await push_many(channel, 32) == [Transient("closed", 1.0)] * 32
        fake.tell("/latency", {"ms": 0})
        assert await channel.attempt(delivery("ab")) == Delivered()


async def test_nothing_private_is_logged_at_any_level_T133(fake: RunningFake) -> None:
    token, topic = "c0ffee" * 10 + "abcd", b"\x01" + bytes(range(200, 232))
    fake.script(token, {"status": 400, "reason": f"{token} {topic.hex()}"}, {"close": True}, {"reset": 2})
    with captured_logs() as logged:
        async with open_channel(fake) as channel:
            for _ in range(4):
                await channel.attempt(delivery(token, topic=topic))
    authorization = fake.requests()[0]["headers"]["authorization"].split()[1]
    for text in (token, topic.hex(), authorization, "/3/device", BUNDLE_ID):
        assert text not in logged.getvalue()


@asynccontextmanager
async def tls_server(context: ssl.SSLContext, host: str = "127.0.0.1") -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that handshakes, keeps what it is sent and answers nothing."""
    received: list[bytes] = []

    async def keep(stream: trio.SSLStream[trio.SocketStream]) -> None:
        try:
            while data := await stream.receive_some():
                received.append(bytes(data))
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_ssl_over_tcp_listeners(0, context, host=host)
        nursery.start_soon(trio.serve_listeners, keep, listeners)
        yield listeners[0].transport_listener.socket.getsockname()[1], received
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("fault", ["wrong name", "untrusted", "http/1.1 only", "no alpn"])
async def test_a_server_that_cannot_be_apns_gets_no_request_B037(fake: RunningFake, tmp_path: Path, fault: str) -> None:
    authority = Authority()
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes((Authority() if fault == "untrusted" else authority).pem)
    alpn = {"http/1.1 only": ("http/1.1",), "no alpn": ()}.get(fault, ("h2",))
    host = "127.0.0.2" if fault == "wrong name" else "127.0.0.1"
    context = server_context(authority.issue(), tmp_path, alpn)
    with trio.fail_after(30):
        async with open_http2_client() as client, tls_server(context, host) as (port, received):
            channel = make_channel(client, fake, ca_file=trusted, url=f"https://{host}:{port}")
            assert await channel.attempt(delivery("ab" * 32)) == Transient("tls", 1.0)
            assert received == []


async def test_nobody_listening_is_transient(fake: RunningFake) -> None:
    with trio.fail_after(30):
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        await listeners[0].aclose()
        async with open_http2_client() as client:
            channel = make_channel(client, fake, url=f"https://127.0.0.1:{port}")
            assert await channel.attempt(delivery("ab")) == Transient("connect", 1.0)


@pytest.mark.parametrize(
    ("endpoint", "authority"),
    [
        (None, "api.push.apple.com"),
        ("https://127.0.0.1:2197", "127.0.0.1:2197"),
        ("https://[::1]:2197/", "[::1]:2197"),
        ("http://localhost:80", "localhost:80"),
        ("https://localhost", "localhost"),
    ],
)
def test_an_endpoint_becomes_an_origin(endpoint: str | None, authority: str) -> None:
    origin = provider_origin("api.push.apple.com", endpoint, None, pings=True)
    assert origin.authority == authority
    assert (origin.tls is None) == (endpoint is not None and endpoint.startswith("http:"))


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["apns-topic", ":path", "authorization", "x"]),
                st.text("abc/019 ~.\u00fc", max_size=60),
                st.booleans(),
            ),
            max_size=6,
        ),
        max_size=8,
    ),
    st.booleans(),
    st.sampled_from([0, 64, 4_096]),
)
def test_the_fake_reads_header_blocks_as_any_encoder_writes_them(
    blocks: list[list[tuple[str, str, bool]]], huffman: bool, table_bytes: int
) -> None:
    encoder, decoder = hpack.Encoder(), Decoder()
    encoder.header_table_size = table_bytes
    for block in blocks:
        fields = [(name.encode("latin-1"), value.encode("latin-1"), private) for name, value, private in block]
        expected = {name: value for name, value, _ in block}
        assert decoder.decode(encoder.encode(fields, huffman=huffman)) == expected
