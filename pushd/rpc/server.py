"""The gRPC server: listeners, connections and their number, and the drain.

    listeners = await trio.open_tcp_listeners(5050, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve_rpc, [NotificationService(...)], listeners, RpcSettings(), metrics=metrics, stop=stop)
        )

HTTP/2 itself is in `machine`, one connection in `connection`, what is around a method in `boundary`.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import trio

from pushd.listening import PatientListener
from pushd.rpc.boundary import Authenticate, Boundary
from pushd.rpc.calls import Reason
from pushd.rpc.connection import ServerConnection
from pushd.rpc.health import Health
from pushd.rpc.machine import ByteBudget, Limits, ServerMachine
from pushd.rpc.methods import MethodTable
from pushd.rpc.reflection import reflection_services
from pushd.rpc.rounds import Rounds
from pushd.rpc.settings import RpcSettings
from pushd.stop import StopSignal
from pushd.telemetry import Event, Metrics, get_logger

_ALPN = "h2"
# After the drain deadline the last statuses and GOAWAYs still have to be written.
_LAST_WORDS_S = 1.0

log = get_logger()


def server_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS for the listener: 1.2 or newer, and HTTP/2 as the only protocol.

    Raises:
        OSError: a file cannot be read. ssl.SSLError, its subclass: it is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return require_http2(context)


def require_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    """Sets what HTTP/2 wants of TLS (RFC 9113 §9.2) on a context that has its certificates."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([_ALPN])
    return context


async def serve_rpc(
    services: Iterable[Any],
    listeners: list[trio.SocketListener],
    settings: RpcSettings,
    *,
    metrics: Metrics,
    stop: StopSignal,
    health: Health | None = None,
    authenticate: Authenticate | None = None,
    tls: ssl.SSLContext | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `stop` is requested and the drain is over. Started when calls are accepted.

    Args:
        services: instances of generated servicers. Health and reflection are added.
        health: the answers of the health service; made here, all serving, when not given.
        authenticate: see `Boundary`.
        tls: a context from `server_tls` or `require_http2`; None serves in clear text.

    A drain answers NOT_SERVING to health, sends GOAWAY on every connection, refuses new calls and ends streams with
    UNAVAILABLE, lets unary calls finish until the stop's deadline, and ends what is left UNAVAILABLE then.
    """
    services = list(services)
    if health is None:
        health = Health.serving(servicer.service.name for servicer in services)
    methods = MethodTable([*services, health], metrics)
    methods.add(reflection_services(methods.services), metrics)
    boundary = Boundary(
        methods,
        metrics,
        authenticate=authenticate,
        max_response_bytes=settings.max_response_bytes,
        log_calls=settings.log_calls,
    )
    server = _Server(settings, boundary, metrics, tls)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.rounds.run)
        patient = [PatientListener(listener) for listener in listeners]
        nursery.start_soon(partial(trio.serve_listeners, server.accept, patient, handler_nursery=nursery))
        task_status.started()
        await stop.wait()
        boundary.draining = True
        health.drain()
        server.drain()
        with trio.CancelScope() as scope:
            stop.bound(scope)
            await server.wait_idle()
        stop.release(scope)
        server.cancel_calls()
        server.drain()  # connections made meanwhile: each of their calls was refused, and GOAWAY is still to come
        with trio.move_on_after(_LAST_WORDS_S):
            await server.wait_empty()
        nursery.cancel_scope.cancel(reason="drained")


class _Server:
    def __init__(self, settings: RpcSettings, boundary: Boundary, metrics: Metrics, tls: ssl.SSLContext | None) -> None:
        self._open = metrics.grpc_connections
        self._settings = settings
        self._boundary = boundary
        self._tls = tls
        self._limits = Limits(
            max_concurrent_streams=settings.max_concurrent_streams,
            max_receive_message_bytes=settings.max_request_bytes,
            max_header_list_bytes=settings.max_header_list_bytes,
            connection_receive_bytes=settings.connection_receive_bytes,
            abuse_burst=settings.abuse_burst,
            abuse_per_s=settings.abuse_per_s,
        )
        self._budget = ByteBudget(settings.receive_bytes)
        self._unsent = ByteBudget(settings.send_bytes)
        self.rounds = Rounds()
        self._connections: set[ServerConnection] = set()
        self._accepted = 0
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<_Server connections={len(self._connections)} {self._budget!r} {self._unsent!r}>"

    async def accept(self, socket_stream: trio.SocketStream) -> None:
        """Serves one connection to its end."""
        self._accepted += 1
        self._open.inc()
        try:
            if self._accepted <= self._settings.max_connections or self._make_room():
                await self._serve(socket_stream)
        except* Exception as failures:
            # A defect, ours or a library's: what one peer can trigger must not end the server for all others.
            log.error(Event.RPC_FAILED, incident=token_hex(8), exc_info=failures)
        finally:
            self._accepted -= 1
            self._open.dec()
            self._notify()
            await trio.aclose_forcefully(socket_stream)

    async def _serve(self, socket_stream: trio.SocketStream) -> None:
        stream: trio.abc.Stream = socket_stream
        handshake_deadline = trio.current_time() + self._settings.handshake_s
        if self._tls is not None:
            secured = await _handshake(socket_stream, self._tls, handshake_deadline)
            if secured is None:
                return
            stream = secured
        connection = ServerConnection(
            stream,
            ServerMachine(self._limits, self._budget, self._unsent),
            self._boundary,
            self._settings,
            _peer(socket_stream),
            handshake_deadline,
            self.rounds,
            self._notify,
        )
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.remove(connection)

    def _make_room(self) -> bool:
        """Says goodbye to the connection that can best be spared; False when none can.

        It is the one that has been silent the longest: of those without a call, else of those whose calls are such as
        need no credential, or whoever watches the health of the server a thousand times would lock everybody out.
        """
        spare = [one for one in self._connections if one.is_spare and not one.machine.draining]
        if spare:
            min(spare, key=lambda one: (one.calls > 0, one.last_active)).make_room()
        return bool(spare)

    def drain(self) -> None:
        """Starts the drain of every connection."""
        for connection in self._connections:
            connection.drain()

    def cancel_calls(self) -> None:
        """Ends the calls that are still running."""
        for connection in self._connections:
            connection.cancel_calls(Reason.DRAIN)

    async def wait_idle(self) -> None:
        """Returns when no call runs."""
        while any(connection.calls for connection in self._connections):
            await self._changed.wait()

    async def wait_empty(self) -> None:
        """Returns when no connection is open."""
        while self._accepted:
            await self._changed.wait()

    def _notify(self) -> None:
        if self._boundary.draining:  # nobody waits before
            self._changed.set()
            self._changed = trio.Event()


def _peer(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:  # it has left already
        return ""


async def _handshake(
    socket_stream: trio.SocketStream, tls: ssl.SSLContext, deadline: float
) -> trio.SSLStream[trio.SocketStream] | None:
    """TLS by the deadline, or None when the peer does not manage it."""
    stream = trio.SSLStream(socket_stream, tls, server_side=True, https_compatible=True)
    with trio.move_on_at(deadline):
        try:
            await stream.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError):
            return None
        # A client that offers no ALPN at all may speak anything; RFC 9113 §3.2 wants "h2" agreed upon.
        return stream if stream.selected_alpn_protocol() == _ALPN else None
    return None
