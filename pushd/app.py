"""The composition root: builds every object and shows the whole nursery tree. Read this first.

    serve
    ├─ signals        first: stop with one absolute deadline; second: cancel everything
    └─ infra          pools, operators' listener, boundary task                      ends last
       └─ work        rpc and dispatcher, each draining by itself once a stop is requested
"""

from __future__ import annotations

import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio
from attrs import frozen

from pushd import __version__
from pushd.config import Address, Config
from pushd.errors import StartError
from pushd.stop import StopSignal
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.store.startup import embedded_server, prepare_database
from pushd.telemetry import Event, Metrics, get_logger

log = get_logger()


@frozen
class Bound:
    """Where a server listens: `host:port` with the real ports."""

    grpc: str
    metrics: str | None


async def serve_with_signals(config: Config, data_dir: Path) -> int | None:
    """Serve until a signal; returns None after a drain, or the second signal's number."""
    stop = StopSignal()
    ended_by: int | None = None

    async def watch_signals(root: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        nonlocal ended_by
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for signum in signals:
                if not stop.requested:
                    drain_s = config.server.max_drain_duration_ms / 1_000
                    log.info(Event.STOPPING, drain_s=drain_s)
                    stop.request(trio.current_time() + drain_s)
                else:
                    log.warning(Event.STOP_NOW)
                    ended_by = signum
                    root.cancel(reason="second signal")

    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals, nursery.cancel_scope)
        await serve(config, data_dir, stop)
        nursery.cancel_scope.cancel(reason="served")
    log.info(Event.STOPPED)
    return ended_by


@asynccontextmanager
async def open_prepared_database(config: Config, data_dir: Path, metrics: Metrics) -> AsyncIterator[Database]:
    """Pools on the configured or the embedded database, its schema up to date.

    Raises:
        StartError: the database cannot be started, reached or used.
    """
    async with AsyncExitStack() as stack:
        if config.database.url is not None:
            url = config.database.url.reveal()
        else:
            url = await stack.enter_async_context(embedded_server(data_dir))
        replica = config.database.replica_url
        settings = DatabaseSettings(
            url=url,
            replica_url=replica.reveal() if replica is not None else None,
            max_connections=config.database.max_connections,
            statement_timeout_ms=config.database.max_statement_timeout_ms,
        )
        database = await stack.enter_async_context(open_database(settings, metrics))
        await prepare_database(database)
        yield database


async def listen(address: Address, key: str) -> list[trio.SocketListener]:
    """Listeners on `address`.

    Raises:
        StartError: the address is in use or not this machine's; the text names `key`.
    """
    try:
        return await trio.open_tcp_listeners(address.port, host=address.host, backlog=1024)
    except OSError as exc:
        raise StartError(f"{key}: cannot listen on {address}: {exc.strerror or 'refused'}") from exc


def raise_descriptor_limit() -> None:
    """Allow as many open files as the system lets this process have: a connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
