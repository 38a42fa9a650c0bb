"""Targets that are the gRPC edge of a real server: bytes on its sockets, and requests no client would make."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from pushd.rpc.gen.grpc.health.v1 import health_pb2
from pushd.rpc.gen.grpc.reflection.v1 import reflection_pb2
from pushd.rpc.gen.grpc.reflection.v1alpha import reflection_pb2 as reflection_alpha_pb2
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, query_pb2, subscription_pb2
from pushd.rpc.machine.encoder import PlainEncoder
from pushd.rpc.machine.framing import encode_message
from tests.fuzz.access import OTHER, SIGNER, token
from tests.fuzz.engine import Target
from tests.fuzz.inputs import packed, unpacked
from tests.fuzz.messages import MARKS, messages, tells_private
from tests.fuzz.peers import PIECES, in_frames, in_pieces
from tests.fuzz.server import Server, running_server
from tests.rpc.frames import PREFACE, client_frames, frame

_SERVICE = "/xmtp.backend.v1."
# Path, request, whether requests come as a stream or the answer does.
METHODS: list[tuple[str, Any, bool]] = [
    (f"{_SERVICE}PublishService/Publish", publish_pb2.PublishRequest, False),
    (f"{_SERVICE}QueryService/Query", query_pb2.QueryRequest, False),
    (f"{_SERVICE}QueryService/QueryNewest", query_pb2.QueryNewestRequest, False),
    (f"{_SERVICE}NotificationService/Register", notification_pb2.RegisterRequest, False),
    (f"{_SERVICE}NotificationService/Unregister", notification_pb2.UnregisterRequest, False),
    (f"{_SERVICE}NotificationService/UpdateSubscriptions", notification_pb2.UpdateSubscriptionsRequest, False),
    (f"{_SERVICE}SubscriptionService/Subscribe", subscription_pb2.SubscribeRequest, True),
    (f"{_SERVICE}SubscriptionService/SubscribeStatic", subscription_pb2.SubscribeStaticRequest, True),
    ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, False),
    ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest, True),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", reflection_pb2.ServerReflectionRequest, True),
    (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_alpha_pb2.ServerReflectionRequest,
        True,
    ),
]
LISTEN_S = 0.02
PROBE_S = 10.0  # for a neighbour's answer, which takes a few milliseconds
END_S = 0.1  # of silence, where streams should end; a deadline of 20 ms is in most requests
GREETING = PREFACE + frame(4, 0, 0, b"")
RAW, TO_THE_END, PIECE_SHIFT, CLEAR = 1, 2, 2, 16  # in the first byte of an input for a socket


def head(path: str, **more: str) -> bytes:
    """The header block of a call."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, "te": "trailers"}
    fields |= {"content-type": "application/grpc", "grpc-timeout": "20m", **more}
    return PlainEncoder().encode([(name.encode(), value.encode()) for name, value in fields.items()])


_LEVELS = ("tasks", "descriptors", "connections", "calls", "server_peak_mib")


class _Edge(Target):
    """What all have in common: the server, and a client that behaves."""

    series = 25
    extra_toml = ""
    tls = False
    _server: Server

    @contextmanager
    def opened(self) -> Iterator[None]:
        with running_server(tls=self.tls, extra_toml=self.extra_toml) as self._server:
            place = f"127.0.0.1:{self._server.port}"
            if self.tls:
                trusted = grpc.ssl_channel_credentials((self._server.folder / "ca.pem").read_bytes())
                opening = grpc.secure_channel(place, trusted)
            else:
                opening = grpc.insecure_channel(place)
            with opening as self._channel:
                self._health = self._channel.unary_unary("/grpc.health.v1.Health/Check")
                self._probe()
                self._level: dict[str, float] = {}
                self._level = self._allowed(self._server.vitals())
                yield

    def vitals(self) -> dict[str, float]:
        return {**super().vitals(), **self._server.vitals()}

    def allowed(self, name: str, tried: int) -> float:
        # A task or a session of the database may be on its way at any one moment; `settle` looks at them for longer.
        return {"tasks": 6.0, "descriptors": 8.0}.get(name, super().allowed(name, tried))

    def _allowed(self, vitals: dict[str, float]) -> dict[str, float]:
        return {name: vitals[name] + self.allowed(name, 0) for name in _LEVELS}

    def settle(self) -> None:
        """What the inputs began has ended, and a neighbour is served whatever they did."""
        self._probe()
        vitals = self._server.settled(self._level)
        self._server.check()
        for name, value in self._level.items():
            assert vitals[name] <= value, f"{name}: {vitals[name]:g}, with nobody left"

    def _probe(self) -> None:
        answer = health_pb2.HealthCheckResponse.FromString(self._health(b"", timeout=PROBE_S))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


