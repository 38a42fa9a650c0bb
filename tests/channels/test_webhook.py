"""One webhook attempt: what is sent, to whom, and what each answer or failure comes to."""

from __future__ import annotations

import base64
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme
from standardwebhooks.webhooks import Webhook

from pushd.channels import webhook as module
from pushd.channels.https1 import client_context
from pushd.channels.webhook import WebhookChannel, WebhookRequest, parse_target
from pushd.core import webhook_answers as answers
from pushd.model import Channel, Delivered, Delivery, DeliveryConfig, Gone, Outcome, Rejected, Transient
from tests.channels.webhook_peer import (
    HOST,
    NO_CONTENT,
    Names,
    Stream,
    authority,
    open_peer,
    open_sender,
    server_context,
)
from tests.support.privacy import captured_logs

KEY = b"\x07" * 32
RECIPIENT = bytes(24) + (1).to_bytes(8, "big")
TOPIC = b"\x00" + b"\x42" * 16


def delivery(url: str, sequence_id: int = 7, key: bytes | None = KEY) -> Delivery:
    return Delivery(sequence_id, TOPIC, RECIPIENT, DeliveryConfig(Channel.HTTP, url, key), b"\x09" * 32)


def request(url: str) -> WebhookRequest:
    parsed = parse_target(url)
    assert parsed is not None
    return WebhookRequest(parsed, KEY, "an-id", b"{}")


async def attempt(url: str, names: Names | None = None, *, private: bool = True) -> Outcome:
    async with open_sender(names, private=private) as sender:
        with trio.fail_after(30):
            return await sender.send(request(url))


@pytest.fixture
def jumping_clock() -> trio.testing.MockClock:
    """Virtual time that jumps once nothing has moved for 20 ms: the sockets of these tests are real."""
    return trio.testing.MockClock(autojump_threshold=0.02)


# What is sent


async def test_t149_request_carries_what_a_receiver_needs_and_no_more() -> None:
    async with open_peer(NO_CONTENT, b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n") as peer:
        async with open_sender() as sender:
            channel = WebhookChannel(sender)
            before_s = int(time.time())
            assert await channel.attempt(delivery(peer.url("/hook?a=1#x"), 9_007_199_254_740_993)) == Delivered()
            assert await channel.attempt(delivery(peer.url("/hook?a=1#x"), 9_007_199_254_740_994)) == Delivered()
    first, second = peer.requests
    assert first.target == "/hook?a=1"
    assert {name: first[name] for name, _ in first.headers if not name.startswith("webhook-")} == {
        "host": f"{HOST}:{peer.port}",
        "user-agent": "pushd",
        "content-type": "application/json",
        "content-length": str(len(first.body)),
    }
    assert len(first.headers) == len({name for name, _ in first.headers}) == 7, "B087: each header once"
    assert uuid.UUID(first["webhook-id"])
    assert first["webhook-id"] != second["webhook-id"]
    assert before_s <= int(first["webhook-timestamp"]) <= before_s + 5
    receiver = Webhook("whsec_" + base64.b64encode(KEY).decode())
    assert receiver.verify(first.body, dict(first.headers)) == {
        "topic": base64.b64encode(TOPIC).decode(),
        "sequence_id": "9007199254740993",
        "recipient_id": RECIPIENT.hex(),
    }
    for encoded in (KEY, KEY.hex().encode(), base64.b64encode(KEY)):
        assert encoded not in first.body
    assert peer.server_names == [HOST]


async def test_retry_keeps_the_id_and_signs_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = int(datetime.now(UTC).timestamp())
    async with open_peer() as peer, open_sender() as sender:
        for shift_s in (0, 1):
            monkeypatch.setattr(sender, "_wall_clock", lambda shift_s=shift_s: now_s + shift_s + 0.9)
            await WebhookChannel(sender).attempt(delivery(peer.url()))
    first, retry = peer.requests
    assert first["webhook-id"] == retry["webhook-id"]
    assert [int(r["webhook-timestamp"]) for r in peer.requests] == [now_s, now_s + 1]
    assert first["webhook-signature"] != retry["webhook-signature"]
    for received in peer.requests:
        Webhook("whsec_" + base64.b64encode(KEY).decode()).verify(received.body, dict(received.headers))


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("not a URL", KEY),
        ("http://push.invalid/", KEY),
        ("https://user@push.invalid/", KEY),
        ("https://user:password@push.invalid/", KEY),
        ("https://:password@push.invalid/", KEY),
        ("https://push.invalid/", None),
        ("https://push.invalid/", b""),
    ],
)
async def test_t150_stored_junk_is_rejected_before_anything_is_asked(url: str, key: bytes | None) -> None:
    names = Names()
    async with open_sender(names) as sender:
        assert await WebhookChannel(sender).attempt(delivery(url, key=key)) == answers.UNUSABLE_TARGET
    assert names.asked == []


