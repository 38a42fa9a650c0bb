"""`xmtp.backend.v1.SubscriptionService`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

import trio
from attrs import frozen

from pushd.backend.streams import Stream, Streams
from pushd.errors import Code, StatusError
from pushd.rpc.calls import Reason, current_call
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.subscription_grpc import SubscriptionServiceServicer
from pushd.rpc.machine.budget import Patience
from pushd.rpc.translate_stream import (
    dynamic_response,
    static_response,
    update_from,
    wanted_from,
)
from pushd.telemetry import Metrics, StreamEnd

_UNSET = "request is not valid"
_TOO_MANY_UPDATES = "too many updates"
_TOO_MANY_PINGS = "too many pings"


@frozen
class FrameRates:
    """How many frames a caller may send on one stream: lasting, and at once."""

    updates_per_s: int = 10
    update_burst: int = 100
    pings_per_s: int = 10
    ping_burst: int = 100


class SubscriptionService(SubscriptionServiceServicer):
    """Streams of envelopes as topics grow.

    Args:
        streams: this instance's hub; its `run` must be running.
        keepalive_ms: what callers are told about how long a stream may be silent.
        rates: see there.
        metrics: counts received frames.
    """

    def __init__(self, streams: Streams, keepalive_ms: int, rates: FrameRates, metrics: Metrics) -> None:
        super().__init__()
        self._streams = streams
        self._limits = streams.settings.limits
        self._keepalive_ms = keepalive_ms
        self._rates = rates
        self._updates = metrics.stream_updates
        self._received = {kind: metrics.stream_frames_received.labels(kind) for kind in ("update", "ping", "pong")}

    async def SubscribeStatic(
        self, input_message: wire.SubscribeStaticRequest
    ) -> AsyncIterator[wire.SubscribeStaticResponse]:
        """Follow the topics of the request until the caller leaves."""
        with self._open(is_static=True) as stream:
            await stream.start_static(await wanted_from(input_message.topics, self._limits.max_static_topics))
            while (frame := await stream.next_frame()) is not None:
                yield static_response(frame, self._keepalive_ms)

    async def Subscribe(
        self, input_messages: AsyncIterator[wire.SubscribeRequest]
    ) -> AsyncIterator[wire.SubscribeResponse]:
        """Follow the topics that updates name until the caller leaves or closes its side."""
        reading = trio.CancelScope()
        with self._open(is_static=False) as stream:
            stream.start()
            # In a task of the hub: a generator must not hold a nursery open while its caller runs.
            self._streams.start_soon(self._read, input_messages, stream, reading)
            try:
                while (frame := await stream.next_frame()) is not None:
                    yield dynamic_response(frame, self._keepalive_ms)
            finally:
                reading.cancel(reason="the stream ended")

    @contextmanager
    def _open(self, *, is_static: bool) -> Iterator[Stream]:
        call = current_call()
        stream = self._streams.open(is_static=is_static)
        stream.interrupt = call.end
        try:
            yield stream
        finally:
            stream.close(StreamEnd.SHUTDOWN if call.reason is Reason.DRAIN else StreamEnd.CLIENT)

    async def _read(
        self, requests: AsyncIterator[wire.SubscribeRequest], stream: Stream, scope: trio.CancelScope
    ) -> None:
        """Take requests until there are no more; whatever goes wrong is the stream's end, raised by its own task."""
        updates = Patience(self._rates.update_burst, self._rates.updates_per_s)
        pings = Patience(self._rates.ping_burst, self._rates.pings_per_s)
        with scope:
            try:
                async with aclosing(cast("Any", requests)):
                    async for request in requests:
                        await self._take(request, stream, updates, pings)
                        # Frames that came together are at hand without a pause. Their answers may be more than a
                        # queue holds, so the stream's own task has to send in between.
                        await trio.lowlevel.checkpoint()
            except Exception as failure:
                stream.fail(failure, StreamEnd.INVALID)
            else:
                stream.finish()

    async def _take(self, request: wire.SubscribeRequest, stream: Stream, updates: Patience, pings: Patience) -> None:
        kind = request.WhichOneof("request")
        if kind is None:
            raise StatusError(Code.INVALID_ARGUMENT, _UNSET)
        self._received[kind].inc()
        match kind:
            case "update":
                if not _spend(updates):
                    self._updates.labels("rate_limited").inc()
                    self._limit(stream, _TOO_MANY_UPDATES)
                await stream.update(await update_from(request.update, self._limits))
            case "ping":
                if not _spend(pings):
                    self._limit(stream, _TOO_MANY_PINGS)
                stream.ping(request.ping.nonce)
            case "pong":
                stream.pong(request.pong.nonce)

    def _limit(self, stream: Stream, text: str) -> None:
        failure = StatusError(Code.RESOURCE_EXHAUSTED, text)
        stream.fail(failure, StreamEnd.RATE_LIMITED)
        raise failure


def _spend(patience: Patience) -> bool:
    patience.at(trio.current_time())
    return patience.spend()
