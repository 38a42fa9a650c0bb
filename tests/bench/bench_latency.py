"""From the start of Publish to the push at the provider, unloaded, through a real server: in poll intervals of 100 ms.

Publishes come at random moments, so that they fall anywhere in a poll interval. The fake stamps what it receives with
the wall clock of this same machine. There is no rate: publishes wait for the random moments.
"""

from __future__ import annotations

import json
import random
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from fakes.launch import RunningFake, launch
from pushd.rpc.client import Channel, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2
from tests.bench.measuring import line, peak_rss_mib
from tests.support.envelopes import GROUP, group_envelope
from tests.support.server import base_config, running_server

PUBLISHES = 150
POLL_S = 0.1
TARGET = {"p50_polls": 1.2, "p99_polls": 3}


async def measure(folder: Path, hooks: RunningFake) -> tuple[list[float], float]:
    """Latencies in seconds, ascending, and the most memory of the server in MiB."""
    config = base_config(push={"http": {"allow_private_addresses": True, "ca_file": str(hooks.ca)}})
    async with running_server(folder, config) as server, open_channel("127.0.0.1", server.grpc_port) as channel:
        await register(channel, f"https://localhost:{hooks.port}/hook")
        begun: dict[int, float] = {}
        for _ in range(PUBLISHES):
            await trio.sleep(random.uniform(0.05, 0.25))
            envelope = group_envelope(GROUP)
            envelope.group_message.should_push = True
            start = time.time()
            answer = await channel.unary(
                "/xmtp.backend.v1.PublishService/Publish",
                publish_pb2.PublishRequest(envelopes=[envelope]),
                publish_pb2.PublishResponse,
                deadline_s=30,
            )
            begun[answer.envelope_metas[0].cursor.sequence_id] = start
        with trio.fail_after(60):
            while hooks.stats()["requests"] < PUBLISHES:  # noqa: ASYNC110
                await trio.sleep(0.1)
        peak_mib = peak_rss_mib(server.process.pid)
    latencies = [
        request["wall_s"] - begun[int(json.loads(request["body"])["sequence_id"])] for request in hooks.requests()
    ]
    return sorted(latencies), peak_mib


async def register(channel: Channel, url: str) -> None:
    service = "/xmtp.backend.v1.NotificationService"
    identity: dict[str, Any] = {"recipient_id": secrets.token_bytes(32), "recipient_secret": secrets.token_bytes(32)}
    register = wire.RegisterRequest(**identity, http=wire.HttpDelivery(url=url, signing_key=secrets.token_bytes(32)))
    update = wire.UpdateSubscriptionsRequest(**identity, adds=[wire.Subscription(topic=b"\0" + GROUP)])
    await channel.unary(f"{service}/Register", register, wire.RecipientState, deadline_s=30)
    await channel.unary(f"{service}/UpdateSubscriptions", update, wire.RecipientState, deadline_s=30)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pushd-"))
    try:
        with launch("webhooks") as hooks:
            latencies, rss_mib = trio.run(measure, folder, hooks)
    finally:
        shutil.rmtree(folder)
    median, late = latencies[len(latencies) // 2], latencies[int(0.99 * len(latencies))]
    print(
        line(
            "latency",
            rate=None,
            bound_is="none: a time is measured",
            cpu_us_per_item=None,
            rss_mib=rss_mib,
            target=TARGET,
            p50_polls=round(median / POLL_S, 2),
            p99_polls=round(late / POLL_S, 2),
        )
    )


if __name__ == "__main__":
    main()
