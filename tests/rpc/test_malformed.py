"""Malformed requests over a real socket: each gets its status on its stream, and the connection serves on."""

from __future__ import annotations

import pytest
import trio

from pushd.errors import Code
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.notification_grpc import NotificationServiceServicer
from tests.rpc.harness import CLIENT, SERVER, UNARY, framed, over_both, raw_client, serving

pytestmark = over_both

BIG = 26_214_400

CASES = {
    "GET": (framed(b"x"), {"p_method": "GET"}, "405", Code.INTERNAL),
    "no path there": (framed(b"x"), {"p_path": "/no.Such/Method"}, "200", Code.UNIMPLEMENTED),
    "path without slash": (framed(b"x"), {"p_path": "nonsense"}, "200", Code.UNIMPLEMENTED),
    "method of another service": (framed(b"x"), {"p_path": UNARY + "x"}, "200", Code.UNIMPLEMENTED),
    "no te": (framed(b"x"), {"te": None}, "200", Code.INTERNAL),
    "te gzip": (framed(b"x"), {"te": "gzip"}, "200", Code.INTERNAL),
    "no content type": (framed(b"x"), {"content_type": None}, "415", Code.INTERNAL),
    "json": (framed(b"x"), {"content_type": "application/json"}, "415", Code.INTERNAL),
    "grpc-web": (framed(b"x"), {"content_type": "application/grpc-web+proto"}, "415", Code.INTERNAL),
    "bad timeout": (framed(b"x"), {"grpc_timeout": "1 hour"}, "200", Code.INTERNAL),
    "zero messages": (b"", {}, "200", Code.UNIMPLEMENTED),
    "zero messages to a stream of answers": (b"", {"p_path": SERVER}, "200", Code.UNIMPLEMENTED),
    "two messages": (framed(b"x") + framed(b"y"), {}, "200", Code.UNIMPLEMENTED),
    "compressed": (b"\x01\0\0\0\x03abc", {"grpc_encoding": "gzip"}, "200", Code.UNIMPLEMENTED),
    "compressed in a stream": (b"\x01\0\0\0\x03abc", {"p_path": CLIENT}, "200", Code.UNIMPLEMENTED),
    "flag 2": (b"\x02\0\0\0\0", {}, "200", Code.INTERNAL),
    "cut in the prefix": (b"\0\0", {}, "200", Code.INTERNAL),
    "cut in the message": (b"\0\0\0\0\x09abc", {}, "200", Code.INTERNAL),
    "length over the limit": (b"\0" + (BIG + 1).to_bytes(4, "big"), {}, "200", Code.OUT_OF_RANGE),
    "length of 4 GiB": (b"\0\xff\xff\xff\xff", {}, "200", Code.OUT_OF_RANGE),
    "not protobuf": (b"\0\0\0\0\x01\xff", {}, "200", Code.INVALID_ARGUMENT),
    "not protobuf in a stream": (b"\0\0\0\0\x01\xff", {"p_path": CLIENT}, "200", Code.INVALID_ARGUMENT),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_malformed_request_gets_its_status_and_the_connection_serves_on(name: str) -> None:
    body, changes, http_status, code = CASES[name]
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            neighbour = await client.open(b"", end=False, p_path=CLIENT)
            answer = await client.call(body, **changes)
            assert (answer.headers[":status"], answer.code) == (http_status, code)
            assert answer.reset is None
            assert (await client.call(framed(b"after"))).code == Code.OK
            client.h2.send_data(neighbour, framed(b"neighbour"), end_stream=True)
            await client.flush()
            assert (await client.answer(neighbour)).code == Code.OK


BROKEN_HEADERS = {
    "no scheme": {"p_scheme": None},
    "no path": {"p_path": None},
    "unknown pseudo header": {"p_protocol": "websocket"},
    "connection header": {"connection": "close"},
    "upper case": {"X_Upper": "1"},
}


@pytest.mark.parametrize("name", BROKEN_HEADERS)
async def test_headers_that_are_not_http2_reset_their_stream_only(name: str) -> None:
    with trio.fail_after(10):
        async with serving() as server, raw_client(server.port) as client:
            answer = await client.call(framed(b"x"), **BROKEN_HEADERS[name])
            assert answer.reset == 1  # PROTOCOL_ERROR
            assert (await client.call(framed(b"after"))).code == Code.OK


class Notification(NotificationServiceServicer):
    async def Register(self, input_message: wire.RegisterRequest) -> wire.RecipientState:
        return wire.RecipientState()

    async def Unregister(self, input_message: wire.UnregisterRequest) -> wire.UnregisterResponse:
        return wire.UnregisterResponse()

    async def UpdateSubscriptions(self, input_message: wire.UpdateSubscriptionsRequest) -> wire.RecipientState:
        return wire.RecipientState()


T050 = {
    "bad tag byte": b"\0\0\0\0\x01\xff",
    "truncated field": b"\0\0\0\0\x02\x0a\x05",
    "field number 0": b"\0\0\0\0\x02\x00\x00",
    "empty": b"",
    "2-byte header": b"\0\0",
    "length longer than data": b"\0\0\0\0\x09abc",
    "compressed flag without codec": b"\x01\0\0\0\0",
    "flag 2": b"\x02\0\0\0\0",
}


@pytest.mark.parametrize("method", ["Register", "Unregister", "UpdateSubscriptions"])
async def test_T050_S085_every_malformed_frame_is_a_malformed_request_to_the_notification_service(method: str) -> None:
    path = f"/xmtp.backend.v1.NotificationService/{method}"
    with trio.fail_after(10):
        async with serving(services=[Notification()]) as server, raw_client(server.port) as client:
            for name, body in T050.items():
                answer = await client.call(body, p_path=path)
                assert (answer.code, answer.text) == (Code.INVALID_ARGUMENT, "request is malformed"), name
            gzip = await client.call(b"\x01\0\0\0\x02\x1f\x8b", p_path=path, grpc_encoding="gzip")
            assert (gzip.code, gzip.text) == (Code.INVALID_ARGUMENT, "request is malformed")
            two = await client.call(b"\0\0\0\0\0\0\0\0\0\0", p_path=path)
            assert (two.code, two.text) == (Code.INVALID_ARGUMENT, "request is malformed")
            # An empty message is a well-formed one: nothing of the table may be answered too eagerly.
            assert (await client.call(b"\0\0\0\0\0", p_path=path)).code == Code.OK


async def test_S086_a_message_at_the_limit_is_served_and_one_byte_more_is_out_of_range() -> None:
    limit = 3_000_000
    fits = framed(b"x" * (limit - 5))  # the field's tag and length take five bytes
    assert len(fits) == limit + 5
    with trio.fail_after(60):
        async with serving(max_request_bytes=limit) as server, raw_client(server.port) as client:
            for body, code in (
                (fits, Code.OK),
                (b"\0" + (limit + 1).to_bytes(4, "big") + b"x" * 999, Code.OUT_OF_RANGE),
            ):
                stream_id = await client.open(None, end=False)
                rest = memoryview(body)
                while rest and not client.answers[stream_id].ended:
                    room = min(client.h2.local_flow_control_window(stream_id), 16_384, len(rest))
                    if not room:
                        assert await client.receive()
                        continue
                    client.h2.send_data(stream_id, bytes(rest[:room]), end_stream=room == len(rest))
                    rest = rest[room:]
                    await client.flush()
                answer = await client.answer(stream_id)
                assert answer.code == code, answer.text