class Sockets(_Edge):
    """Bytes on a fresh connection, HTTP/2 or not.

    First byte: 1 for "without a greeting", 2 for "listens until its calls have ended", then the size of the pieces;
    16 on a port with TLS for "in clear".
    """

    name = "sockets"
    share = 3.0
    mutations = 1

    def made(self) -> st.SearchStrategy[bytes]:
        paths = [path for path, _, _ in METHODS]
        odd = st.sampled_from(paths).flatmap(lambda path: client_frames(path.encode()))
        whole = st.sampled_from(range(len(METHODS))).flatmap(
            lambda number: messages(METHODS[number][1].DESCRIPTOR, 2).map(
                lambda message: (METHODS[number][0], encode_message(message.SerializeToString()))
            )
        )

        @st.composite
        def scripts(draw: st.DrawFn) -> bytes:
            parts, stream_id = [], 1
            for _ in range(draw(st.integers(1, 6))):
                if draw(st.integers(0, 7)) == 7:
                    parts.append(draw(odd))
                    continue
                path, body = draw(whole)
                cut = draw(st.integers(0, len(body)))
                parts.append(frame(1, 4, stream_id, head(path)) + frame(0, 0, stream_id, body[:cut]))
                parts.append(frame(0, draw(st.sampled_from([0, 1, 1])), stream_id, body[cut:]))
                if not draw(st.integers(0, 3)):
                    parts.append(frame(3, 0, stream_id, b"\0\0\0\x08"))
                stream_id += 2
            return b"".join(parts)

        flags = st.sampled_from([0, 4, 8, 16, 2, 6, 10, 14, 18])
        return st.builds(lambda flag, script: bytes([flag]) + script, flags, scripts())

    def pieces(self, data: bytes) -> list[bytes]:
        return [data[:1], *in_frames(data[1:])]

    def check(self, data: bytes) -> str:
        """Send it, then listen until the server hangs up or has answered the PING behind it."""
        flags, sent = (data or b"\0")[0], data[1:] if (data or b"\0")[0] & RAW else GREETING + data[1:]
        heard = b""
        with suppress(OSError), self._connected(flags) as client:
            for piece in in_pieces(sent + frame(6, 0, 0, b"the end!"), PIECES[flags >> PIECE_SHIFT & 3]):
                client.sendall(piece)
            client.settimeout(END_S if flags & TO_THE_END else LISTEN_S)
            while piece := client.recv(65_536):
                heard += piece
                if _is_over(heard, _opened(data[1:]) if flags & TO_THE_END else set()):
                    break
        self._server.check()
        kinds = {part[3] for part in in_frames(heard) if len(part) > 8 and part[5:9] != bytes(4)}
        return "message" if 0 in kinds else "answer" if 1 in kinds else "reset" if 3 in kinds else ""

    @contextmanager
    def _connected(self, flags: int) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=5) as client:
            yield client


def _opened(data: bytes) -> set[bytes]:
    """The streams a client opens, as far as its frames can be told."""
    return {part[5:9] for part in in_frames(data) if len(part) > 8 and part[3] == 1}


def _is_over(heard: bytes, opened: set[bytes]) -> bool:
    """Whether a server gave up the connection, or has answered the last PING and ended these streams."""
    parts = in_frames(heard)
    ended = {part[5:9] for part in parts if len(part) > 8 and (part[3] == 3 or (part[3] < 2 and part[4] & 1))}
    return any(part[3:4] == b"\7" for part in parts) or (b"the end!" in heard and opened <= ended)


