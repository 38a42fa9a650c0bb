"""`pushd demo`: a whole installation on this machine, and pushes seen arriving.

The server, its PostgreSQL and the three providers are processes of their own, as they would be in earnest; only the
providers are fakes. The demo is a client: it registers recipients, subscribes them, publishes, and watches what the
fakes receive.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import trio
from attrs import define, field, frozen
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pushd.errors import StartError, StatusError
from pushd.model import Channel
from pushd.rpc.client import Channel as RpcChannel
from pushd.rpc.client import open_channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, types_pb2

RECIPIENTS_PER_CHANNEL = 4
TOPICS = 3
PUBLISHES_PER_S = 20
POLL_S = 0.1
START_S = 60.0
ARRIVE_S = 30.0
CALL_S = 10.0
_SERVICE = "/xmtp.backend.v1."


_PACKAGE = Path(__file__).resolve().parent.parent
_ROOT = _PACKAGE.parent
_FAKES = "pushd._fakes" if (_PACKAGE / "_fakes").is_dir() else "fakes"  # installed, or in a checkout


class DemoFailed(StartError):
    """The demo did not show what it set out to; the text says why."""


@frozen
class Fake:
    """A running fake provider: what it printed about itself."""

    facts: Mapping[str, Any]

    async def received(self, client: httpx2.AsyncClient) -> list[tuple[bytes, int, float]]:
        """(device, sequence id, Unix time) of everything received so far."""
        answer = await client.get(f"http://127.0.0.1:{self.facts['control_port']}/requests")
        return [_arrival(request) for request in answer.json()]


def _arrival(request: Mapping[str, Any]) -> tuple[bytes, int, float]:
    """Which device got which sequence id when; the three channels carry the same fields in different places."""
    body = json.loads(request["body"])
    path = request["headers"].get(":path", "")
    if "message" in body:
        device, body = body["message"]["token"], body["message"]["data"]
    elif path.startswith("/3/device/"):
        device = path.removeprefix("/3/device/")
    else:
        device = body["recipient_id"]
    return device.encode(), int(body["sequence_id"]), request["wall_s"]


@define
class Tally:
    """What was expected of one channel and what came."""

    expected: int = 0
    latencies_s: dict[tuple[bytes, int], float] = field(factory=dict, repr=False)

    @property
    def received(self) -> int:
        return len(self.latencies_s)

    def quantile_ms(self, part: float) -> float | None:
        """The latency from the start of Publish to the push at the provider that `part` of the pushes stay below."""
        ordered = sorted(self.latencies_s.values())
        return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1_000, 1) if ordered else None


async def run_demo(*, as_json: bool, seconds: int) -> int:
    """Run the demo for about `seconds` of publishing; 0 when every push arrived, 143 when SIGTERM ended it.

    Raises:
        DemoFailed: a process did not start, a call failed, or a push did not arrive.
    """
    code = 128 + signal.SIGTERM
    async with trio.open_nursery() as nursery:
        await nursery.start(_end_with_sigterm, nursery.cancel_scope)
        code = await _run(as_json=as_json, seconds=seconds)
        nursery.cancel_scope.cancel(reason="shown")
    return code


async def _end_with_sigterm(demo: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    """Its processes and its folder must not outlive the demo; Ctrl-C needs no such help."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        await signals.__anext__()
        demo.cancel(reason="SIGTERM")


