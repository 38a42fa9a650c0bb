"""The composition root: builds every object and shows the whole nursery tree. Read this first.

serve
├─ signals        first: stop with one absolute deadline; second: cancel everything
└─ infra          pools, operators' listener, boundary task, tailer and streams  ends last
   └─ work        rpc and dispatcher, each draining by itself once a stop is requested
"""

from __future__ import annotations

import os
import resource
import ssl
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from pushd import __version__
from pushd.backend.boundary import BoundaryTask
from pushd.backend.publish import Publisher, PublishSettings
from pushd.backend.query import QueryLimits
from pushd.backend.streams import Streams, StreamSettings
from pushd.backend.tailer import Tailer
from pushd.channels.resolver import (
    MAX_REGISTER_LOOKUPS,
    MAX_UNPROVEN_REGISTER_LOOKUPS,
    ThreadResolver,
    check_webhook_url,
)
from pushd.channels.setup import configured_channels, open_channels, watch_credentials
from pushd.config import Address, Config
from pushd.core.admission import PublishLimits, Retention
from pushd.core.certificate import server_validity
from pushd.core.checks import Refusal
from pushd.core.outbound import FRAME_BYTES, FRAME_HEAD_BYTES
from pushd.core.stream_updates import UpdateLimits
from pushd.dispatch.term import DispatchSettings, run_dispatcher
from pushd.errors import StartError
from pushd.model import IN_FLIGHT_PER_CHANNEL
from pushd.ops.http import serve_ops
from pushd.ops.status import Status
from pushd.rpc.authentication import make_authenticate, start_keys
from pushd.rpc.server import serve_rpc, server_tls
from pushd.rpc.services.notification import NotificationService
from pushd.rpc.services.publish import PublishService
from pushd.rpc.services.query import QueryService
from pushd.rpc.services.subscription import FrameRates, SubscriptionService
from pushd.rpc.settings import RpcSettings
from pushd.rpc.translate_stream import encode_envelope
from pushd.stop import StopSignal, stop_signals
from pushd.store.boundary import advance_boundary
from pushd.store.database import Database
from pushd.store.dispatch import DispatchStore
from pushd.store.startup import check_database_clock, open_prepared_database, watch_embedded_server
from pushd.store.streams import StreamStore
from pushd.store.tailer import TailerStore
from pushd.telemetry import Event, Metrics, get_logger

OTHER_DESCRIPTORS = 200  # operators' connections, lookups of names, sessions beside the pools, files

log = get_logger()


@frozen
class Bound:
    """Where a server listens: `host:port` with the real ports."""

    grpc: str
    metrics: str | None


async def serve_with_signals(config: Config, data_dir: Path) -> int | None:
    """Serve until a signal; returns None after a drain, or the second signal's number.

    Before calls are taken there is nothing to drain: the first signal ends a start, however long it would wait.
    """
    stop = StopSignal()
    ended_by: int | None = None
    is_serving = False

    async def watch_signals(root: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        nonlocal ended_by
        with trio.open_signal_receiver(*stop_signals()) as signals:
            task_status.started()
            async for signum in signals:
                if not stop.requested:
                    _drain(stop, config)
                    if not is_serving:
                        root.cancel(reason="stopped before it served")
                else:
                    log.warning(Event.STOP_NOW)
                    ended_by = signum
                    root.cancel(reason="second signal")

    async def run(*, task_status: trio.TaskStatus[Bound]) -> None:
        await serve(config, data_dir, stop, task_status=task_status)
        nursery.cancel_scope.cancel(reason="served")

    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals, nursery.cancel_scope)
        await nursery.start(run)
        is_serving = True
    log.info(Event.STOPPED)
    return ended_by


def _drain(stop: StopSignal, config: Config) -> None:
    drain_s = config.server.max_drain_duration_ms / 1_000
    log.info(Event.STOPPING, drain_s=drain_s)
    stop.request(trio.current_time() + drain_s)


