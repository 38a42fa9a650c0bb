"""An echo service of all four kinds, a server for it inside the test, and a raw HTTP/2 client."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import trio
from attrs import define, evolve, field, fields, frozen

from pushd.rpc._purerpc import purerpc
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import Topic
from pushd.rpc.machine.framing import MessageDecoder, encode_message
from pushd.rpc.server import serve_rpc
from pushd.rpc.settings import RpcSettings
from pushd.stop import StopSignal
from pushd.telemetry import Metrics

SERVICE = "xmtp.backend.v1.Echo"
UNARY, SERVER, CLIENT, BIDI, HANG, HANG_STREAM, HANG_CLIENT = (
    f"/{SERVICE}/{name}" for name in ("Unary", "Server", "Client", "Bidi", "Hang", "HangStream", "HangClient")
)


@frozen
class Tls:
    """A certificate for localhost and who trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    ca_pem: Path


transport: Tls | None = None
"""What is spoken unless a test says otherwise; set by the fixture of this name."""

over_both = pytest.mark.usefixtures("transport")


def message(data: bytes) -> bytes:
    """An encoded request or response of the echo service."""
    return bytes(Topic(topic=data).SerializeToString())


class Echo:
    """Methods of every kind over one message type; `act` may replace what the unary one does."""

    def __init__(self, act: Callable[[bytes], Any] | None = None) -> None:
        self.act = act
        self.hanging = 0
        self.hung = trio.Event()
        self.released = trio.Event()
        self.let_go = trio.Event()

    @property
    def service(self) -> Any:
        service = purerpc.Service(SERVICE)
        kinds = purerpc.Cardinality
        for name, method, kind in (
            ("Unary", self.unary, kinds.UNARY_UNARY),
            ("Server", self.server, kinds.UNARY_STREAM),
            ("Client", self.client, kinds.STREAM_UNARY),
            ("Bidi", self.bidi, kinds.STREAM_STREAM),
            ("Hang", self.hang, kinds.UNARY_UNARY),
            ("HangStream", self.hang_stream, kinds.UNARY_STREAM),
            ("HangClient", self.hang_client, kinds.STREAM_UNARY),
        ):
            service.add_method(name, method, purerpc.RPCSignature(kind, Topic, Topic))
        return service

    async def unary(self, input_message: Topic) -> Topic:
        if self.act is not None:
            result = self.act(input_message.topic)
            if hasattr(result, "__await__"):
                result = await result
            return Topic(topic=result)
        return input_message

    async def server(self, input_message: Topic) -> AsyncIterator[Topic]:
        """One reply a byte of the request."""
        for byte in input_message.topic:
            yield Topic(topic=bytes((byte,)))

    async def client(self, input_messages: AsyncIterator[Topic]) -> Topic:
        return Topic(topic=b"".join([one.topic async for one in input_messages]))

    async def bidi(self, input_messages: AsyncIterator[Topic]) -> AsyncIterator[Topic]:
        async for one in input_messages:
            yield one

    async def hang(self, input_message: Topic) -> Topic:
        with self._hanging():
            await self.let_go.wait()
        return input_message

    async def hang_client(self, input_messages: AsyncIterator[Topic]) -> Topic:
        """Reads nothing."""
        return await self.hang(Topic())

    async def hang_stream(self, input_message: Topic) -> AsyncIterator[Topic]:
        yield input_message
        with self._hanging():
            await self.let_go.wait()

    def _hanging(self) -> Any:
        return _Hanging(self)


class _Hanging:
    def __init__(self, echo: Echo) -> None:
        self._echo = echo

    def __enter__(self) -> None:
        self._echo.hanging += 1
        self._echo.hung.set()

    def __exit__(self, *_: object) -> None:
        self._echo.hanging -= 1
        self._echo.released.set()


