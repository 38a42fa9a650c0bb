"""The command line: one function per command. It reads arguments, calls, and turns errors into one line and a code.

Exit codes: 0 done (for `serve`: stopped after a drain); 1 cannot start, or the check found errors; 2 the command line
is wrong; 70 ended by an unexpected error, which was logged; 128 + n ended at once by a second signal n.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import cyclopts
import trio
from cyclopts import Parameter

from pushd import __version__
from pushd.errors import ConfigError, StartError
from pushd.telemetry import Event, configure_logging, get_logger

EXIT_CANNOT_START = 1
EXIT_CRASHED = 70  # EX_SOFTWARE of sysexits.h

app = cyclopts.App(
    name="pushd",
    help="A self-hosted backend for end-to-end encrypted messaging whose speciality is push.",
    version=__version__,
    version_flags=["--version"],
    result_action="return_value",
)

ConfigFile = Annotated[
    Path | None, Parameter(name="--config", help="TOML file; else the one PUSHD_CONFIG names, else the defaults.")
]
DataDir = Annotated[
    Path, Parameter(name="--data-dir", help="Where the embedded PostgreSQL keeps its data, when no database is named.")
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
DEFAULT_DATA_DIR = Path("pushd-data")


@app.command
def serve(*, config: ConfigFile = None, data_dir: DataDir = DEFAULT_DATA_DIR) -> int:
    """Serve until SIGTERM or Ctrl-C; the first drains, a second ends at once.

    Without [database] url it starts an embedded PostgreSQL in --data-dir.
    """
    from pushd.app import serve_with_signals
    from pushd.config import load_config

    loaded = load_config(config, os.environ)
    configure_logging(loaded.server.log_level, loaded.server.log_format)
    signum = _run(partial(serve_with_signals, loaded, data_dir))
    return 0 if signum is None else 128 + signum


@app.command
def db(*, data_dir: DataDir = DEFAULT_DATA_DIR) -> int:
    """Run the embedded PostgreSQL in the foreground and print its URL, so that several instances can share it."""
    from pushd.store.startup import embedded_server

    async def run() -> None:
        async with embedded_server(data_dir) as url:
            print(url, flush=True)
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await signals.__anext__()

    _run(run)
    return 0


@app.command
def migrate(*, config: ConfigFile = None, data_dir: DataDir = DEFAULT_DATA_DIR) -> int:
    """Bring the database's schema up to date (serve does so by itself)."""
    from pushd.config import load_config
    from pushd.store.startup import open_prepared_database
    from pushd.telemetry import Metrics

    loaded = load_config(config, os.environ)

    async def run() -> None:
        async with open_prepared_database(loaded, data_dir, Metrics()):
            print("The schema is up to date.")

    _run(run)
    return 0


@app.command(name="check-config")
def check_config(file: Path | None = None, /, *, json: Json = False) -> int:
    """Say what is wrong or doubtful in a configuration, one finding a line, without starting anything."""
    from pushd.ops.check_config import run_check_config

    return run_check_config(file, json=json)


@app.command(name="config-schema")
def config_schema() -> int:
    """Print the JSON schema of the configuration file."""
    from pushd.ops.check_config import print_schema

    print_schema()
    return 0


@app.command
def health(
    address: Annotated[str, Parameter(help="Host and port of the gRPC listener.")] = "127.0.0.1:5050",
    /,
    *,
    service: Annotated[str, Parameter(help="A service's full name; empty asks for the whole server.")] = "",
    tls: Annotated[bool, Parameter(negative="", help="The listener uses TLS.")] = False,
    ca_file: Annotated[Path | None, Parameter(help="PEM file with the authority to trust.")] = None,
) -> int:
    """Ask a running server for its health: exit 0 when it serves, else 1. For container health checks."""
    from pushd.ops.health import run_health

    code: int = _run(partial(run_health, address, service, tls=tls, ca_file=ca_file))
    return code


@app.command
def demo(
    *,
    json: Json = False,
    seconds: Annotated[int, Parameter(help="How long to publish.", validator=cyclopts.validators.Number(gte=1))] = 5,
) -> int:
    """Show pushes arriving: server, PostgreSQL and fake providers, all on this machine, in a folder that is removed."""
    from pushd.ops.demo import run_demo

    code: int = _run(partial(run_demo, as_json=json, seconds=seconds))
    return code


def _run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return trio.run(main)


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside nested groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


def _exit_code(error: BaseException) -> int:
    """Explain `error` on standard error: a line for what a person can mend, a traceback for what an engineer must."""
    leaves = _leaves(error)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return 128 + signal.SIGINT
    if all(isinstance(leaf, (ConfigError, StartError)) for leaf in leaves):
        for line in dict.fromkeys(line for leaf in leaves for line in str(leaf).splitlines()):
            print(f"pushd: {line}", file=sys.stderr)
        return EXIT_CANNOT_START
    get_logger().critical(Event.CRASHED, exc_info=error)
    return EXIT_CRASHED


def main() -> NoReturn:
    """Entry point of the `pushd` command."""
    configure_logging()
    try:
        code = app()
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        code = _exit_code(error)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
