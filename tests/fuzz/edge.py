"""Targets that are the gRPC edge of a real server: bytes on its sockets, and requests no client would make."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from pushd.rpc.gen.grpc.health.v1 import health_pb2
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, query_pb2, subscription_pb2
from tests.fuzz.engine import Target
from tests.fuzz.server import Server, running_server
from tests.rpc.frames import PREFACE, client_frames, frame

_SERVICE = "/xmtp.backend.v1."
METHODS: list[tuple[str, Any]] = [
    ("PublishService/Publish", publish_pb2.PublishRequest),
    ("QueryService/Query", query_pb2.QueryRequest),
    ("QueryService/QueryNewest", query_pb2.QueryNewestRequest),
    ("NotificationService/Register", notification_pb2.RegisterRequest),
    ("NotificationService/Unregister", notification_pb2.UnregisterRequest),
    ("NotificationService/UpdateSubscriptions", notification_pb2.UpdateSubscriptionsRequest),
    ("SubscriptionService/Subscribe", subscription_pb2.SubscribeRequest),
    ("SubscriptionService/SubscribeStatic", subscription_pb2.SubscribeStaticRequest),
]
_STREAMED = 6  # from here on the answer is a stream
PROBE_EVERY = 50  # inputs between two calls of a client that behaves
LISTEN_S = 0.02


class _Edge(Target):
    """What both have in common: the server, and a client that behaves."""

    is_repeatable = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        with running_server() as self._server, grpc.insecure_channel(f"127.0.0.1:{self._server.port}") as self._channel:
            self._server: Server
            self._checked = 0
            self._health = self._channel.unary_unary("/grpc.health.v1.Health/Check")
            self._probe()
            yield

    def vitals(self) -> dict[str, float]:
        self._probe()
        return {**super().vitals(), **self._server.vitals(connections=1)}

    def allowed(self, name: str) -> float:
        # A task or a session of the database may be on its way at any one moment.
        return {"tasks": 4.0, "descriptors": 6.0}.get(name, super().allowed(name))

    def check(self, data: bytes) -> None:
        self._attack(data)
        self._server.check()
        self._checked += 1
        if self._checked % PROBE_EVERY == 0:
            self._probe()

    def _attack(self, data: bytes) -> None:
        raise NotImplementedError

    def _probe(self) -> None:
        """A neighbour is served whatever the others do."""
        answer = health_pb2.HealthCheckResponse.FromString(self._health(b"", timeout=30))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


class Sockets(_Edge):
    """Bytes on a fresh connection: HTTP/2 or not."""

    name = "sockets"
    share = 3.0

    def inputs(self) -> st.SearchStrategy[bytes]:
        paths = st.sampled_from([f"{_SERVICE}{method}".encode() for method, _ in METHODS])
        scripts = paths.flatmap(lambda path: st.lists(client_frames(path), max_size=25))
        return scripts.map(lambda script: PREFACE + frame(4, 0, 0, b"") + b"".join(script))

    def _attack(self, data: bytes) -> None:
        """Send it, then listen until the server hangs up or has answered the PING behind it."""
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=30) as client:
            with suppress(OSError):
                client.sendall(data + frame(6, 0, 0, b"the end!"))
                client.settimeout(LISTEN_S)
                heard = b""
                while b"the end!" not in heard and (piece := client.recv(65_536)):
                    heard = heard[-64:] + piece


class Calls(_Edge):
    """Requests to every method. The first byte names the method, the rest is the message.

    No request may be answered as a failure of the server or of its database.
    """

    name = "calls"
    share = 3.0
    _never = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE)

    def inputs(self) -> st.SearchStrategy[bytes]:
        numbers = st.integers(0, len(METHODS) - 1)
        return numbers.flatmap(
            lambda number: messages(METHODS[number][1].DESCRIPTOR).map(
                lambda message: bytes([number]) + message.SerializeToString()
            )
        )

    def _attack(self, data: bytes) -> None:
        number = (data[:1] or b"\0")[0] % len(METHODS)
        path, request = f"{_SERVICE}{METHODS[number][0]}", data[1:]
        try:
            if number < _STREAMED:
                self._channel.unary_unary(path)(request, timeout=30)
            else:
                # A stream lives on after a good request: look at what it says for a moment.
                for _ in self._channel.stream_stream(path)(iter([request]), timeout=LISTEN_S):
                    pass
        except grpc.RpcError as error:
            if error.code() in self._never:
                raise AssertionError(f"{METHODS[number][0]} answered {error.code()} {error.details()}") from None


_WORDS = [
    b"",
    b"\0" * 17,
    b"\1" + b"\7" * 32,
    b"\2" + b"\7" * 32,
    b"\x11" * 32,
    b"\x22" * 32,
    b"k" * 42,
    bytes(16),
    bytes(64),
    b"\0\1\0\2\4grup\0\0\0\0\0\0\0\1\1\0\0\4data",
]
_TEXTS = ["", "abcd", "0" * 64, "\0", "é" * 9]
_TEXTS += ["https://hooks.invalid/", "https://a.invalid:8443/x?y", "https://127.0.0.1/"]
_UNSIGNED = [0, 1, 2, 100, 2**31 - 1, 2**31, 2**32 - 1]
_LONG = [*_UNSIGNED, 2**53, 2**63 - 1]


def messages(descriptor: Descriptor, depth: int = 4) -> st.SearchStrategy[Message]:
    """Any message of this type, with values that are nearly right more often than chance would have it."""
    made = GetMessageClass(descriptor)

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message: Message = made()
        for field in descriptor.fields:
            many = draw(st.integers(0, 3)) if field.is_repeated else int(draw(st.booleans()))
            if field.message_type is not None and depth == 0:
                continue
            for _ in range(many):
                if field.message_type is not None:
                    value = draw(messages(field.message_type, depth - 1))
                    target = getattr(message, field.name)
                    (target.add() if field.is_repeated else target).CopyFrom(value)
                    continue
                value = draw(_values(field))
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)
        return message

    return build()


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = FieldDescriptor
    match field.type:
        case kind.TYPE_BYTES:
            return st.sampled_from(_WORDS) | st.binary(max_size=50)
        case kind.TYPE_STRING:
            return st.sampled_from(_TEXTS) | st.text(max_size=20)
        case kind.TYPE_BOOL:
            return st.booleans()
        case kind.TYPE_INT64 | kind.TYPE_SINT64 | kind.TYPE_SFIXED64:
            return st.sampled_from([*_LONG, -1, -(2**63)])
        case kind.TYPE_UINT64 | kind.TYPE_FIXED64:
            return st.sampled_from([*_LONG, 2**63, 2**64 - 1])
        case kind.TYPE_INT32 | kind.TYPE_SINT32 | kind.TYPE_SFIXED32:
            return st.sampled_from([0, 1, 2, -1, 2**31 - 1, -(2**31)])
        case kind.TYPE_UINT32 | kind.TYPE_FIXED32:
            return st.sampled_from(_UNSIGNED)
        case kind.TYPE_ENUM:
            return st.sampled_from([0, 1, 2, 99])
        case _:
            return st.just(0)