@define
class Running:
    """A server inside the test."""

    port: int
    stop: StopSignal
    metrics: Metrics
    echo: Echo
    ended: trio.Event = field(factory=trio.Event)

    def value(self, name: str, **labels: str) -> float:
        """A metric's value now."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def wait_connections(self, count: int) -> None:
        """Returns when this many connections are open."""
        await eventually(lambda: self.value("grpc_server_connections") == count)


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; only for what gives no sign of itself."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


@asynccontextmanager
async def serving(
    echo: Echo | None = None, *, services: Iterable[Any] = (), tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[Running]:
    """A server on a free port of the loopback; keyword arguments that are settings override them."""
    echo = echo or Echo()
    known = {attribute.name for attribute in fields(RpcSettings)}
    settings = evolve(RpcSettings(log_calls=False), **{k: options.pop(k) for k in list(options) if k in known})
    metrics = options.pop("metrics", None) or Metrics()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    stop = StopSignal()
    running = Running(listeners[0].socket.getsockname()[1], stop, metrics, echo)

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        await serve_rpc(
            [echo, *services],
            listeners,
            settings,
            metrics=metrics,
            stop=stop,
            tls=tls or (transport and transport.server),
            task_status=task_status,
            **options,
        )
        running.ended.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        yield running
        nursery.cancel_scope.cancel()


@define
class Answer:
    """What a stream of the raw client has received."""

    headers: dict[str, str] = field(factory=dict)
    trailers: dict[str, str] = field(factory=dict)
    messages: list[bytes] = field(factory=list)
    reset: int | None = None
    ended: bool = False

    @property
    def code(self) -> int | None:
        """grpc-status, wherever it stood."""
        text = self.trailers.get("grpc-status", self.headers.get("grpc-status"))
        return None if text is None else int(text)

    @property
    def text(self) -> str:
        return self.trailers.get("grpc-message", self.headers.get("grpc-message", ""))


REQUEST = {
    ":method": "POST",
    ":scheme": "http",
    ":path": UNARY,
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
}


class RawClient:
    """h2 over a stream, with nothing of pushd's in it but the message framing; may break every rule."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=True,
            )
        )
        self.answers: dict[int, Answer] = {}
        self.goaway: tuple[int, int] | None = None
        self.pings = 0
        self.settings: dict[int, int] = {}
        self.closed = False
        self._decoders: dict[int, MessageDecoder] = {}
        self._input = b""

    async def start(self) -> None:
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        data = self.h2.data_to_send()
        if data:
            await self.stream.send_all(data)

    async def open(
        self,
        body: bytes | None = b"",
        *,
        end: bool = True,
        more: Iterable[tuple[str, str]] = (),
        **changes: str | None,
    ) -> int:
        """Sends a request; `changes` replace or remove headers, with `_` for `-` and `p_` for `:`; `more` follow."""
        headers = dict(REQUEST)
        for name, value in changes.items():
            key = ":" + name[2:] if name.startswith("p_") else name.replace("_", "-")
            if value is None:
                headers.pop(key, None)
            else:
                headers[key] = value
        stream_id = self.h2.get_next_available_stream_id()
        self.answers[stream_id] = Answer()
        self._decoders[stream_id] = MessageDecoder(2**32)
        self.h2.send_headers(stream_id, [*headers.items(), *more], end_stream=end and not body)
        if body:
            self.h2.send_data(stream_id, body, end_stream=end)
        await self.flush()
        return stream_id

    async def receive(self) -> bool:
        """Handles one read; False at the end."""
        try:
            data = await self.stream.receive_some(65536)
        except (trio.BrokenResourceError, ssl.SSLError):
            data = b""
        if not data:
            self.closed = True
            return False
        self._input += data
        while len(self._input) >= 9 and len(self._input) >= (size := 9 + int.from_bytes(self._input[:3], "big")):
            for event in self.h2.receive_data(self._input[:size]):  # frame by frame, see ConnectionTerminated
                self._handle(event)
            self._input = self._input[size:]
        await self.flush()
        return True

    async def answer(self, stream_id: int) -> Answer:
        """Reads until the stream has ended."""
        answer = self.answers[stream_id]
        while not answer.ended:
            assert await self.receive(), f"connection closed before an answer: {answer}"
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Reads until the condition holds."""
        while not condition():
            assert await self.receive(), "connection closed"

    async def until_closed(self) -> None:
        while await self.receive():
            pass

    async def call(self, body: bytes | None, **changes: str | None) -> Answer:
        return await self.answer(await self.open(body, **changes))

    def _handle(self, event: h2.events.Event) -> None:
        answer = self.answers.get(getattr(event, "stream_id", None) or 0)
        match event:
            case h2.events.ResponseReceived() if answer:
                answer.headers = dict(event.headers)
            case h2.events.TrailersReceived() if answer:
                answer.trailers = dict(event.headers)
            case h2.events.DataReceived() if answer:
                answer.messages += self._decoders[event.stream_id].feed(event.data)
                if event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded() if answer:
                answer.ended = True
            case h2.events.StreamReset() if answer:
                if not answer.ended:
                    answer.reset = int(event.error_code)
                answer.ended = True
            case h2.events.ConnectionTerminated():
                self.goaway = (event.last_stream_id, int(event.error_code))
                # h2 takes GOAWAY for the end; this client wants to see what comes after it.
                self.h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN
            case h2.events.RemoteSettingsChanged():
                self.settings |= {int(k): v.new_value for k, v in event.changed_settings.items()}
            case h2.events.PingReceived():
                self.pings += 1


async def connect(port: int, tls: ssl.SSLContext | None = None) -> Any:
    """A stream to the server; TLS shakes hands at its first use."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    tls = tls or (transport and transport.client)
    if tls is None:
        return stream
    return trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)


@asynccontextmanager
async def raw_client(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawClient]:
    """A raw client, preface sent."""
    stream = await connect(port, tls)
    try:
        client = RawClient(stream)
        await client.start()
        yield client
    finally:
        await trio.aclose_forcefully(stream)


def framed(data: bytes) -> bytes:
    """A request body with one echo message."""
    return encode_message(message(data))