# What an answer comes to


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Delivered()),
        (201, Delivered()),
        (204, Delivered()),
        (299, Delivered()),
        (301, Rejected("redirect")),
        (302, Rejected("redirect")),
        (303, Rejected("redirect")),
        (307, Rejected("redirect")),
        (308, Rejected("redirect")),
        (304, Rejected("redirect")),
        (400, Rejected("status_4xx")),
        (401, Rejected("status_4xx")),
        (405, Rejected("status_4xx")),
        (413, Rejected("status_4xx")),
        (429, Rejected("status_4xx")),
        (404, Gone(404)),
        (410, Gone(410)),
        (500, Transient("status_5xx", 1.0)),
        (502, Transient("status_5xx", 1.0)),
        (503, Transient("status_5xx", 1.0)),
        (599, Transient("status_5xx", 1.0)),
        (600, Rejected("other_status")),
        (999, Rejected("other_status")),
    ],
)
def test_t152_status_decides(status: int, outcome: Outcome) -> None:
    assert answers.judge_status(status) == outcome


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["http://169.254.169.254/", "/elsewhere", "//10.0.0.1/"])
async def test_s049_redirect_is_rejected_and_not_followed(status: int, location: str) -> None:
    answer = f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
    names = Names()
    async with open_peer(answer) as peer:
        assert await attempt(peer.url(), names) == Rejected("redirect")
    assert len(peer.requests) == 1
    assert names.asked == [HOST]


async def test_s050_s055_nothing_an_answer_says_is_remembered() -> None:
    tempting = (
        b'HTTP/1.1 %s\r\nRefresh: 0; url=/x\r\nAlt-Svc: h2="10.0.0.1:443"\r\nLocation: /x\r\n'
        b"Set-Cookie: a=b\r\nWWW-Authenticate: Basic, NTLM\r\nRetry-After: 300\r\nContent-Length: 0\r\n\r\n"
    )
    async with open_peer(tempting % b"200 OK", tempting % b"401 No", tempting % b"503 No", NO_CONTENT) as peer:
        async with open_sender() as sender:
            outcomes = [await sender.send(request(peer.url())) for _ in range(4)]
    assert outcomes == [Delivered(), Rejected("status_4xx"), Transient("status_5xx", 1.0), Delivered()]
    assert peer.connections == 1
    assert all(r.target == "/hook" for r in peer.requests)
    names = [[name for name, _ in r.headers] for r in peer.requests]
    assert names == [names[0]] * 4
    assert not {"cookie", "authorization"} & set(names[0])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" + NO_CONTENT, Delivered()),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + NO_CONTENT, Delivered()),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 8 + NO_CONTENT, Delivered()),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 9 + NO_CONTENT, answers.NOT_HTTP),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", Rejected("other_status")),
        (b"HTTP/1.0 200 OK\r\n\r\n", Delivered()),
        (b"HTTP/2.1 200 OK\r\nContent-Length: 0\r\n\r\n", answers.NOT_HTTP),
        (b"HTTP/2 200\r\n\r\n", answers.NOT_HTTP),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", answers.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", answers.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\nBad Header\r\n\r\n", answers.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 101 + b"\r\n", answers.NOT_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 99 + b"Content-Length: 0\r\n\r\n", Delivered()),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 20_000 + b"\r\n\r\n", answers.NOT_HTTP),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"Abc: d\r\n" * 100_000, answers.NOT_HTTP, id="S052 100,000 headers"),
        pytest.param(b"HTTP/1.1 200 " + b"x" * 1_000_000, answers.NOT_HTTP, id="S052 status line without end"),
        pytest.param(
            b"HTTP/1.1 410 Gone\r\nContent-Length: 1073741824\r\n\r\n" + b"x" * 1_000_000, Gone(410), id="S052 1 GiB"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 60\r\n\r\n" + b"\x1f\x8b\x08" * 20,
            Delivered(),
            id="S052 a compressed body is not looked into",
        ),
    ],
)
async def test_b089_any_answer_is_classified_at_once(answer: bytes, outcome: Outcome) -> None:
    async with open_peer(answer) as peer:
        assert await attempt(peer.url()) == outcome
    assert len(peer.requests) == 1


