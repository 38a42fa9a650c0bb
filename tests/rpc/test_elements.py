"""How many short elements a request has, counted before protobuf makes them."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from attrs import evolve
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pushd.errors import Code, StatusError
from pushd.rpc.boundary import LARGE_BYTES, PUBLIC_BYTES, Boundary
from pushd.rpc.elements import (
    ALLOWED,
    SHORT,
    Undecodable,
    count_short,
    is_bloated,
    may_be_bloated,
    most_short,
    shape_of,
)
from pushd.rpc.gen.grpc.health.v1.health_grpc import HealthServicer
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, query_pb2, subscription_pb2
from pushd.rpc.gen.xmtp.backend.v1.notification_grpc import NotificationServiceServicer
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ClientEnvelope
from pushd.rpc.machine.framing import encode_message
from pushd.rpc.methods import MethodTable
from pushd.telemetry import Metrics
from tests.rpc.harness import raw_client, serving

UPDATE = shape_of(notification_pb2.UpdateSubscriptionsRequest.DESCRIPTOR)
SUBSCRIBE = shape_of(subscription_pb2.SubscribeRequest.DESCRIPTOR)
REGISTER = shape_of(notification_pb2.RegisterRequest.DESCRIPTOR)
QUERY = shape_of(query_pb2.QueryRequest.DESCRIPTOR)


def counted(payload: bytes, shape: dict[int, Any], most: int = 10**9) -> int:
    return list(count_short(payload, shape, most))[-1]


@pytest.mark.parametrize(
    ("payload", "shape", "count"),
    {
        "nothing": (b"", UPDATE, 0),
        "empty adds": (b"\x1a\0" * 3, UPDATE, 3),
        "empty removes, which are bytes": (b"\x22\0" * 3, UPDATE, 3),
        "an add one byte too long to be short": (b"\x1a\x08\x0a\x06topic!", UPDATE, 0),
        "an add that is just short": (b"\x1a\x07\x0a\x05topic", UPDATE, 1),
        "keys inside an add": (b"\x1a\x0a" + b"\x1a\0" * 5, UPDATE, 5),
        "single bytes, which cost nothing": (b"\x0a\0" * 3, UPDATE, 0),
        "adds inside an update, and the update": (b"\x0a\x04" + b"\x12\0" * 2, SUBSCRIBE, 3),
        "members of a oneof in turns": (b"\x1a\0\x22\0" * 2, REGISTER, 4),
        "unknown fields of every kind": (
            b"\xa2\x06\0\xa0\x06\x01\xa1\x06" + b"x" * 8 + b"\xa5\x06" + b"x" * 4,
            UPDATE,
            0,
        ),
        "a tag longer than it has to be": (b"\x9a\x00\0", UPDATE, 1),
        "a length longer than it has to be": (b"\x1a\x80\x00", UPDATE, 1),
        "in an unknown group, as if it were outside": (b"\xa3\x06\x1a\0\xa4\x06", UPDATE, 1),
    }.values(),
)
def test_short_elements(payload: bytes, shape: dict[int, Any], count: int) -> None:
    assert counted(payload, shape) == count


@pytest.mark.parametrize(
    "payload",
    [b"\x1a", b"\x1a\x05", b"\x1a\x80", b"\x1a\x02\x0a", b"\x08", b"\x09xxxx", b"\x0dxx", b"\x1f\0", b"\xff" * 11],
)
def test_what_is_no_message(payload: bytes) -> None:
    with pytest.raises(Undecodable):
        counted(payload, UPDATE)


def test_counting_ends_where_the_answer_is_known() -> None:
    assert counted(b"\x1a\0" * 10_000, UPDATE, most=5) == 6
    assert counted(b"\x1a\0" * 6 + b"\xff", UPDATE, most=5) == 6  # what follows is not looked at


def test_fields_beyond_all_need_end_the_walk_whatever_they_are() -> None:
    """Half a microsecond each, they would take seconds in a large request and still count as nothing."""
    varints = b"\x78\x01" * 100_000
    assert counted(varints, UPDATE, most=5) == 6
    assert counted(varints[: 2 * ALLOWED], UPDATE, most=5) == 0
    assert not may_be_bloated(varints, {})  # nothing of such a message can be bloated


def test_a_long_walk_stops_now_and_then() -> None:
    payload = (b"\x1a\x13\x0a\x11" + bytes(17)) * 2_500
    assert len(list(count_short(payload, UPDATE, 10_000))) == 6  # two fields each, and the end


@given(
    st.lists(
        st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=20), max_size=4), st.integers(0, 2**62)),
        max_size=20,
    ),
    st.lists(st.binary(max_size=20), max_size=20),
)
def test_it_counts_what_protobuf_makes(adds: list[tuple[bytes, list[bytes], int]], removes: list[bytes]) -> None:
    request = notification_pb2.UpdateSubscriptionsRequest(recipient_id=b"1" * 32, removes=removes)
    for topic, keys, epoch in adds:
        request.adds.add(topic=topic, hmac_keys=keys, hmac_epoch_base=epoch)
    assert counted(request.SerializeToString(), UPDATE) == made(request)


def made(message: Message) -> int:
    """The short elements of a decoded message."""
    count = 0
    for one, value in message.ListFields():
        values = list(value) if one.is_repeated else [value]
        if one.message_type is not None:
            count += sum((len(each.SerializeToString()) < SHORT) + made(each) for each in values)
        elif one.is_repeated:
            count += sum(len(each) < SHORT for each in values)
    return count


@given(
    st.lists(st.sampled_from([b"\x1a\0", b"\x22\x01x", b"\x1a\x02\x1a\0", b"\x1a\x80\0", b"\x0a\x20" + b"k" * 32])),
    st.integers(1, 3_000),
)
def test_no_walk_is_spared_where_it_would_find_too_many(parts: list[bytes], times: int) -> None:
    payload = b"".join(parts) * times
    if not may_be_bloated(payload, UPDATE):
        assert counted(payload, UPDATE) <= most_short(payload)


async def test_what_clients_mean_is_not_bloated_and_what_they_do_not_mean_is() -> None:
    ids = [number.to_bytes(16, "big") for number in range(5_000)]  # nearly all zeros: every one is walked
    update = notification_pb2.UpdateSubscriptionsRequest(
        adds=[notification_pb2.Subscription(topic=b"\0" + each) for each in ids]
    )
    query = query_pb2.QueryRequest()
    for each in ids:
        one = query.queries.add()
        one.topic.topic = b"\0" + each
        one.cursor.sequence_id = 1
    for request, shape in ((update, UPDATE), (query, QUERY)):
        payload = request.SerializeToString()
        assert may_be_bloated(payload, shape)
        assert not await is_bloated(payload, shape)
    zeros = publish_pb2.PublishRequest(envelopes=[ClientEnvelope()])
    zeros.envelopes[0].group_message.data = bytes(100_000)
    assert not await is_bloated(zeros.SerializeToString(), shape_of(zeros.DESCRIPTOR))
    assert not await is_bloated(b"\x1a\0" * ALLOWED, UPDATE)
    assert await is_bloated(b"\x1a\0" * 2 * ALLOWED, UPDATE)


class Notification(NotificationServiceServicer):
    def __init__(self) -> None:
        super().__init__()
        self.adds: list[int] = []

    async def UpdateSubscriptions(
        self, input_message: notification_pb2.UpdateSubscriptionsRequest
    ) -> notification_pb2.RecipientState:
        self.adds.append(len(input_message.adds))
        return notification_pb2.RecipientState()


async def test_a_bloated_request_is_malformed_and_never_decoded() -> None:
    path = "/xmtp.backend.v1.NotificationService/UpdateSubscriptions"
    service = Notification()
    with trio.fail_after(30):
        async with serving(services=[service]) as server, raw_client(server.port) as client:
            few = await client.call(encode_message(b"\x1a\0" * 900), p_path=path)
            many = await client.call(encode_message(b"\x1a\0" * 8_000), p_path=path)
            assert few.code == Code.OK
            assert (many.code, many.text) == (Code.INVALID_ARGUMENT, "request is malformed")
            assert service.adds == [900]


@pytest.mark.parametrize(("size", "together"), [(LARGE_BYTES - 1, 3), (LARGE_BYTES, 1)])
async def test_large_requests_are_decoded_in_turns(metrics: Metrics, size: int, together: int) -> None:
    """Each turn of the scheduler decodes one large request, or any number of small ones."""
    table = MethodTable([Notification()], metrics)
    boundary = Boundary(table, metrics, authenticate=None, max_response_bytes=1, log_calls=False)
    turns = [0]

    class Turns(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            turns.append(0)

    def decode(payload: bytes) -> None:
        turns[-1] += 1

    method = evolve(table.find("/xmtp.backend.v1.NotificationService/UpdateSubscriptions"), decode=decode)
    instrument = Turns()
    trio.lowlevel.add_instrument(instrument)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(boundary._decode, method, b"\xff" * size)
    trio.lowlevel.remove_instrument(instrument)
    assert max(turns) == together


async def test_methods_without_a_credential_take_no_large_request(metrics: Metrics) -> None:
    class Health(HealthServicer):
        async def Check(self, input_message: Any) -> Any:
            raise AssertionError

    table = MethodTable([Health()], metrics)
    boundary = Boundary(table, metrics, authenticate=None, max_response_bytes=1, log_calls=False)
    check = table.find("/grpc.health.v1.Health/Check")
    assert (await boundary._decode(check, b"\x0a\x03abc")).service == "abc"
    with pytest.raises(StatusError, match="request is too large"):
        await boundary._decode(check, b"\xa2\x06" + encode_varint(PUBLIC_BYTES) + bytes(PUBLIC_BYTES))


def encode_varint(value: int) -> bytes:
    return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