async def serve(
    config: Config,
    data_dir: Path,
    stop: StopSignal,
    *,
    task_status: trio.TaskStatus[Bound] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop`; started with the addresses once calls are taken. Returns after the drain.

    Raises:
        ConfigError: a provider's credential is unusable.
        StartError: a port, the database or the issuer's key set is not to be had.
        KeySetStale: tokens could no longer be judged; raised after the drain it began.
    """
    limit, wanted = raise_descriptor_limit(), descriptors_wanted(config)
    if limit < wanted:
        log.warning(Event.DESCRIPTORS_SHORT, limit=limit, wanted=wanted)
    metrics = Metrics()
    metrics.info.labels(__version__).set(1)
    metrics.tasks.set_function(lambda: trio.lowlevel.current_statistics().tasks_living)
    async with AsyncExitStack() as stack:
        # Ports first: a second server by mistake is told so before it touches a database.
        grpc = await _listen(stack, config.server.listen, "server.listen")
        ops = await _listen(stack, config.telemetry.metrics_listen, "telemetry.metrics_listen")
        tls = _tls(config, metrics)
        senders = await stack.enter_async_context(open_channels(config.push, ThreadResolver()))
        watch_credentials(senders, metrics)
        database = await stack.enter_async_context(open_prepared_database(config, data_dir, metrics))
        await check_database_clock(database, config)
        async with trio.open_nursery() as infra:
            status = Status(database, metrics, senders.keys())
            infra.start_soon(status.run)
            if config.database.url is None:
                infra.start_soon(watch_embedded_server, data_dir)
            if ops:
                infra.start_soon(serve_ops, ops, status.pages())
            boundary = make_boundary(config, database, metrics)
            await infra.start(boundary.run)
            streams = make_streams(config, database, metrics)
            await infra.start(streams.run)
            await infra.start(make_tailer(config, database, streams, boundary, metrics).run)
            keys = await start_keys(infra, config.auth, metrics, partial(_drain, stop, config))
            async with trio.open_nursery() as work:
                await work.start(
                    partial(
                        serve_rpc,
                        make_services(config, database, boundary, streams, metrics),
                        grpc,
                        rpc_settings(config),
                        metrics=metrics,
                        stop=stop,
                        authenticate=make_authenticate(config.auth, keys, metrics),
                        tls=tls,
                    )
                )
                work.start_soon(
                    partial(
                        run_dispatcher,
                        DispatchStore(database),
                        senders,
                        dispatch_settings(config),
                        metrics=metrics,
                        boundary=boundary,
                        stop=stop,
                    )
                )
                bound = Bound(_address(grpc[0]), _address(ops[0]) if ops else None)
                status.is_ready = True
                log.info(Event.READY, grpc=bound.grpc, metrics=bound.metrics, version=__version__)
                task_status.started(bound)
                await stop.wait()
                status.is_ready = False
            infra.cancel_scope.cancel(reason="drained")
        if keys is not None and keys.failure is not None:
            raise keys.failure


async def _listen(stack: AsyncExitStack, address: Address | None, key: str) -> list[trio.SocketListener]:
    """Listeners on `address`, closed with `stack`; none for None.

    Raises:
        StartError: the address is in use or not this machine's; the text names `key`.
    """
    if address is None:
        return []
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host, backlog=1024)
    except OSError as exc:
        raise StartError(f"{key}: cannot listen on {address}: {os.strerror(exc.errno or 0).lower()}") from exc
    for listener in listeners:
        stack.push_async_callback(listener.aclose)
    return listeners


def _address(listener: trio.SocketListener) -> str:
    host, port, *_ = listener.socket.getsockname()
    return str(Address(host, port))


def _tls(config: Config, metrics: Metrics) -> ssl.SSLContext | None:
    if config.server.tls_cert is None or config.server.tls_key is None:
        return None
    try:
        context = server_tls(config.server.tls_cert, config.server.tls_key)
        validity = server_validity(config.server.tls_cert.read_bytes())
    except OSError as exc:  # ssl.SSLError is one
        raise StartError("server.tls_cert, server.tls_key: cannot be read, or do not belong together") from exc
    if validity is not None:
        metrics.certificate_expiry.set(validity.ends.timestamp())
        if trouble := validity.trouble(datetime.now(UTC)):
            # Not refused: pushes need no certificate, and the clock of this machine may be the one that is wrong.
            log.warning(
                Event.CERTIFICATE_TROUBLE,
                trouble=trouble,
                begins=validity.begins.isoformat(),
                ends=validity.ends.isoformat(),
            )
    return context


def raise_descriptor_limit() -> int:
    """Allow as many open files as the system lets this process have, a connection being one; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def descriptors_wanted(config: Config) -> int:
    """Open files at the most clients, sessions and sends that the configuration allows."""
    database, push = config.database, config.push
    pools = 2 if database.replica_url is not None else 1
    webhooks = 2 * IN_FLIGHT_PER_CHANNEL if push.http is not None else 0  # in use, and kept for the next
    return config.server.max_connections + pools * database.max_connections + webhooks + OTHER_DESCRIPTORS


def make_boundary(config: Config, database: Database, metrics: Metrics) -> BoundaryTask:
    """The instance's one boundary task; everything that asks for maintenance asks this object."""

    async def advance() -> int | None:
        async with database.primary() as connection:
            return await advance_boundary(connection, config.publishing.max_barrier_wait_ms)

    return BoundaryTask(advance, poll_interval_s=config.streams.poll_interval_ms / 1_000, metrics=metrics)


def make_streams(config: Config, database: Database, metrics: Metrics) -> Streams:
    """The hub of this instance's subscriptions."""
    limits = config.limits
    settings = StreamSettings(
        limits=UpdateLimits(
            limits.max_update_adds, limits.max_update_removes, limits.max_stream_topics, limits.max_static_topics
        ),
        keepalive_s=config.streams.keepalive_interval_ms / 1_000,
        pong_s=config.streams.max_pong_wait_ms / 1_000,
        max_followed_topics=limits.max_followed_topics,
        frame_bytes=min(FRAME_BYTES, limits.max_response_bytes - FRAME_HEAD_BYTES),
    )
    return Streams(StreamStore(database, settings.frame_bytes), settings, encode_envelope, metrics)


def make_tailer(
    config: Config, database: Database, streams: Streams, boundary: BoundaryTask, metrics: Metrics
) -> Tailer:
    """The instance's one tailer, which feeds `streams`."""
    return Tailer(
        TailerStore(database),
        streams,
        boundary.request,
        poll_interval_s=config.streams.poll_interval_ms / 1_000,
        max_gap_ranges=config.streams.max_gap_ranges,
        metrics=metrics,
    )


def make_services(
    config: Config,
    database: Database,
    boundary: BoundaryTask,
    streams: Streams,
    metrics: Metrics,
) -> list[Any]:
    """The application services; health and reflection are the edge's own."""
    http = config.push.http
    resolver = ThreadResolver(max_lookups=MAX_REGISTER_LOOKUPS, max_unproven=MAX_UNPROVEN_REGISTER_LOOKUPS)

    async def check_url(url: str) -> Refusal | None:
        if http is None:  # and the channel is refused before its URL is looked at
            return Refusal.WEBHOOK_URL
        return await check_webhook_url(
            url,
            allowed_domains=http.allowed_domains,
            allow_private_addresses=http.allow_private_addresses,
            resolver=resolver,
        )

    limits = config.limits
    publisher = Publisher(
        database,
        PublishSettings(
            limits=PublishLimits(limits.max_request_bytes, limits.max_envelope_bytes, limits.max_publish_topics),
            retention=Retention(
                config.retention.group_message_seconds,
                config.retention.welcome_seconds,
                config.retention.key_package_seconds,
            ),
            max_duration_ms=config.publishing.max_publish_duration_ms,
        ),
        boundary.request,
        metrics,
    )
    query_limits = QueryLimits(
        limits.max_query_topics,
        limits.default_query_limit,
        limits.max_query_limit,
        limits.max_response_bytes,
        limits.max_newest_metadata_topics,
        limits.max_newest_full_topics,
    )
    frame_rates = FrameRates(
        limits.max_update_frames_per_second,
        limits.max_update_burst,
        limits.max_ping_frames_per_second,
        limits.max_ping_burst,
    )
    return [
        PublishService(publisher),
        QueryService(database, query_limits),
        SubscriptionService(streams, config.streams.keepalive_interval_ms, frame_rates, metrics),
        NotificationService(
            database,
            metrics,
            channels=configured_channels(config.push),
            check_webhook_url=check_url,
            recipient_ttl_seconds=config.push.recipient_ttl_seconds,
            max_push_topics=limits.max_push_topics,
        ),
    ]


def rpc_settings(config: Config) -> RpcSettings:
    """The edge's limits from the configuration's keys."""
    server, limits = config.server, config.limits
    return RpcSettings(
        max_concurrent_streams=limits.max_http2_streams,
        max_request_bytes=limits.max_request_bytes,
        max_response_bytes=limits.max_response_bytes,
        max_header_list_bytes=server.max_header_list_bytes,
        max_connections=server.max_connections,
        connection_receive_bytes=server.max_connection_receive_bytes,
        receive_bytes=server.max_receive_bytes,
        handshake_s=server.max_handshake_duration_ms / 1_000,
        idle_s=server.max_idle_duration_ms / 1_000,
        log_calls=server.request_logger,
    )


def dispatch_settings(config: Config) -> DispatchSettings:
    """The dispatcher's settings from the configuration's keys."""
    return DispatchSettings(
        poll_interval_s=config.streams.poll_interval_ms / 1_000,
        max_attempts=config.push.max_attempts,
        recipient_ttl_s=config.push.recipient_ttl_seconds,
        drain_s=config.server.max_drain_duration_ms / 1_000,
    )