async def test_endless_body_changes_no_outcome_and_ends_the_connection() -> None:
    async def flood(stream: Stream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await stream.send_all(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    async with open_peer(flood) as peer, open_sender() as sender:
        assert await sender.send(request(peer.url())) == Delivered()
        with trio.fail_after(10):
            await peer.wait_closed()
        assert repr(sender) == "WebhookSender(idle=0)"


PARTS = {"none": b"", "half": b"HTTP/1.1 2", "interim": b"HTTP/1.1 100 Continue\r\n\r\n"}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("hang_up", [Stream.aclose, trio.aclose_forcefully], ids=["goodbye", "cut"])
async def test_lost_connection_before_a_status_is_transient(
    part: bytes, hang_up: Callable[[Stream], Awaitable[None]]
) -> None:
    async def answer(stream: Stream) -> None:
        await stream.send_all(part)
        await hang_up(stream)

    async with open_peer(answer) as peer:
        assert await attempt(peer.url()) == answers.CONNECTION_LOST
    assert len(peer.requests) == 1


async def test_refused_connection_is_transient() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert await attempt(f"https://{HOST}:{closed.getsockname()[1]}/") == answers.NOT_CONNECTED


# Time


async def silent(stream: Stream) -> None:
    await stream.receive_some()  # until the sender has had enough


async def drip(stream: Stream) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n":
        await stream.send_all(bytes([byte]))
        await trio.sleep(9)


@pytest.mark.parametrize("answer", [silent, pytest.param(drip, id="S053 a byte every 9 s")])
async def test_answer_that_does_not_come_is_a_timeout_at_ten_seconds(
    answer: object, jumping_clock: trio.testing.MockClock
) -> None:
    async with open_peer(answer) as peer, open_sender() as sender:  # type: ignore[arg-type]
        started = trio.current_time()
        assert await sender.send(request(peer.url())) == answers.TIMED_OUT
        assert trio.current_time() - started == pytest.approx(10)
        await peer.wait_closed()


async def test_t154_stalled_lookup_is_a_timeout_at_ten_seconds(autojump_clock: trio.testing.MockClock) -> None:
    started = trio.current_time()
    assert await attempt("https://hangs.invalid/") == answers.TIMED_OUT
    assert trio.current_time() - started == pytest.approx(10)


async def test_stalled_handshake_is_a_timeout(jumping_clock: trio.testing.MockClock) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0] as listener:  # accepted by the kernel, read by nobody
        url = f"https://{HOST}:{listener.socket.getsockname()[1]}/"
        assert await attempt(url) == answers.TIMED_OUT


async def test_slow_body_does_not_delay_the_outcome(jumping_clock: trio.testing.MockClock) -> None:
    async def stall_in_body(stream: Stream) -> None:
        await stream.send_all(b"HTTP/1.1 503 Later\r\nContent-Length: 10\r\n\r\n12345")
        await silent(stream)

    async with open_peer(stall_in_body) as peer, open_sender() as sender:
        started = trio.current_time()
        assert await sender.send(request(peer.url())) == Transient("status_5xx", 1.0)
        assert trio.current_time() - started <= 0.25
        assert repr(sender) == "WebhookSender(idle=0)"


async def test_deadline_of_the_caller_after_the_status_keeps_the_outcome(jumping_clock: trio.testing.MockClock) -> None:
    async def late_then_stalled(stream: Stream) -> None:
        await trio.sleep(9.9)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        await silent(stream)

    async with open_peer(late_then_stalled) as peer, open_sender() as sender:
        outcome = None
        with trio.move_on_after(10):
            outcome = await sender.send(request(peer.url()))
        assert outcome == Delivered()


async def test_cancelled_attempt_closes_its_connection() -> None:
    async with open_peer(silent) as peer, open_sender() as sender:
        async with trio.open_nursery() as sending:
            sending.start_soon(sender.send, request(peer.url()))
            with trio.fail_after(10):
                while not peer.requests:  # noqa: ASYNC110
                    await trio.sleep(0.005)
            sending.cancel_scope.cancel()
        with trio.fail_after(10):
            await peer.wait_closed()


# Whom it is sent to


async def test_t151_no_address_is_transient() -> None:
    assert await attempt("https://none.invalid/", Names(**{"none.invalid": []})) == answers.NO_ADDRESS


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"])
async def test_t151_blocked_literal_is_rejected_without_lookup_or_connection(host: str) -> None:
    names = Names()
    async with open_peer() as peer:
        assert await attempt(peer.url(host=host), names, private=False) == answers.BLOCKED_ADDRESS
    assert (names.asked, peer.connections) == ([], 0)


@pytest.mark.parametrize("order", [1, -1])
async def test_t153_s035_one_blocked_address_rejects_the_attempt_every_time(order: int) -> None:
    names = Names(**{HOST: ["1.1.1.1", "127.0.0.1"][::order]})
    async with open_peer() as peer, open_sender(names, private=False) as sender:
        for _ in range(2):
            assert await sender.send(request(peer.url())) == answers.BLOCKED_ADDRESS
    assert names.asked == [HOST, HOST]
    assert peer.connections == 0


async def test_s038_name_that_turns_inside_is_not_reached_over_a_kept_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names()
    monkeypatch.setattr(module, "is_blocked", lambda address: str(address) == "127.0.0.2")
    async with open_peer() as peer, open_sender(names, private=False) as sender:
        assert await sender.send(request(peer.url())) == Delivered()
        names.table[HOST] = ["127.0.0.1", "127.0.0.2"]
        assert await sender.send(request(peer.url())) == answers.BLOCKED_ADDRESS
    assert len(peer.requests) == 1


async def test_s043_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with open_peer() as peer:
        assert await attempt(peer.url()) == Delivered()
    assert peer.requests[0].target == "/hook"


async def test_s044_address_that_refuses_is_passed_over() -> None:
    async with open_peer() as peer:
        names = Names(**{HOST: ["127.0.0.2", "::1", "127.0.0.1"]})
        assert await attempt(peer.url(), names) == Delivered()


async def test_s044_address_that_is_silent_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.1)
    async with open_peer() as peer:
        with socket.socket() as silent_listener, socket.socket() as first, socket.socket() as second:
            silent_listener.bind(("127.0.0.2", peer.port))
            silent_listener.listen(0)
            for filling in (first, second):  # a full queue makes Linux drop further connection requests
                filling.setblocking(False)
                filling.connect_ex(("127.0.0.2", peer.port))
            names = Names(**{HOST: ["127.0.0.2", "127.0.0.1"]})
            assert await attempt(peer.url(), names) == Delivered()


