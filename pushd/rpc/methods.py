"""The methods a server offers, from the service objects that purerpc's generated code describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import field, frozen
from prometheus_client import Counter, Histogram

from pushd.errors import Code
from pushd.rpc._purerpc import purerpc
from pushd.rpc.elements import Shape, shape_of
from pushd.telemetry import Metrics

# Infrastructure: no credential is asked for, and health is left out of metrics and log.
_PUBLIC = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)
_QUIET = "grpc.health.v1.Health"
# These methods answer every request that cannot be read in the same way, whatever is wrong with it.
_STRICT = "xmtp.backend.v1.NotificationService"
_LABELLED = "xmtp.backend.v1."

_TYPES = {
    purerpc.Cardinality.UNARY_UNARY: "unary",
    purerpc.Cardinality.UNARY_STREAM: "server_stream",
    purerpc.Cardinality.STREAM_UNARY: "client_stream",
    purerpc.Cardinality.STREAM_STREAM: "bidi_stream",
}


class MethodMetrics:
    """The metrics of one method with its labels bound, because looking them up costs more than counting."""

    def __init__(self, metrics: Metrics, service: str, method: str, kind: str) -> None:
        labels = (service, method, kind)
        self._metrics = metrics
        self._labels = labels
        self._handled: dict[Code, tuple[Counter, Histogram]] = {}
        self.started = metrics.grpc_started.labels(*labels)
        self.in_flight = metrics.grpc_in_flight.labels(*labels)
        self.request_bytes = metrics.grpc_request_bytes.labels(*labels)
        self.response_bytes = metrics.grpc_response_bytes.labels(*labels)

    def handled(self, code: Code, seconds: float) -> None:
        """Counts one ended call."""
        bound = self._handled.get(code)
        if bound is None:
            labels = (*self._labels, label_of_code(code))
            bound = self._metrics.grpc_handled.labels(*labels), self._metrics.grpc_handling_seconds.labels(*labels)
            self._handled[code] = bound
        bound[0].inc()
        bound[1].observe(seconds)


def label_of_code(code: Code) -> str:
    """The value of `grpc_code`: OK, NotFound, DeadlineExceeded, ..."""
    return "OK" if code is Code.OK else code.name.title().replace("_", "")


@frozen
class Method:
    """One method, ready to be called.

    `metrics` is None for calls that are not counted. `strict` turns everything wrong with a request's bytes into
    INVALID_ARGUMENT. `shape` is what is counted of a request before it is decoded.
    """

    path: str
    handle: Callable[..., Any] = field(repr=False)
    decode: Callable[[bytes], Any] = field(repr=False)
    shape: Shape = field(repr=False)
    client_streams: bool
    server_streams: bool
    strict: bool
    metrics: MethodMetrics | None = field(repr=False)


async def _no_handler(*_: object) -> None:
    raise NotImplementedError


class MethodTable:
    """Looks methods up by path; a path nobody serves has a method too, so that it is counted."""

    def __init__(self, services: Iterable[Any], metrics: Metrics) -> None:
        unknown = MethodMetrics(metrics, "unknown", "unknown", "unary")
        self.unknown = Method("unknown", _no_handler, bytes, {}, False, False, False, unknown)
        self.services: list[str] = []
        self._methods: dict[str, Method] = {}
        self.add(services, metrics)

    def add(self, services: Iterable[Any], metrics: Metrics) -> None:
        """Offers the methods of further services."""
        for servicer in services:
            service = servicer.service
            self.services.append(service.name)
            for name, bound in service.methods.items():
                method = _method(service.name, name, bound, metrics, self.unknown.metrics)
                self._methods[method.path] = method

    def find(self, path: str) -> Method:
        """The method at `path`, or `unknown`."""
        return self._methods.get(path, self.unknown)


def _method(service: str, name: str, bound: Any, metrics: Metrics, unknown: MethodMetrics | None) -> Method:
    cardinality = bound.signature.cardinality
    client_streams, server_streams = _streams(cardinality)
    counted = unknown
    if service == _QUIET:
        counted = None
    elif service.startswith(_LABELLED):
        counted = MethodMetrics(metrics, service, name, _TYPES[cardinality])
    return Method(
        path=f"/{service}/{name}",
        handle=bound.method_fn,
        decode=bound.signature.request_type.FromString,
        shape=shape_of(bound.signature.request_type.DESCRIPTOR),
        client_streams=client_streams,
        server_streams=server_streams,
        strict=service == _STRICT,
        metrics=counted,
    )


def _streams(cardinality: Any) -> tuple[bool, bool]:
    kind = purerpc.Cardinality
    return cardinality in (kind.STREAM_UNARY, kind.STREAM_STREAM), cardinality in (
        kind.UNARY_STREAM,
        kind.STREAM_STREAM,
    )


def is_public(path: str) -> bool:
    """Whether a call needs no credential."""
    return path.startswith(_PUBLIC)