async def _run(*, as_json: bool, seconds: int) -> int:
    began = time.monotonic()
    console = Console(stderr=as_json)
    folder = Path(tempfile.mkdtemp(prefix="pushd-demo-"))
    try:
        async with AsyncExitStack() as stack:
            console.print("Starting PostgreSQL, pushd and three fake providers on this machine ...")
            fakes = await _start_fakes(stack, folder)
            server = await stack.enter_async_context(_running_server(folder, fakes))
            started_s = time.monotonic() - began
            host, _, port = server["grpc"].rpartition(":")
            rpc = await stack.enter_async_context(open_channel(host, int(port)))
            try:
                tallies, counted = await _show(console, rpc, fakes, server, seconds, live=not as_json)
            except StatusError as exc:
                raise DemoFailed(f"a call failed: {exc.code.name} {exc.message}") from exc
        return _conclude(console, tallies, counted, started_s, as_json=as_json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _show(
    console: Console,
    rpc: RpcChannel,
    fakes: Mapping[Channel, Fake],
    server: Mapping[str, Any],
    seconds: int,
    *,
    live: bool,
) -> tuple[dict[Channel, Tally], int]:
    groups = [secrets.token_bytes(16) for _ in range(TOPICS)]
    for channel, fake in fakes.items():
        for number in range(RECIPIENTS_PER_CHANNEL):
            await _register(rpc, channel, fake, number, [b"\0" + group for group in groups])
    tallies = {channel: Tally() for channel in fakes}
    published: dict[int, float] = {}
    async with httpx2.AsyncClient(trust_env=False) as client:
        with (
            Live(_picture(tallies, 0), console=console, refresh_per_second=10, transient=False)
            if live
            else _Quiet() as view
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_publish, rpc, groups, tallies, published, seconds)
                await _watch(client, fakes, tallies, published, view, seconds)
        text = (await client.get(f"http://{server['metrics']}/metrics")).text
    delivered = sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("xmtp_push_deliveries_total") and 'outcome="delivered"' in line
    )
    return tallies, int(delivered)


async def _register(rpc: RpcChannel, channel: Channel, fake: Fake, number: int, topics: list[bytes]) -> None:
    recipient_id, recipient_secret = secrets.token_bytes(32), secrets.token_bytes(32)
    request = notification_pb2.RegisterRequest(recipient_id=recipient_id, recipient_secret=recipient_secret)
    match channel:
        case Channel.APNS:
            request.apns.token = secrets.token_hex(32)
        case Channel.FCM:
            request.fcm.token = secrets.token_urlsafe(120)
        case Channel.HTTP:
            request.http.url = f"https://localhost:{fake.facts['port']}/hooks/{number}"
            request.http.signing_key = secrets.token_bytes(32)
    state = notification_pb2.RecipientState
    await rpc.unary(f"{_SERVICE}NotificationService/Register", request, state, deadline_s=CALL_S)
    update = notification_pb2.UpdateSubscriptionsRequest(
        recipient_id=recipient_id,
        recipient_secret=recipient_secret,
        adds=[notification_pb2.Subscription(topic=topic) for topic in topics],
    )
    await rpc.unary(f"{_SERVICE}NotificationService/UpdateSubscriptions", update, state, deadline_s=CALL_S)


async def _publish(
    rpc: RpcChannel, groups: list[bytes], tallies: Mapping[Channel, Tally], published: dict[int, float], seconds: int
) -> None:
    """Publish messages that ask for a push, noting when each call began."""
    for number in range(seconds * PUBLISHES_PER_S):
        envelope = types_pb2.ClientEnvelope()
        envelope.group_message.data = _message(groups[number % len(groups)])
        envelope.group_message.should_push = True
        begun = time.time()
        answer = await rpc.unary(
            f"{_SERVICE}PublishService/Publish",
            publish_pb2.PublishRequest(envelopes=[envelope]),
            publish_pb2.PublishResponse,
            deadline_s=CALL_S,
        )
        published[answer.envelope_metas[0].cursor.sequence_id] = begun
        for tally in tallies.values():
            tally.expected += RECIPIENTS_PER_CHANNEL
        await trio.sleep(1 / PUBLISHES_PER_S)


def _message(group_id: bytes) -> bytes:
    """A PrivateMessage of RFC 9420 §6.3 with an application's content type; nothing in it is really encrypted."""
    head = struct.pack(">HH", 1, 2) + bytes([len(group_id)]) + group_id + struct.pack(">Q", 1) + b"\x01"
    return head + b"\x00" + b"\x20" + secrets.token_bytes(32) + b"\x20" + secrets.token_bytes(32)