async def test_no_more_than_four_addresses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def refuse(_url: object, address: object, _tls: object, **_: object) -> None:
        await trio.lowlevel.checkpoint()
        tried.append(str(address))
        raise OSError

    monkeypatch.setattr(module, "connect", refuse)
    names = Names(**{HOST: ["2a00::1", "2a00::2", "2a00::3", "2a00::4", "2a00::5", "1.1.1.1"]})
    assert await attempt(f"https://{HOST}/", names, private=False) == answers.NOT_CONNECTED
    assert tried == ["2a00::1", "1.1.1.1", "2a00::2", "2a00::3"]


# TLS


def old_tls() -> ssl.SSLContext:
    context = server_context(HOST)
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(lambda: server_context("elsewhere.invalid"), id="another name"),
        pytest.param(lambda: server_context(HOST, issuer=trustme.CA()), id="unknown authority"),
        pytest.param(lambda: server_context(HOST, not_after=datetime(2020, 1, 1, tzinfo=UTC)), id="expired"),
        pytest.param(lambda: server_context("*.push.invalid"), id="wildcard below the name"),
        pytest.param(lambda: server_context("elsewhere.invalid", common_name=HOST), id="common name only"),
        pytest.param(old_tls, id="TLS 1.1"),
    ],
)
async def test_s046_peer_that_is_not_the_host_gets_no_http_byte(context: object) -> None:
    async with open_peer(context=context()) as peer:  # type: ignore[operator]
        assert await attempt(peer.url()) == answers.TLS_FAILED
        with trio.fail_after(10):
            await peer.wait_closed()
    assert (peer.connections, peer.requests) == (1, [])


