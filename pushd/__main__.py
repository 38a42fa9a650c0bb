"""The command line: one function per command. It reads arguments, calls, and turns errors into one line and a code.

Exit codes: 0 done (for `serve`: stopped after a drain); 1 cannot start or be done, or the check found errors; 2 the
command line is wrong; 70 ended by an unexpected error, which was logged; 128 + n ended at once by signal n (for
`serve`: by the second one).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import cyclopts
import trio
from cyclopts import Parameter

from pushd import __version__
from pushd.errors import ConfigError, StartError, StoreError, UsageError
from pushd.telemetry import Event, configure_logging, get_logger

EXIT_CANNOT_START = 1
EXIT_USAGE = 2  # as the command line's parser ends
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
    """Serve until SIGTERM, Ctrl-C or the terminal's end; the first drains, a second ends at once.

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
    from pushd.stop import stop_signals
    from pushd.store.startup import embedded_server, watch_embedded_server

    async def run() -> None:
        with trio.open_signal_receiver(*stop_signals()) as signals:

            async def end_at_signal(scope: trio.CancelScope) -> None:
                await signals.__anext__()
                scope.cancel(reason="signal")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_at_signal, nursery.cancel_scope)
                async with embedded_server(data_dir) as url:
                    print(url, flush=True)
                    await watch_embedded_server(data_dir)

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
def check_config(
    file: Annotated[
        Path | None, Parameter(help="TOML file; else the one PUSHD_CONFIG names, else the defaults.")
    ] = None,
    /,
    *,
    json: Json = False,
    online: Annotated[bool, Parameter(negative="", help="Ask database, issuer and providers too.")] = False,
) -> int:
    """Say what is wrong or doubtful in a configuration, one finding a line; exit 1 when something is wrong.

    Starts and changes nothing. With --online it connects to the database, fetches the issuer's keys, and asks APNs and
    FCM about a token that belongs to no device, which shows whether they accept the credentials.
    """
    from pushd.ops.check_config import run_check_config
    from pushd.ops.online import check_online

    return run_check_config(
        file, json=json, online=(lambda config: _run(partial(check_online, config))) if online else None
    )


@app.command(name="config")
def show_config(
    file: Annotated[
        Path | None, Parameter(help="TOML file; else the one PUSHD_CONFIG names, else the defaults.")
    ] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """Print the configuration in effect: each key, its value, and where that comes from; nothing private is shown."""
    from pushd.ops.show_config import run_show_config

    run_show_config(file, json=json)
    return 0


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
def status(*, config: ConfigFile = None, data_dir: DataDir = DEFAULT_DATA_DIR, json: Json = False) -> int:
    """Say who dispatches, how far it is, and for how many recipients; exit 1 when nobody dispatches."""
    from pushd.config import load_config
    from pushd.ops.inspect import run_status

    loaded = load_config(config, os.environ)
    code: int = _run(partial(run_status, loaded, data_dir, as_json=json))
    return code


@app.command
def explain(
    *,
    recipient: Annotated[str, Parameter(help="The recipient's id, 64 hex digits.")],
    sequence: Annotated[int, Parameter(help="The envelope's sequence id.")],
    config: ConfigFile = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> int:
    """Say why an envelope was, or was not, pushed to a recipient."""
    from pushd.channels.setup import configured_channels
    from pushd.config import load_config
    from pushd.ops.inspect import run_explain

    loaded = load_config(config, os.environ)
    channels = configured_channels(loaded.push)
    code: int = _run(partial(run_explain, loaded, data_dir, recipient, sequence, channels, as_json=json))
    return code


@app.command(name="send-test")
def send_test(
    *,
    recipient: Annotated[str | None, Parameter(help="Id of a registered recipient, 64 hex digits.")] = None,
    channel: Annotated[Literal["apns", "fcm", "http"] | None, Parameter(help="With --target.")] = None,
    target: Annotated[str | None, Parameter(help="Device token, or the URL of a webhook.")] = None,
    signing_key: Annotated[str | None, Parameter(help="A webhook's key, in hex digits.")] = None,
    config: ConfigFile = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> int:
    """Send one push to a registered recipient or a given target and say what came of it; exit 1 unless delivered.

    It carries a topic nobody has and sequence id 0. Nothing is stored or deleted, whatever the answer.
    """
    from pushd.config import load_config
    from pushd.model import Channel
    from pushd.ops.send_test import run_send_test, stored_delivery, test_delivery

    loaded = load_config(config, os.environ)
    by_target = (channel, target, signing_key) != (None, None, None)
    if (recipient is not None) == by_target or (by_target and (channel is None or target is None)):
        raise UsageError("name either --recipient, or --channel and --target")

    async def run() -> int:
        if recipient is not None:
            delivery = await stored_delivery(loaded, data_dir, recipient)
        else:
            assert channel is not None
            assert target is not None
            delivery = test_delivery(Channel[channel.upper()], target, signing_key)
        return await run_send_test(loaded, delivery, as_json=json)

    code: int = _run(run)
    return code


cursor = cyclopts.App(name="cursor", help="Look at the cursor of dispatching, or move it on.")
app.command(cursor)


@cursor.command
def show(*, config: ConfigFile = None, data_dir: DataDir = DEFAULT_DATA_DIR, json: Json = False) -> int:
    """Print the cursor and the closed boundary."""
    from pushd.config import load_config
    from pushd.ops.inspect import run_cursor_show

    loaded = load_config(config, os.environ)
    code: int = _run(partial(run_cursor_show, loaded, data_dir, as_json=json))
    return code


@cursor.command
def skip(
    *,
    to_boundary: Annotated[bool, Parameter(negative="", help="Skip to the closed boundary (the only place there is).")],
    yes: Annotated[bool, Parameter(negative="", help="Really.")] = False,
    config: ConfigFile = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> int:
    """Drop the push of everything up to the closed boundary, for instance after a long outage. Logged and recorded."""
    from pushd.config import load_config
    from pushd.ops.inspect import run_cursor_skip

    loaded = load_config(config, os.environ)
    code: int = _run(partial(run_cursor_skip, loaded, data_dir, is_sure=yes and to_boundary, as_json=json))
    return code


@app.command(name="step-down")
def step_down(*, config: ConfigFile = None, data_dir: DataDir = DEFAULT_DATA_DIR, json: Json = False) -> int:
    """Ask the instance that dispatches to finish what it began and leave dispatching to another one.

    It goes on serving calls, and stays away from the lock for 20 poll intervals. Exit 1 when nobody dispatches, or the
    one who does has not let go by the end of the drain time.
    """
    from pushd.config import load_config
    from pushd.ops.inspect import run_step_down

    loaded = load_config(config, os.environ)
    code: int = _run(partial(run_step_down, loaded, data_dir, as_json=json))
    return code


@app.command
def prune(*, config: ConfigFile = None, data_dir: DataDir = DEFAULT_DATA_DIR, json: Json = False) -> int:
    """Delete expired envelopes that were dispatched."""
    from pushd.config import load_config
    from pushd.ops.inspect import run_prune

    loaded = load_config(config, os.environ)
    code: int = _run(partial(run_prune, loaded, data_dir, as_json=json))
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
    # A store's error has a text of its own; its traceback would show the driver's, which quotes stored values.
    if all(isinstance(leaf, (ConfigError, StartError, StoreError)) for leaf in leaves):
        for line in dict.fromkeys(line for leaf in leaves for line in str(leaf).splitlines()):
            print(f"pushd: {line}", file=sys.stderr)
        return EXIT_USAGE if any(isinstance(leaf, UsageError) for leaf in leaves) else EXIT_CANNOT_START
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