class TlsSockets(Sockets):
    """The same through TLS, or in clear on a port that wants TLS."""

    name = "tls"
    share = 2.0
    tls = True

    @contextmanager
    def _connected(self, flags: int) -> Iterator[socket.socket]:
        with super()._connected(flags) as client:
            if flags & CLEAR:
                yield client
                return
            context = ssl.create_default_context(cafile=str(self._server.folder / "ca.pem"))
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(client, server_hostname="127.0.0.1") as secured:
                yield secured


_PEM = SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
_AUTH = f'[[auth.keys]]\nkid = "k1"\nalg = "EdDSA"\npublic_key = """\n{_PEM}"""\n'


class Calls(_Edge):
    """Requests to every method of a server that asks for tokens.

    The first byte names the method, and above 127 says that the token is missing or bad; then comes the message, or
    several as `packed` where requests are a stream. No request may be answered as a failure of the server or of its
    database, and no status may tell a private value.
    """

    name = "calls"
    share = 3.0
    mutations = 2
    extra_toml = _AUTH
    _never = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE)
    _seen: set[str]

    def made(self) -> st.SearchStrategy[bytes]:
        def requests(number: int) -> st.SearchStrategy[bytes]:
            _, kind, is_stream = METHODS[number]
            bodies = messages(kind.DESCRIPTOR).map(lambda message: message.SerializeToString())
            return st.lists(bodies, min_size=1, max_size=4).map(packed) if is_stream else bodies

        numbers = st.sampled_from(range(len(METHODS)))
        flags = st.sampled_from([0] * 8 + [128, 192])
        return st.builds(
            lambda call, flag: bytes([call[0] | flag]) + call[1:],
            numbers.flatmap(lambda number: requests(number).map(lambda body: bytes([number]) + body)),
            flags,
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._seen = set()
        fair = {"exp": 2**33}
        self._tokens = [token(fair), None, token(fair, OTHER)]
        MARKS[:] = [text.rpartition(".")[2][:12] for text in self._tokens if text]
        with super().opened():
            yield

    def check(self, data: bytes) -> str:
        first = (data or b"\0")[0]
        path, kind, is_stream = METHODS[(first & 63) % len(METHODS)]
        bearer = self._tokens[max(0, (first >> 6) - 1)]
        metadata = [] if bearer is None else [("authorization", f"Bearer {bearer}")]
        must_refuse = first >= 128 and path.startswith(_SERVICE)
        requests = unpacked(data[1:]) if is_stream else [data[1:]]
        # A stream lives on after a good request: look at what it says for a moment.
        timeout = LISTEN_S if is_stream and not must_refuse else 5
        code, said = grpc.StatusCode.OK, ""
        try:
            if is_stream:
                for _ in self._channel.stream_stream(path)(iter(requests), timeout=timeout, metadata=metadata):
                    pass
            else:
                self._channel.unary_unary(path)(requests[0], timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            code, said = error.code(), f"{error.details()} {error.trailing_metadata()} {error.initial_metadata()}"
        assert code not in self._never, f"{path} answered {code} {said}"
        assert (code is grpc.StatusCode.UNAUTHENTICATED) == must_refuse, f"{path} answered {code} to {first >> 6}"
        if said not in self._seen:
            self._seen.add(said)
            assert not tells_private(said), f"{path} answered {code} {said}"
        self._server.check()
        return "" if must_refuse else _depth(kind, requests, code, is_stream)


def _depth(kind: Any, requests: list[bytes], code: grpc.StatusCode, is_stream: bool) -> str:
    try:
        for request in requests:
            kind.FromString(request)
    except DecodeError:
        return ""
    fair = (grpc.StatusCode.OK, *([grpc.StatusCode.DEADLINE_EXCEEDED] if is_stream else []))
    return "served" if code in fair else code.name.lower().replace("_", " ")