@pytest.mark.parametrize(
    ("host", "listen"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("[::ffff:127.0.0.1]", "127.0.0.1")]
)
async def test_s047_address_in_the_url_must_be_in_the_certificate_and_is_not_sent(host: str, listen: str) -> None:
    literal = host.strip("[]")
    async with open_peer(context=server_context(literal), address=listen) as peer:
        assert await attempt(peer.url(host=host)) == Delivered()
    assert peer.server_names == [None]
    assert peer.requests[0]["host"].rpartition(":")[0].startswith(host[:6])
    async with open_peer(context=server_context(HOST), address=listen) as peer:
        assert await attempt(peer.url(host=host)) == answers.TLS_FAILED


async def test_name_with_an_underscore_is_sent_as_it_is() -> None:
    host = "my_hook.hosts.invalid"
    async with open_peer() as peer:
        # OpenSSL lets no wildcard stand for an underscore; that the name went out is what an IDNA codec would prevent.
        assert await attempt(peer.url(host=host), Names(**{host: ["127.0.0.1"]})) == answers.TLS_FAILED
    assert peer.server_names == [host]


def test_client_context_verifies_and_writes_no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    context = client_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.hostname_checks_common_name
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.keylog_filename is None


async def test_authority_from_a_file_is_accepted(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    authority().cert_pem.write_to_path(str(ca_file))
    async with open_peer() as peer, open_sender(tls=client_context(str(ca_file))) as sender:
        assert await sender.send(request(peer.url())) == Delivered()


# Connections


async def test_connection_is_kept_for_the_same_host_name() -> None:
    with_body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    names = Names()
    async with open_peer(with_body, chunked, NO_CONTENT) as peer, open_sender(names) as sender:
        for path in ("/a", "/b", "/c", "/d"):
            assert await sender.send(request(peer.url(path))) == Delivered()
        assert (peer.connections, len(peer.requests)) == (1, 4)
        assert names.asked == [HOST] * 4, "every attempt resolves"


async def test_connection_is_never_shared_between_host_names_on_one_address() -> None:
    names = Names(**{"other.invalid": ["127.0.0.1"]})
    async with open_peer() as peer, open_sender(names) as sender:
        for host in (HOST, "other.invalid", HOST, "other.invalid"):
            assert await sender.send(request(peer.url(host=host))) == Delivered()
    assert peer.connections == 2
    assert peer.server_names == [HOST, "other.invalid"]


async def test_connection_is_dropped_when_the_host_moved() -> None:
    names = Names()
    async with open_peer() as peer, open_sender(names) as sender:
        await sender.send(request(peer.url()))
        names.table[HOST] = ["127.0.0.2"]
        assert await sender.send(request(peer.url())) == answers.NOT_CONNECTED
        names.table[HOST] = ["127.0.0.2", "127.0.0.1"]
        assert await sender.send(request(peer.url())) == Delivered()
        assert await sender.send(request(peer.url())) == Delivered()
    assert peer.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + b"x" * 20_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        pytest.param(NO_CONTENT + NO_CONTENT, id="an answer nobody asked for, in the same record"),
    ],
)
async def test_connection_is_not_kept_after(answer: bytes) -> None:
    async with open_peer(answer) as peer, open_sender() as sender:
        assert await sender.send(request(peer.url())) == Delivered()
        assert await sender.send(request(peer.url())) == Delivered()
    assert peer.connections == 2


