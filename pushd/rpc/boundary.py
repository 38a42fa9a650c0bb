"""What is around every method: authentication, deadline, statuses, metrics, the log line.

The order for one call: the request's headers have to be gRPC; then the credential, before any message byte is looked
at; then the server has to be willing; then the path has to exist; then the message is read. Whatever a handler raises
becomes a status here and nowhere else. An exception nobody expected is logged with its traceback under a random
incident id, and the caller learns that id and nothing more.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from secrets import token_hex
from typing import Any, Self

import trio
from google.protobuf.message import DecodeError

from pushd.errors import Code, StatusError, StoreError, StoreInvariant, StoreTimeout
from pushd.rpc.calls import Call, Reason, RequestFault, enter_call
from pushd.rpc.elements import Undecodable, is_bloated, may_be_bloated
from pushd.rpc.machine import Fault, Status
from pushd.rpc.methods import Method, MethodTable, is_public, label_of_code
from pushd.telemetry import Event, Metrics, get_logger

Authenticate = Callable[[str, Mapping[str, str]], None]

# Requests from this size on are decoded one at a time: 25 MiB take up to 0.15 s, and ten of them whose last bytes come
# together would hold up the lock's probe for half of the time it has.
LARGE_BYTES = 256 * 1024
# What a method takes that needs no credential: a name, at the longest.
PUBLIC_BYTES = 64 * 1024

_OK = Status(Code.OK)
_MALFORMED = Status(Code.INVALID_ARGUMENT, "request is malformed")
_TOO_LARGE = Status(Code.OUT_OF_RANGE, "request is too large")
_RESPONSE_TOO_LARGE = Status(Code.OUT_OF_RANGE, "response is too large")
_OVERLOADED = Status(Code.UNAVAILABLE, "server is overloaded")
_DRAINING = Status(Code.UNAVAILABLE, "server is shutting down")
_UNKNOWN_METHOD = Status(Code.UNIMPLEMENTED, "method is not served")
_DEADLINE = Status(Code.DEADLINE_EXCEEDED, "deadline exceeded")
_GONE = Status(Code.CANCELLED, "the caller gave up")
_FAULTS = {
    Fault.COMPRESSED: Status(Code.UNIMPLEMENTED, "compressed messages are not supported"),
    Fault.BAD_FLAG: Status(Code.INTERNAL, "message framing is malformed"),
    Fault.TRUNCATED: Status(Code.INTERNAL, "message framing is malformed"),
    # gRPC's own rule for a method that wants one request and got another number of them.
    None: Status(Code.UNIMPLEMENTED, "method takes exactly one request message"),
}
_REASONS = {None: _DEADLINE, Reason.DRAIN: _DRAINING, Reason.PEER: _GONE, Reason.CONNECTION: _GONE}

log = get_logger()


class Boundary:
    """Serves calls.

    Args:
        methods: what is served.
        authenticate: looks at path and headers and raises `StatusError` to refuse; None lets everybody in. It is not
            asked about health and reflection.
        max_response_bytes: one response message.
        log_calls: write a line for every finished call.
    """

    def __init__(
        self,
        methods: MethodTable,
        metrics: Metrics,
        *,
        authenticate: Authenticate | None,
        max_response_bytes: int,
        log_calls: bool,
    ) -> None:
        self._methods = methods
        self._db_errors = metrics.db_errors
        self._authenticate = authenticate
        self._max_response_bytes = max_response_bytes
        self._log_calls = log_calls
        self._decoding, self._decoding_large = trio.Lock(), trio.Lock()
        self.draining = False

    def is_streaming(self, path: str) -> bool:
        """Whether the call at `path` ends by itself only when it wants to; such a call is cut when a drain begins."""
        method = self._methods.find(path)
        # Health watchers end by themselves, after they have heard of the drain.
        return method.metrics is not None and (method.client_streams or method.server_streams)

    async def serve(self, call: Call) -> None:
        """Runs one call to its end. Only the cancellation of the whole server comes out of it."""
        method = self._methods.find(call.path)
        metrics = method.metrics
        begun = time.perf_counter()
        if metrics is not None:
            metrics.started.inc()
            metrics.in_flight.inc()
        status = _GONE
        try:
            status = await self._answer(call, method)
        finally:
            if metrics is not None:
                seconds = time.perf_counter() - begun
                metrics.in_flight.dec()
                metrics.handled(status.code, seconds)
                metrics.request_bytes.inc(call.request_bytes)
                metrics.response_bytes.inc(call.response_bytes)
                if self._log_calls:
                    _log_completion(call, method, status, seconds)

    async def _answer(self, call: Call, method: Method) -> Status:
        refusal = call.request.refusal
        if refusal is not None:
            status = Status(refusal.code, refusal.message)
            call.finish(status, refusal.http_status)
            return status
        try:
            with call.scope:
                self._admit(call, method)
                await self._run(call, method)
                return _OK
            verdict = call.verdict
            status = _REASONS[call.reason] if verdict is None else Status(verdict.code, verdict.message)
        except Exception as exc:
            status = self._status_of(exc, call, method)
        call.finish(status)
        if call.reason is None:
            await call.part()  # what the peer does not take would stay, and count, for as long as it likes
        return status

    def _admit(self, call: Call, method: Method) -> None:
        if self._authenticate is not None and not is_public(call.path):
            self._authenticate(call.path, call.headers)
        if call.deadline <= trio.current_time():  # Trio would let the handler run to its first checkpoint
            raise _error(_DEADLINE)
        if (self.draining or call.late) and method.metrics is not None:
            raise _error(_DRAINING)
        if method is self._methods.unknown:
            raise _error(_UNKNOWN_METHOD)

    async def _run(self, call: Call, method: Method) -> None:
        if method.client_streams:
            request: Any = _Messages(call, partial(self._decode, method))
        else:
            request = await self._decode(method, await call.receive_only())
        enter_call(call)
        if method.server_streams:
            await self._send_all(method.handle(request, call), call)
        else:
            reply = self._encode(await method.handle(request, call))
            call.begin()
            call.send_nowait(reply)
        call.finish(_OK)
        await call.wait_room(0)

    async def _decode(self, method: Method, payload: bytes) -> Any:
        is_large = len(payload) >= LARGE_BYTES
        try:
            if len(payload) > PUBLIC_BYTES and is_public(method.path):
                raise _error(_TOO_LARGE)
            if not is_large and not may_be_bloated(payload, method.shape):
                return method.decode(payload)
            async with self._decoding_large if is_large else self._decoding:
                if await is_bloated(payload, method.shape):
                    raise _error(_MALFORMED)
                return method.decode(payload)
        except (DecodeError, Undecodable) as exc:
            raise _error(_MALFORMED) from exc

    async def _send_all(self, replies: AsyncGenerator[Any, None], call: Call) -> None:
        """Sends what a handler yields.

        The wait for the peer takes place in the handler's task while it stands at a `yield`, inside whatever scopes and
        nurseries it has open there. What ends the wait is therefore raised at that `yield`, as if the handler had
        waited by itself: a scope gets the cancellation that belongs to it, and clean-up runs here and now. Closing the
        generator instead would hand a nursery a GeneratorExit, which no caller of it expects.
        """
        call.begin()
        step = replies.__anext__()
        while True:
            try:
                reply = await step
            except StopAsyncIteration:
                return
            try:
                call.send_nowait(self._encode(reply))
                await call.wait_room()
            except BaseException as exc:
                step = replies.athrow(exc)
            else:
                step = replies.__anext__()

    def _encode(self, reply: Any) -> bytes:
        payload: bytes = reply.SerializeToString()
        if len(payload) > self._max_response_bytes:
            raise _error(_RESPONSE_TOO_LARGE)
        return payload

    def _status_of(self, exc: Exception, call: Call, method: Method) -> Status:
        while isinstance(exc, ExceptionGroup) and len(exc.exceptions) == 1:
            exc = exc.exceptions[0]  # what one task of the handler's nursery raised
        match exc:
            case StatusError():
                return Status(exc.code, exc.message, exc.details)
            case RequestFault(fault=Fault.TOO_LARGE):
                return _TOO_LARGE
            case RequestFault(fault=Fault.OVERLOADED):
                return _OVERLOADED
            case RequestFault():
                return _MALFORMED if method.strict else _FAULTS[exc.fault]
            case NotImplementedError():
                return _UNKNOWN_METHOD
            case StoreError():
                self._db_errors.labels(exc.kind).inc()
                return Status(_store_code(exc), exc.text)
        incident = token_hex(8)
        log.error(Event.RPC_FAILED, incident=incident, method=method.path, request_id=call.request_id, exc_info=exc)
        return Status(Code.INTERNAL, f"internal error, incident {incident}")


def _store_code(exc: StoreError) -> Code:
    if isinstance(exc, StoreTimeout):
        return Code.DEADLINE_EXCEEDED
    return Code.INTERNAL if isinstance(exc, StoreInvariant) else Code.UNAVAILABLE


def _error(status: Status) -> StatusError:
    return StatusError(status.code, status.message)


class _Messages:
    """The requests of a call, decoded. No generator: a handler may leave it half-read, and in any task."""

    def __init__(self, call: Call, decode: Callable[[bytes], Awaitable[Any]]) -> None:
        self._call = call
        self._decode = decode

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        payload = await self._call.receive()
        if payload is None:
            raise StopAsyncIteration
        return await self._decode(payload)

    async def aclose(self) -> None:
        """Nothing is open; for handlers that close what they iterate over."""


def _log_completion(call: Call, method: Method, status: Status, seconds: float) -> None:
    log.info(
        Event.RPC_COMPLETED,
        request_id=call.request_id,
        method=method.path,
        duration_ms=round(seconds * 1_000, 3),
        request_size_bytes=call.request_bytes,
        response_size_bytes=call.response_bytes,
        grpc_code=label_of_code(status.code),
    )
