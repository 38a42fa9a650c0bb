"""The standard health service (gRPC doc/health-checking.md): Check, Watch and List."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import trio

from pushd.errors import Code, StatusError
from pushd.rpc.gen.grpc.health.v1 import health_pb2 as wire
from pushd.rpc.gen.grpc.health.v1.health_grpc import HealthServicer

_Status = wire.HealthCheckResponse.ServingStatus


class Health(HealthServicer):
    """Tells whether the server, and each service by name, serves. The empty name stands for the server.

    Once draining everything is NOT_SERVING for good, and watchers hear it before their streams end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, wire.HealthCheckResponse.ServingStatus] = {"": _Status.NOT_SERVING}
        self._draining = False
        self._changed = trio.Event()

    @classmethod
    def serving(cls, names: Iterable[str]) -> Health:
        """A health service for a server that serves all of `names` now."""
        health = cls()
        for name in ("", *names):
            health.set_serving(name, True)
        return health

    def set_serving(self, name: str, serving: bool) -> None:
        """Says whether the service `name` serves; a new name becomes known by it."""
        if not self._draining:
            self._statuses[name] = _Status.SERVING if serving else _Status.NOT_SERVING
            self._notify()

    def drain(self) -> None:
        """Nothing serves any more."""
        self._statuses = dict.fromkeys(self._statuses, _Status.NOT_SERVING)
        self._draining = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def Check(self, input_message: wire.HealthCheckRequest) -> wire.HealthCheckResponse:
        """The status of one service, NOT_FOUND for a name that was never set."""
        status = self._statuses.get(input_message.service)
        if status is None:
            raise StatusError(Code.NOT_FOUND, "unknown service")
        return wire.HealthCheckResponse(status=status)

    async def List(self, input_message: wire.HealthListRequest) -> wire.HealthListResponse:
        """The status of every name."""
        statuses = {name: wire.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return wire.HealthListResponse(statuses=statuses)

    async def Watch(self, input_message: wire.HealthCheckRequest) -> AsyncIterator[wire.HealthCheckResponse]:
        """The status now and after every change; SERVICE_UNKNOWN for a name that may yet be set."""
        last = None
        while True:
            status = self._statuses.get(input_message.service, _Status.SERVICE_UNKNOWN)
            changed, draining = self._changed, self._draining
            if status != last:
                yield wire.HealthCheckResponse(status=status)
                last = status
            if draining:
                raise StatusError(Code.UNAVAILABLE, "server is shutting down")
            await changed.wait()
