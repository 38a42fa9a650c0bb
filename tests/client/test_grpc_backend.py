"""The calls themselves: what a peer, a proxy or the network may do to them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import socket
import ssl

import anyio
import pytest
import trio
import trustme

from pushd.client import (
    CallFailed,
    Enabled,
    Failed,
    NotificationsDelayed,
    NotificationsStopped,
    UnusableToken,
    connection,
    grpc_backend,
)
from pushd.client.client import Client
from pushd.client.database import open_database
from pushd.client.grpc_backend import Address, GrpcBackend, open_backend, read_address
from pushd.errors import Code
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2, query_pb2
from tests.client.peer import Answer, Reaction, running_peer, running_proxy
from tests.client.rig import CONFIG, INSTALLATION, Clock

SECRET = "hunter2-0123456789abcdef"
STATE = wire.RecipientState(topic_count=3, channel=wire.CHANNEL_FCM, expires_at_ns=10**18)
GOOD = Answer(message=STATE.SerializeToString())
REGISTER = wire.RegisterRequest(recipient_id=bytes(32), recipient_secret=bytes(32))


def address(port: int) -> Address:
    return read_address(f"http://127.0.0.1:{port}", None, allow_plaintext=False)


async def failure(backend: GrpcBackend) -> Code:
    with trio.fail_after(30), pytest.raises(CallFailed) as caught:
        await backend.register(REGISTER)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert str(caught.value) == f"the backend call ended with {caught.value.code.name}"
    return caught.value.code


def is_registered(client: Client) -> bool:
    state = client.notification_state()
    assert isinstance(state, Enabled)
    return state.registered


async def test_answer_is_read_and_connections_are_kept_by_purpose() -> None:
    async with running_peer(GOOD) as peer, open_backend(address(peer.port)) as backend:
        for _ in range(3):
            assert await backend.register(REGISTER) == STATE
        assert peer.connections == 1
        await backend.publish(publish_pb2.PublishRequest())
        await backend.query(query_pb2.QueryRequest())
        assert peer.connections == 2  # messages never wait behind a batch of subscriptions
        assert {headers[b":path"].decode() for headers in peer.requests} == {
            "/xmtp.backend.v1.NotificationService/Register",
            "/xmtp.backend.v1.PublishService/Publish",
            "/xmtp.backend.v1.QueryService/Query",
        }


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
async def test_status_of_the_backend_arrives_without_its_text(code: Code) -> None:
    answer = Answer(code.value, SECRET.encode())
    async with running_peer(answer) as peer, open_backend(address(peer.port)) as backend:
        assert await failure(backend) is code


@pytest.mark.parametrize(
    ("reaction", "code"),
    [
        pytest.param(Answer(None, http_status=403), Code.UNAVAILABLE, id="http-403"),
        pytest.param(Answer(None, http_status=404), Code.UNAVAILABLE, id="http-404"),
        pytest.param(Answer(None, http_status=503), Code.UNAVAILABLE, id="http-503"),
        pytest.param(Answer(None, message=b"<html>"), Code.UNAVAILABLE, id="captive-portal"),
        pytest.param(Answer(0), Code.INTERNAL, id="ok-without-message"),
        pytest.param(Answer(0, message=b"\xff\xff"), Code.INTERNAL, id="not-protobuf"),
        pytest.param(Answer(99), Code.UNKNOWN, id="unknown-status"),
        pytest.param("cut", Code.UNAVAILABLE, id="cut"),
        pytest.param("reset", Code.UNAVAILABLE, id="reset"),
        pytest.param("refuse", Code.UNAVAILABLE, id="refused-twice"),
        pytest.param("goaway", Code.UNAVAILABLE, id="goaway-twice"),
    ],
)
async def test_what_is_not_the_backends_word_is_tried_again(reaction: Reaction, code: Code) -> None:
    async with running_peer(reaction) as peer, open_backend(address(peer.port)) as backend:
        assert await failure(backend) is code


@pytest.mark.parametrize("first", ["refuse", "goaway"])
async def test_call_the_server_has_not_seen_is_made_again_once(first: str) -> None:
    reactions: list[Reaction] = [first, GOOD]
    async with running_peer(lambda path: reactions.pop(0)) as peer, open_backend(address(peer.port)) as backend:
        assert await backend.register(REGISTER) == STATE
        assert len(peer.requests) == 2
        assert peer.connections == (2 if first == "goaway" else 1)


async def test_lost_connection_ends_calls_at_once_and_is_replaced() -> None:
    reactions: list[Reaction] = ["cut", GOOD]
    async with running_peer(lambda path: reactions.pop(0)) as peer, open_backend(address(peer.port)) as backend:
        assert await failure(backend) is Code.UNAVAILABLE
        assert await backend.register(REGISTER) == STATE
        assert peer.connections == 2


async def test_nobody_listening_is_unavailable(caplog) -> None:
    caplog.set_level(logging.INFO)
    with trio.socket.socket() as closed:
        await closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        async with open_backend(address(port)) as backend:
            assert await failure(backend) is Code.UNAVAILABLE
    assert str(port) not in caplog.text


async def test_deadline_of_the_caller_is_sent_along_and_frees_the_stream() -> None:
    async with running_peer("silent") as peer, open_backend(address(peer.port)) as backend:
        with trio.move_on_after(0.2) as scope:
            await backend.register(REGISTER)
        assert scope.cancelled_caught
        assert peer.requests[0][b"grpc-timeout"].endswith(b"u")
        assert 0 < int(peer.requests[0][b"grpc-timeout"][:-1]) <= 200_001
        peer.react = lambda path: GOOD
        assert await backend.register(REGISTER) == STATE
        assert peer.connections == 1
        assert b"grpc-timeout" not in peer.requests[1]


async def test_call_that_is_given_up_is_cancelled_on_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", math.inf)  # nothing else makes the connection write
    seen = trio.Event()

    def react(path: str) -> Reaction:
        seen.set()
        return "silent"

    async with running_peer(react) as peer, open_backend(address(peer.port)) as backend:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(backend.register, REGISTER)
                await seen.wait()
                nursery.cancel_scope.cancel()
            await peer.cancelled.wait()


async def test_silent_server_is_pinged_and_one_that_is_dead_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.1)
    async with running_peer("silent") as peer, open_backend(address(peer.port)) as backend:
        with trio.move_on_after(1):
            await backend.register(REGISTER)
        assert peer.pings >= 3  # alive, if slow: the call may go on
        assert peer.connections == 1
    async with running_peer("silent", answer_pings=False) as peer, open_backend(address(peer.port)) as backend:
        assert await failure(backend) is Code.UNAVAILABLE


async def test_unused_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    async with running_peer(GOOD) as peer, open_backend(address(peer.port)) as backend:
        await backend.register(REGISTER)
        with trio.fail_after(30):
            await peer.idle.wait()
        assert await backend.register(REGISTER) == STATE
        assert peer.connections == 2


async def test_more_calls_than_the_server_allows_wait_for_their_turn() -> None:
    running = peak = 0

    async def call(backend: GrpcBackend) -> None:
        nonlocal running, peak
        await backend.register(REGISTER)

    async with running_peer(GOOD) as peer, open_backend(address(peer.port)) as backend:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(400):  # four times the streams h2 allows by default
                    nursery.start_soon(call, backend)
        assert len(peer.requests) == 400
        assert peer.connections == 1


async def test_stalled_network_is_left_by_the_deadline_and_found_again() -> None:
    async with running_peer(GOOD) as peer, running_proxy(peer.port) as proxy:
        async with open_backend(address(proxy.port)) as backend:
            await backend.register(REGISTER)
            proxy.stall()
            with trio.move_on_after(0.1) as scope:
                await backend.register(REGISTER)
            assert scope.cancelled_caught
            proxy.flow()
            with trio.fail_after(30):
                assert await backend.register(REGISTER) == STATE
            proxy.cut()
            with trio.fail_after(30):
                while proxy.connections < 2:  # the cut is noticed at once or by the next call
                    with contextlib.suppress(CallFailed):
                        assert await backend.register(REGISTER) == STATE
            assert await backend.register(REGISTER) == STATE


async def test_token_is_asked_for_before_each_call() -> None:
    tokens = iter(("one", "two"))

    async def token() -> str:
        await trio.lowlevel.checkpoint()
        return next(tokens)

    async with running_peer(GOOD) as peer, open_backend(address(peer.port), token) as backend:
        await backend.register(REGISTER)
        await backend.register(REGISTER)
        assert [headers[b"authorization"] for headers in peer.requests] == [b"Bearer one", b"Bearer two"]


@pytest.mark.parametrize("text", ["", "sesame\n", "ses ame", "sesame\u2026", "a\r\nb: c", "\0", "\x7f"])
async def test_token_that_no_header_can_carry_is_named_and_not_told(text: str) -> None:
    async def token() -> str:
        return text

    async with running_peer(GOOD) as peer, open_backend(address(peer.port), token) as backend:
        with trio.fail_after(30), pytest.raises(UnusableToken) as caught:
            await backend.register(REGISTER)
        error = caught.value
        assert error.__cause__ is error.__context__ is None
        assert (str(error), error.args) == (str(UnusableToken()), UnusableToken().args)
        assert peer.requests == []


async def test_notifications_go_on_trying_with_the_next_token(tmp_path, caplog) -> None:
    tokens = iter(("sesame\n", "sesame\n", "sesame"))
    clock = Clock()

    async def token() -> str:
        return next(tokens)

    async with running_peer(GOOD) as peer, open_backend(address(peer.port), token) as backend:
        with open_database(tmp_path / "client.db", INSTALLATION) as db:
            client = Client(db, backend, clock.now_ns, runner=True)
            with trio.fail_after(30), pytest.raises(UnusableToken):
                await client.enable_notifications(CONFIG)
            for _ in range(2):
                assert not is_registered(client)
                clock.advance(60 * 10**9)
                assert await client.tasks.run_due()
            assert is_registered(client)
    assert "sesame" not in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_handshake_that_stalls_fails_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.setattr(grpc_backend, "CONNECT_S", 0.1, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody says a word
        silent.setblocking(False)
        anyio.run(_call_in_vain, silent, backend=loop)


async def _call_in_vain(silent: socket.socket) -> None:
    where = read_address(f"https://127.0.0.1:{silent.getsockname()[1]}", None, allow_plaintext=False)
    codes: list[Code] = []

    async def publish() -> None:
        with pytest.raises(CallFailed) as caught:
            await backend.publish(publish_pb2.PublishRequest())
        codes.append(caught.value.code)

    async with open_backend(where) as backend:
        for _ in range(2):
            with anyio.fail_after(30):
                async with anyio.create_task_group() as together:
                    for _ in range(3):
                        together.start_soon(publish)
            with silent.accept()[0]:
                pass
            with pytest.raises(BlockingIOError):
                silent.accept()  # the three have shared one attempt
    assert codes == [Code.UNAVAILABLE] * 6


@pytest.mark.parametrize("alpn", [["h2"], ["http/1.1"], None], ids=["h2", "http1", "none"])
async def test_tls_wants_a_trusted_certificate_and_http2(alpn: list[str] | None, caplog) -> None:
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_context)
    if alpn:
        server_context.set_alpn_protocols(alpn)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async with running_peer(GOOD) as peer, trio.open_nursery() as nursery:

        async def handle(stream: trio.SSLStream) -> None:
            async with await trio.open_tcp_stream("127.0.0.1", peer.port) as plain:
                async with trio.open_nursery() as pumps:
                    pumps.start_soon(_pump, stream, plain, pumps.cancel_scope)
                    pumps.start_soon(_pump, plain, stream, pumps.cancel_scope)

        serve = functools.partial(trio.serve_ssl_over_tcp, host="127.0.0.1")
        listeners = await nursery.start(serve, handle, 0, server_context)
        url = f"https://localhost:{listeners[0].transport_listener.socket.getsockname()[1]}"
        async with open_backend(read_address(url, trusting, allow_plaintext=False)) as backend:
            if alpn == ["h2"]:
                assert await backend.register(REGISTER) == STATE
            else:
                assert await failure(backend) is Code.UNAVAILABLE
        if alpn == ["h2"]:
            async with open_backend(read_address(url, None, allow_plaintext=False)) as distrusting:
                caplog.set_level(logging.INFO)
                assert await failure(distrusting) is Code.UNAVAILABLE
                assert "SSLCertVerificationError" in caplog.text
        nursery.cancel_scope.cancel()


async def _pump(source: trio.abc.Stream, target: trio.abc.Stream, scope: trio.CancelScope) -> None:
    try:
        while data := await source.receive_some(65_536):
            await target.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel()


@pytest.mark.parametrize(
    "text",
    [
        "push.example.org:443",
        "ftp://push.example.org",
        "https://",
        "https://user@push.example.org",
        "https://push.example.org/path",
        "http://push.example.org",
        "http://10.0.0.1:5050",
    ],
)
def test_address_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_address(text, None, allow_plaintext=False)


@pytest.mark.parametrize(
    ("text", "authority", "encrypted"),
    [
        ("https://push.example.org", "push.example.org:443", True),
        ("https://push.example.org:5050/", "push.example.org:5050", True),
        ("http://localhost:5050", "localhost:5050", False),
        ("http://127.0.0.1:5050", "127.0.0.1:5050", False),
        ("http://[::1]:5050", "[::1]:5050", False),
    ],
)
def test_address_is_read(text: str, authority: str, encrypted: bool) -> None:
    read = read_address(text, None, allow_plaintext=False)
    assert (read.authority, read.tls is not None) == (authority, encrypted)


def test_plaintext_to_another_machine_can_be_asked_for() -> None:
    assert read_address("http://pushd:5050", None, allow_plaintext=True).tls is None


@pytest.mark.parametrize("code", [Code.PERMISSION_DENIED, Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
async def test_T163_nothing_of_the_backends_text_or_of_ours_shows_anywhere(tmp_path, caplog, code: Code) -> None:
    caplog.set_level(logging.DEBUG)
    token = "registration-token-4711"
    answer = Answer(code.value, f"{SECRET} {token}".encode())
    async with running_peer(answer) as peer, open_backend(address(peer.port)) as backend:
        with open_database(tmp_path / "client.db", INSTALLATION) as db:
            client = Client(db, backend, Clock().now_ns, runner=True)
            config = type(CONFIG)(type(CONFIG.delivery)(CONFIG.delivery.channel, token))
            stopped = code is Code.PERMISSION_DENIED
            with pytest.raises(NotificationsStopped if stopped else NotificationsDelayed) as caught:
                await client.enable_notifications(config)
            error, seen = caught.value, []
            while error is not None:
                seen += [str(error), repr(error), repr(error.__dict__)]
                error = error.__cause__ or error.__context__
            assert len(seen) == 3  # nothing hangs on to the error
            state = client.notification_state()
            assert isinstance(state, Failed) == stopped
            seen += [repr(state), str(state), repr(config), caplog.text]
            identity = db.execute("SELECT recipient_id, recipient_secret FROM settings").fetchone()
            for private in (SECRET, token, *(part.hex() for part in identity), *map(repr, identity)):
                assert not any(private in text for text in seen)