async def test_answer_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    async def twice(stream: Stream) -> None:
        await stream.send_all(NO_CONTENT)
        await stream.send_all(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")

    async with open_peer(twice) as peer, open_sender() as sender:
        assert await sender.send(request(peer.url())) == Delivered()
        await trio.sleep(0.05)
        assert await sender.send(request(peer.url())) == Delivered()
    assert peer.connections == 2


async def test_connection_the_peer_closed_costs_no_attempt() -> None:
    async def answer_and_leave(stream: Stream) -> None:
        await stream.send_all(NO_CONTENT)
        await stream.aclose()

    async with open_peer(answer_and_leave) as peer, open_sender() as sender:
        for _ in range(3):
            assert await sender.send(request(peer.url())) == Delivered()
            with trio.fail_after(10):
                await peer.wait_closed()
    assert peer.connections == 3


async def test_idle_connections_are_closed_in_time_and_at_the_end(jumping_clock: trio.testing.MockClock) -> None:
    async with open_peer() as peer:
        async with open_sender() as sender:
            await sender.send(request(peer.url()))
            started = trio.current_time()
            await peer.wait_closed()
            assert module.IDLE_S / 2 <= trio.current_time() - started <= module.IDLE_S * 1.5
            await sender.send(request(peer.url()))
            assert repr(sender) == "WebhookSender(idle=1)"
        with trio.fail_after(10):
            await peer.wait_closed()


async def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IDLE", 4)
    names = Names(**{f"{n}.hosts.invalid": ["127.0.0.1"] for n in range(8)})
    async with open_peer() as peer, open_sender(names) as sender:
        for n in range(8):
            assert await sender.send(request(peer.url(host=f"{n}.hosts.invalid"))) == Delivered()
        assert repr(sender) == "WebhookSender(idle=4)"
        for n in range(4, 8):
            assert await sender.send(request(peer.url(host=f"{n}.hosts.invalid"))) == Delivered()
    assert peer.connections == 8, "the newest four were kept"


async def test_b053_b131_cancelled_attempts_take_nothing_from_those_that_follow() -> None:
    baseline = trio.lowlevel.current_statistics().tasks_living
    async with open_peer() as peer, open_sender() as sender:

        async def cut_short(n: int) -> None:
            with trio.move_on_after((n % 50) * 0.0005):
                await sender.send(request(peer.url()))

        with trio.fail_after(60):
            for batch in range(20):
                async with trio.open_nursery() as sending:
                    for n in range(50):
                        sending.start_soon(cut_short, batch + n)
        outcomes: list[Outcome] = []

        async def send_one() -> None:
            outcomes.append(await sender.send(request(peer.url())))

        with trio.fail_after(60):
            async with trio.open_nursery() as sending:
                for _ in range(256):
                    sending.start_soon(send_one)
        assert outcomes == [Delivered()] * 256
    assert trio.lowlevel.current_statistics().tasks_living == baseline


# Privacy


async def test_t155_nothing_is_logged_and_nothing_shows_in_a_repr() -> None:
    with captured_logs() as logged:
        async with open_peer(NO_CONTENT, b"junk\r\n\r\n") as peer, open_sender() as sender:
            for _ in range(2):
                await WebhookChannel(sender).attempt(delivery(peer.url("/secret-path")))
            await sender.send(request(f"https://{HOST}:1/secret-path"))
    private = (
        HOST,
        "secret-path",
        KEY.hex(),
        RECIPIENT.hex(),
        base64.b64encode(TOPIC).decode(),
        "an-id",
        str(peer.port),
    )
    shown = logged.getvalue()
    shown += repr(sender) + repr(request(peer.url())) + repr(delivery(peer.url()))
    assert not [text for text in private if text in shown]