async def _watch(
    client: httpx2.AsyncClient,
    fakes: Mapping[Channel, Fake],
    tallies: Mapping[Channel, Tally],
    published: Mapping[int, float],
    view: Any,
    seconds: int,
) -> None:
    """Follow what the fakes receive until everything that is expected has come.

    Raises:
        DemoFailed: pushes are missing ARRIVE_S after the last publish.
    """
    end = trio.current_time() + seconds + ARRIVE_S
    total = seconds * PUBLISHES_PER_S * RECIPIENTS_PER_CHANNEL
    while True:
        for channel, fake in fakes.items():
            for device, sequence_id, wall_s in await fake.received(client):
                if sequence_id in published:
                    tallies[channel].latencies_s.setdefault((device, sequence_id), wall_s - published[sequence_id])
        view.update(_picture(tallies, len(published)))
        if all(tally.received >= total for tally in tallies.values()):
            return
        if trio.current_time() > end:
            missing = {channel.label: total - tally.received for channel, tally in tallies.items()}
            raise DemoFailed(f"pushes did not arrive: {missing} are missing")
        await trio.sleep(POLL_S)


class _Quiet:
    """Stands in for the live view where nobody watches."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, _picture: object) -> None:
        return None


_NAMES = {Channel.APNS: "APNs", Channel.FCM: "FCM", Channel.HTTP: "HTTPS webhook"}


def _picture(tallies: Mapping[Channel, Tally], published: int) -> Group:
    table = Table(title=None)
    for title in ("channel", "recipients", "expected", "received", "p50 ms", "p99 ms"):
        table.add_column(title, justify="left" if title == "channel" else "right")
    for channel, tally in tallies.items():
        row = (tally.expected, tally.received, tally.quantile_ms(0.5), tally.quantile_ms(0.99))
        table.add_row(
            _NAMES[channel], str(RECIPIENTS_PER_CHANNEL), *("–" if value is None else str(value) for value in row)
        )
    return Group(Text(f"{published} messages published, each to {3 * RECIPIENTS_PER_CHANNEL} recipients"), table)


def _conclude(
    console: Console, tallies: Mapping[Channel, Tally], counted: int, started_s: float, *, as_json: bool
) -> int:
    received = sum(tally.received for tally in tallies.values())
    if counted != received:
        raise DemoFailed(f"the server counted {counted} deliveries, the providers received {received}")
    if as_json:
        summary = {
            "ok": True,
            "started_s": round(started_s, 2),
            "received": {channel.label: tally.received for channel, tally in tallies.items()},
            "counted_by_server": counted,
            "latency_ms": {
                channel.label: {"p50": tally.quantile_ms(0.5), "p99": tally.quantile_ms(0.99)}
                for channel, tally in tallies.items()
            },
        }
        print(json.dumps(summary))
        return 0
    program = _program()
    middle = statistics.median(value for tally in tallies.values() for value in tally.latencies_s.values())
    console.print(
        f"\nAll {received} pushes arrived, half of them within {middle * 1_000:.0f} ms of Publish; the server counted "
        f"{counted}. It was serving {started_s:.1f} s after the start."
        "\n\nNext:"
        f"\n  {program} serve            a server of your own on 127.0.0.1:5050, data in ./pushd-data"
        f"\n  {program} check-config     what is wrong or doubtful in a configuration"
        f"\n  {program} config-schema    every key",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _program() -> str:
    """The command as it can be typed here: its path, as it may not be on the PATH, and bash has a builtin `pushd`."""
    script = Path(sys.executable).with_name("pushd")
    return min(str(script), os.path.relpath(script), key=len) if script.exists() else f"{sys.executable} -m pushd"


async def _start_fakes(stack: AsyncExitStack, folder: Path) -> dict[Channel, Fake]:
    """Start all three, then wait for each to say where it is."""
    modules = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
    processes = {}
    for channel, name in modules.items():
        argv = [sys.executable, "-m", f"{_FAKES}.{name}", "--exit-with-stdin", "--folder", str(folder / name)]
        process = _process(argv, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes[channel] = await stack.enter_async_context(process)
    fakes = {}
    for channel, running in processes.items():
        assert running.stdout is not None
        line = await _first_line(running.stdout)
        if line is None:
            raise DemoFailed(f"the fake {modules[channel]} provider did not start")
        fakes[channel] = Fake(json.loads(line))
    return fakes


def _configure(folder: Path, fakes: Mapping[Channel, Fake]) -> tuple[Path, dict[str, str]]:
    """Write the configuration; returns its path and the environment that holds the credentials."""
    apns, fcm, http = (fakes[channel].facts for channel in (Channel.APNS, Channel.FCM, Channel.HTTP))
    config = folder / "pushd.toml"
    config.write_text(
        f"""
