"""What is around every method: order of checks, statuses, what a caller never learns, metrics, the log line."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from pushd.errors import Code, StatusError, StoreError, StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.rpc.calls import current_call
from pushd.rpc.gen.google.rpc.status_pb2 import Status
from pushd.rpc.machine.headers import parse_status
from pushd.rpc.methods import label_of_code
from tests.rpc.harness import (
    BIDI,
    CLIENT,
    SERVER,
    SERVICE,
    UNARY,
    Echo,
    eventually,
    framed,
    over_both,
    raw_client,
    serving,
)

pytestmark = over_both

SECRET = "postgresql://user:hunter2@db"


def raising(exc: BaseException) -> Echo:
    def act(data: bytes) -> bytes:
        raise exc

    return Echo(act)


@pytest.mark.parametrize(
    ("exc", "code", "text"),
    [
        (StatusError(Code.NOT_FOUND, "recipient is not registered"), Code.NOT_FOUND, "recipient is not registered"),
        (StoreTimeout(), Code.DEADLINE_EXCEEDED, "database operation timed out"),
        (StoreUnavailable(), Code.UNAVAILABLE, "database operation failed"),
        (StoreError(), Code.UNAVAILABLE, "database operation failed"),
        (StoreInvariant(), Code.INTERNAL, "storage invariant failed"),
        (NotImplementedError(), Code.UNIMPLEMENTED, "method is not served"),
        (
            ExceptionGroup("", [ExceptionGroup("", [StoreTimeout()])]),
            Code.DEADLINE_EXCEEDED,
            "database operation timed out",
        ),
    ],
)
async def test_what_a_handler_raises_becomes_a_constant_status(exc: Exception, code: Code, text: str) -> None:
    with trio.fail_after(10), capture_logs() as logs:
        async with serving(raising(exc)) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"))
            assert (answer.code, answer.text) == (code, text)
            assert server.value("xmtp_db_errors_total", kind="timeout") == isinstance(
                exc, StoreTimeout | ExceptionGroup
            )
    assert logs == []


@pytest.mark.parametrize(
    "exc",
    [ValueError(SECRET), ExceptionGroup(SECRET, [KeyError(SECRET), OSError(SECRET)]), TimeoutError(SECRET)],
    ids=["plain", "group", "timeout"],
)
async def test_an_unexpected_exception_is_logged_and_the_caller_learns_an_incident_id_only(exc: Exception) -> None:
    with trio.fail_after(10), capture_logs() as logs:
        async with serving(raising(exc)) as server, raw_client(server.port) as client:
            first, second = await client.call(framed(b"x")), await client.call(framed(b"x"))
    for answer, log in zip((first, second), logs, strict=True):
        incident = re.fullmatch(r"internal error, incident ([0-9a-f]{16})", answer.text)
        assert incident
        assert (answer.code, log["incident"]) == (Code.INTERNAL, incident[1])
        assert (log["event"], log["log_level"], log["exc_info"]) == ("rpc_failed", "error", exc)
        assert log["request_id"] == answer.headers["x-request-id"]
        assert "hunter2" not in str(answer)
    assert first.text != second.text


async def test_details_travel_in_the_trailer_for_them() -> None:
    details = Status(code=3, message="m").SerializeToString()
    refusal = StatusError(Code.INVALID_ARGUMENT, "m", details)
    with trio.fail_after(10):
        async with serving(raising(refusal)) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"))
    raw = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    status = parse_status(raw)
    assert status is not None
    assert Status.FromString(status.details or b"") == Status(code=3, message="m")


async def test_a_bug_after_the_first_reply_of_a_stream_is_still_a_status() -> None:
    class Broken(Echo):
        async def server(self, input_message: Any) -> Any:
            yield input_message
            raise ValueError(SECRET)

    with trio.fail_after(10), capture_logs():
        async with serving(Broken()) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"), p_path=SERVER)
            assert (len(answer.messages), answer.code) == (1, Code.INTERNAL)
            assert (await client.call(framed(b"x"))).code == Code.OK


async def test_a_handler_may_leave_its_requests_half_read() -> None:
    class Hasty(Echo):
        async def client(self, input_messages: Any) -> Any:
            return await anext(aiter(input_messages))

    with trio.fail_after(10), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with serving(Hasty()) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x") + framed(b"y"), p_path=CLIENT)
            assert (answer.code, len(answer.messages)) == (Code.OK, 1)
            gc.collect()
    assert caught == [], "nothing was left to the collector"


class Nested(Echo):
    """Yields from inside a nursery or a cancel scope, and everything that can go wrong there does."""

    def __init__(self) -> None:
        super().__init__()
        self.cleaned = 0

    async def server(self, input_message: Any) -> Any:
        large = type(input_message)(topic=b"L" * 200_000)
        try:
            match input_message.topic:
                case b"a child fails":
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._fail)
                        while True:
                            yield large
                case b"a scope ends":
                    with trio.move_on_after(0.1):
                        while True:
                            yield large
                    raise StatusError(Code.ABORTED, "the scope has ended")
                case _:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(trio.sleep_forever)
                        while True:
                            yield large
        finally:
            self.cleaned += 1

    async def _fail(self) -> None:
        await trio.sleep(0.1)
        raise ValueError(SECRET)


@pytest.mark.parametrize(
    ("case", "changes", "code"),
    [
        ("a child fails", {}, Code.INTERNAL),
        ("a scope ends", {}, Code.ABORTED),
        ("the peer stalls", {}, Code.UNAVAILABLE),
        ("the deadline passes", {"grpc_timeout": "100m"}, Code.DEADLINE_EXCEEDED),
        ("the caller leaves", {}, Code.CANCELLED),
        ("the connection breaks", {}, Code.CANCELLED),
        ("a reply is too long", {}, Code.OUT_OF_RANGE),
    ],
)
async def test_what_ends_a_wait_inside_a_handlers_own_scopes_ends_its_call_alone(
    case: str, changes: dict[str, str], code: Code
) -> None:
    echo, limit = Nested(), 100_000 if case == "a reply is too long" else 1_000_000
    labels = {"grpc_service": SERVICE, "grpc_method": "Server", "grpc_type": "server_stream"}
    with trio.fail_after(10), capture_logs() as logs:
        async with serving(echo, stall_s=0.5, max_response_bytes=limit) as server, raw_client(server.port) as neighbour:
            async with raw_client(server.port) as client:
                client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
                client.h2.increment_flow_control_window(2**20)  # the stream's own window closes, not the connection's
                stream_id = await client.open(framed(case.encode()), p_path=SERVER, **changes)
                if case == "the caller leaves":
                    await client.until(lambda: bool(client.answers[stream_id].headers))
                    client.h2.reset_stream(stream_id)
                    await client.flush()
                elif case != "the connection breaks":
                    await client.answer(stream_id)
                if case != "the connection breaks":
                    assert (await client.call(framed(b"x"))).code == Code.OK, "the connection serves on"
            ended = label_of_code(code)
            await eventually(lambda: server.value("grpc_server_handled_total", **labels, grpc_code=ended) == 1)
            assert (await neighbour.call(framed(b"x"))).code == Code.OK
    assert echo.cleaned == 1
    assert [log["event"] for log in logs] == ["rpc_failed"] * (code is Code.INTERNAL)


async def test_a_handler_that_fails_while_its_connection_goes_costs_nobody_else_anything() -> None:
    class Fails(Echo):
        async def unary(self, input_message: Any) -> Any:
            async def clean_up_badly() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError(SECRET)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(clean_up_badly)
                with self._hanging():
                    await trio.sleep_forever()

    with trio.fail_after(10), capture_logs() as logs:
        async with serving(Fails()) as server, raw_client(server.port) as neighbour:
            async with raw_client(server.port) as client:
                await client.open(framed(b"x"))
                await server.echo.hung.wait()
            await server.wait_connections(1)
            neighbour.answers.clear()
            assert (await neighbour.call(framed(b"x"), p_path=SERVER)).code == Code.OK
    assert [log["event"] for log in logs] == ["rpc_failed"]


async def test_a_handler_that_returns_no_message_or_no_generator_is_a_bug_like_others() -> None:
    class Broken(Echo):
        async def unary(self, input_message: Any) -> Any:
            return None

        def server(self, input_message: Any) -> Any:
            return None

    with trio.fail_after(10), capture_logs() as logs:
        async with serving(Broken()) as server, raw_client(server.port) as client:
            for path in (UNARY, SERVER):
                assert (await client.call(framed(b"x"), p_path=path)).code == Code.INTERNAL
    assert len([log for log in logs if log["event"] == "rpc_failed"]) == 2


async def test_a_response_over_the_limit_is_out_of_range() -> None:
    with trio.fail_after(10):
        async with serving(Echo(lambda data: b"L" * int(data)), max_response_bytes=1_000) as server:
            async with raw_client(server.port) as client:
                answer = await client.call(framed(b"998"))
                assert (answer.code, answer.text) == (Code.OUT_OF_RANGE, "response is too large")
                assert (await client.call(framed(b"997"))).code == Code.OK


# --- authentication


def only_letmein(path: str, headers: Mapping[str, str]) -> None:
    if headers.get("authorization") != "Bearer letmein":
        raise StatusError(Code.UNAUTHENTICATED, "missing bearer token")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (framed(b"x"), UNARY),
        (framed(b"x"), BIDI),
        (b"\0\0\0\0\x01\xff", UNARY),
        (b"\x01\0\0\0\0", UNARY),
        (b"\0\xff\xff\xff\xff", UNARY),
        (b"", UNARY),
        (framed(b"x"), "/no.Such/Method"),
    ],
)
async def test_a_credential_is_asked_for_before_anything_of_the_request_counts(body: bytes, path: str) -> None:
    with trio.fail_after(10):
        async with serving(authenticate=only_letmein) as server, raw_client(server.port) as client:
            answer = await client.call(body, p_path=path)
            assert (answer.code, answer.text) == (Code.UNAUTHENTICATED, "missing bearer token")
            assert (await client.call(framed(b"x"), authorization="Bearer letmein")).code == Code.OK


async def test_a_refused_caller_is_answered_before_it_has_sent_its_message() -> None:
    with trio.fail_after(10):
        async with serving(authenticate=only_letmein) as server, raw_client(server.port) as client:
            answer = await client.call(b"\0\1\0\0\0" + b"x" * 1_000, end=False)
            assert answer.code == Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Nothing",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_health_and_reflection_ask_for_no_credential(path: str) -> None:
    with trio.fail_after(10):
        async with serving(authenticate=only_letmein) as server, raw_client(server.port) as client:
            assert (await client.call(b"\0\0\0\0\0", p_path=path)).code in (Code.OK, Code.UNIMPLEMENTED)


async def test_a_bug_in_the_authentication_lets_nobody_in() -> None:
    def broken(path: str, headers: Mapping[str, str]) -> None:
        raise KeyError(SECRET)

    with trio.fail_after(10), capture_logs():
        async with serving(authenticate=broken) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"))
            assert answer.code == Code.INTERNAL
            assert answer.messages == []


# --- what a handler may know


async def test_a_handler_can_look_at_its_call() -> None:
    seen: list[Any] = []

    def act(data: bytes) -> bytes:
        call = current_call()
        seen.append((call.path, call.peer, call.deadline - trio.current_time()))
        return call.request_id.encode()

    with trio.fail_after(10):
        async with serving(Echo(act)) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"), grpc_timeout="5S")
    assert answer.headers["x-request-id"].encode() in answer.messages[0]
    ((path, peer, left),) = seen
    assert (path, peer) == (UNARY, "127.0.0.1")
    assert 0 < left <= 5
    with pytest.raises(LookupError):
        current_call()


async def test_request_ids_are_the_servers_own_and_differ() -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            ids = {(await client.call(framed(b"x"), x_request_id="mine")).headers["x-request-id"] for _ in range(3)}
            ids.add((await client.call(b"")).headers["x-request-id"])  # refusals have one too
    assert len(ids) == 4
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", one) for one in ids)


# --- metrics and log


async def test_calls_are_counted_under_a_closed_set_of_labels() -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            for path in (UNARY, UNARY, SERVER, BIDI, "/x.Y/Z", UNARY + "/../secret", "/grpc.health.v1.Health/Check"):
                await client.call(framed(b"x"), p_path=path)
            await client.call(b"\xff\xff", grpc_timeout="junk")
            await client.call(b"", p_path="/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")

            def count(name: str, method: str, kind: str, **more: str) -> float:
                service = SERVICE if method != "unknown" else "unknown"
                labels = {"grpc_service": service, "grpc_method": method, "grpc_type": kind}
                return server.value(f"grpc_server_{name}", **labels, **more)

            assert count("started_total", "Unary", "unary") == 3
            assert count("handled_total", "Unary", "unary", grpc_code="OK") == 2
            assert count("handled_total", "Unary", "unary", grpc_code="Internal") == 1
            assert count("handling_seconds_count", "Unary", "unary", grpc_code="OK") == 2
            assert count("in_flight", "Unary", "unary") == 0
            assert count("request_bytes_total", "Unary", "unary") == 6
            assert count("response_bytes_total", "Unary", "unary") == 6
            assert count("handled_total", "Server", "server_stream", grpc_code="OK") == 1
            assert count("handled_total", "Bidi", "bidi_stream", grpc_code="OK") == 1
            assert count("request_bytes_total", "Bidi", "bidi_stream") == 3
            assert count("handled_total", "unknown", "unary", grpc_code="Unimplemented") == 2
            assert count("handled_total", "unknown", "unary", grpc_code="OK") == 1  # reflection
            services = {
                sample.labels["grpc_service"]
                for family in server.metrics.registry.collect()
                for sample in family.samples
                if "grpc_service" in sample.labels
            }
            assert services == {SERVICE, "unknown"}


def test_codes_are_written_as_their_metric_label() -> None:
    assert [label_of_code(code) for code in Code] == [
        *("OK", "Cancelled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists"),
        *("PermissionDenied", "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented"),
        *("Internal", "Unavailable", "DataLoss", "Unauthenticated"),
    ]


async def test_a_finished_call_is_one_log_line_without_anything_private() -> None:
    with trio.fail_after(10), capture_logs() as logs:
        async with serving(log_calls=True) as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"t0p-s3cret"), authorization="Bearer t0p-s3cret")
            await client.call(framed(b"x"), p_path="/t0p-s3cret/x")
            await client.call(b"\0\0\0\0\0", p_path="/grpc.health.v1.Health/Check")
    completed = [log for log in logs if log["event"] == "rpc_completed"]
    assert [(log["method"], log["grpc_code"]) for log in completed] == [(UNARY, "OK"), ("unknown", "Unimplemented")]
    first = completed[0]
    assert first["request_id"] == answer.headers["x-request-id"]
    assert (first["request_size_bytes"], first["response_size_bytes"]) == (12, 12)
    assert first["duration_ms"] >= 0
    assert "s3cret" not in repr(logs)