[server]
listen = "127.0.0.1:0"
log_format = "json"
request_logger = false
[telemetry]
metrics_listen = "127.0.0.1:0"
[push.apns]
key = "env:PUSHD_DEMO_APNS_KEY"
key_id = "{apns["key_id"]}"
team_id = "{apns["team_id"]}"
bundle_id = "org.example.demo"
environment = "sandbox"
endpoint = "{apns["endpoint"]}"
ca_file = "{apns["ca"]}"
[push.fcm]
service_account = "env:PUSHD_DEMO_FCM_ACCOUNT"
endpoint = "{fcm["endpoint"]}"
ca_file = "{fcm["ca"]}"
[push.http]
allow_private_addresses = true
ca_file = "{http["ca"]}"
"""
    )
    environ = {
        **os.environ,
        "PUSHD_DEMO_APNS_KEY": Path(apns["key"]).read_text(),
        "PUSHD_DEMO_FCM_ACCOUNT": Path(fcm["service_account"]).read_text(),
    }
    return config, environ


@asynccontextmanager
async def _running_server(folder: Path, fakes: Mapping[Channel, Fake]) -> AsyncIterator[Mapping[str, Any]]:
    """A server configured for the fakes; yields its `ready` event. It is drained at the end."""
    config, environ = _configure(folder, fakes)
    argv = [sys.executable, "-m", "pushd", "serve", "--config", str(config), "--data-dir", str(folder / "data")]
    async with _process(argv, stderr=subprocess.PIPE, env=environ) as process:
        assert process.stderr is not None
        async with trio.open_nursery() as nursery:
            ready = await nursery.start(_follow_log, process.stderr)
            yield ready
            process.send_signal(signal.SIGTERM)
            if await process.wait() != 0:
                raise DemoFailed(f"the server did not stop cleanly: exit code {process.returncode}")


async def _follow_log(stream: trio.abc.ReceiveStream, *, task_status: trio.TaskStatus[Mapping[str, Any]]) -> None:
    """Report the `ready` event, then read on, so that the server never waits for somebody to read its log."""
    last = "no output"
    ready = False
    with trio.move_on_after(START_S) as scope:
        async for line in _lines(stream):
            last = line
            if not ready and '"ready"' in line:
                ready = True
                scope.deadline = float("inf")
                task_status.started(json.loads(line))
    if not ready:
        raise DemoFailed(f"the server did not start: {last}")


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    buffer = b""
    while chunk := await stream.receive_some():
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


async def _first_line(stream: trio.abc.ReceiveStream) -> str | None:
    buffer = b""
    with trio.move_on_after(START_S):
        while b"\n" not in buffer:
            chunk = await stream.receive_some()
            if not chunk:
                return None
            buffer += chunk
    return buffer.partition(b"\n")[0].decode() or None


@asynccontextmanager
async def _process(argv: list[str], **options: Any) -> AsyncIterator[trio.Process]:
    """A child process that does not outlive the block."""
    process = await trio.lowlevel.open_process(argv, **options)
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
                with trio.move_on_after(10):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
