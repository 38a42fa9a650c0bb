"""The operators' commands against a running installation, as an operator would type them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from fakes.launch import launch
from pushd.rpc.client import Channel, open_channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2
from pushd.store import embedded
from tests.support.envelopes import GROUP, group_envelope
from tests.support.server import ServerProcess, base_config, running_server

RECIPIENT = secrets.token_bytes(32)
SECRET = secrets.token_bytes(32)
KEY = secrets.token_bytes(32)


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="pushd-"))  # not tmp_path: too long for a socket
    yield place
    shutil.rmtree(place)


class Installation:
    """A server with one webhook recipient, and the commands pointed at it."""

    def __init__(self, folder: Path, server: ServerProcess, channel: Channel, url: str) -> None:
        self.folder = folder
        self.server = server
        self.channel = channel
        self.url = url
        self._place = ["--config", str(folder / "pushd.toml"), "--data-dir", str(folder / "data")]
        self.database_url = embedded.running_url(folder / "data") or ""

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "pushd", *argv, *self._place],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "COLUMNS": "100"},
        )
        for private in (RECIPIENT.hex(), SECRET.hex(), KEY.hex(), self.url, GROUP.hex()):
            assert private not in result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result

    def ask(self, *argv: str) -> Any:
        return json.loads(self.run(*argv, "--json").stdout)

    async def publish(self, **fields: Any) -> int:
        envelope = group_envelope(GROUP)
        envelope.group_message.should_push = fields.get("should_push", True)
        answer = await self.channel.unary(
            "/xmtp.backend.v1.PublishService/Publish",
            publish_pb2.PublishRequest(envelopes=[envelope]),
            publish_pb2.PublishResponse,
            deadline_s=30,
        )
        return answer.envelope_metas[0].cursor.sequence_id

    async def wait_cursor(self, sequence_id: int) -> None:
        with trio.fail_after(60):
            with psycopg.connect(self.database_url, autocommit=True) as conn:
                statement = "SELECT sequence_id >= %s FROM push_cursor"
                while conn.execute(statement, (sequence_id,)).fetchone() != (True,):  # noqa: ASYNC110
                    await trio.sleep(0.02)  # another process moves it


@asynccontextmanager
async def installation(folder: Path, port: int, ca: Path) -> AsyncIterator[Installation]:
    config = base_config(push={"http": {"allow_private_addresses": True, "ca_file": str(ca)}})
    async with running_server(folder, config) as server, open_channel("127.0.0.1", server.grpc_port) as channel:
        url = f"https://localhost:{port}/hook"
        service = "/xmtp.backend.v1.NotificationService"
        identity: dict[str, Any] = {"recipient_id": RECIPIENT, "recipient_secret": SECRET}
        register = wire.RegisterRequest(**identity, http=wire.HttpDelivery(url=url, signing_key=KEY))
        update = wire.UpdateSubscriptionsRequest(**identity, adds=[wire.Subscription(topic=b"\0" + GROUP)])
        await channel.unary(f"{service}/Register", register, wire.RecipientState, deadline_s=30)
        await channel.unary(f"{service}/UpdateSubscriptions", update, wire.RecipientState, deadline_s=30)
        yield Installation(folder, server, channel, url)


async def test_commands_agree_with_what_happened(folder: Path) -> None:
    with launch("webhooks") as hooks:
        async with installation(folder, hooks.port, hooks.ca) as here:
            pushed = await here.publish()
            quiet = await here.publish(should_push=False)
            await here.wait_cursor(pushed)

            status = here.ask("status")
            assert status["holder"].rpartition(":")[2] == str(here.server.process.pid)
            assert status["waiting_rows"] == 0
            assert status["lag_s"] == 0
            assert status["recipients"] == {"http": 1}
            assert status["topics"] == {"http": 1}
            assert 0 < status["next_expiry_s"] <= 2_592_000
            assert "eligible envelopes" in here.run("status").stdout

            explained = here.ask("explain", "--recipient", RECIPIENT.hex(), "--sequence", str(pushed))
            assert explained["verdict"].startswith("One delivery was attempted")
            assert {step["holds"] for step in explained["steps"]} == {"yes"}
            explained = here.ask("explain", "--recipient", RECIPIENT.hex(), "--sequence", str(quiet))
            assert explained["steps"][-1]["condition"] == "eligible"
            explained = here.ask("explain", "--recipient", "00" * 32, "--sequence", str(pushed))
            assert explained["steps"][-1]["condition"] == "registered"
            assert "not yet" not in here.run("explain", "--recipient", RECIPIENT.hex(), "--sequence", "1").stdout

            sent = here.ask("send-test", "--recipient", RECIPIENT.hex())
            assert (sent["channel"], sent["outcome"]) == ("http", "delivered")
            hooks.script("/hook", {"status": 410})
            sent = here.ask("send-test", "--recipient", RECIPIENT.hex())
            assert (sent["outcome"], sent["reason"]) == ("gone", "status_410")
            assert here.ask("status")["recipients"] == {"http": 1}  # whatever the answer, nothing was deleted
            target = ["--channel", "http", "--target", here.url, "--signing-key", KEY.hex()]
            assert here.run("send-test", *target).returncode == 0

            stepped = here.ask("step-down")  # there is no other instance, so it comes back
            assert stepped == {"before": status["holder"], "after": status["holder"], "stepped_down": True}


async def test_skip_moves_a_running_dispatcher_on_and_is_recorded(folder: Path) -> None:
    with launch("webhooks") as hooks:
        async with installation(folder, hooks.port, hooks.ca) as here:
            first = await here.publish()
            await here.wait_cursor(first)
            refused = here.run("cursor", "skip", "--to-boundary")
            assert refused.returncode == 1
            assert "--yes" in refused.stderr
            assert here.ask("cursor", "skip", "--to-boundary", "--yes") is None
            # Put the cursor back, so that there is something to skip while nobody dispatches it.
            with psycopg.connect(here.database_url, autocommit=True) as conn:
                conn.execute("UPDATE push_cursor SET sequence_id = 0")
            skipped = here.ask("cursor", "skip", "--to-boundary", "--yes")
            assert skipped == {"from_sequence_id": 0, "to_sequence_id": first, "eligible_rows": 1}
            assert here.ask("status")["skipped_rows"] == 1
            explained = here.ask("explain", "--recipient", RECIPIENT.hex(), "--sequence", str(first))
            assert explained["steps"][-1]["because"].startswith("an operator moved the cursor past it")
            later = await here.publish()
            await here.wait_cursor(later)


async def test_prune_takes_what_expired_and_was_dispatched(folder: Path) -> None:
    with launch("webhooks") as hooks:
        async with installation(folder, hooks.port, hooks.ca) as here:
            kept, expired = await here.publish(), await here.publish()
            await here.wait_cursor(expired)
            with psycopg.connect(here.database_url, autocommit=True) as conn:
                conn.execute("UPDATE envelopes SET server_ns = 1, expiry_ns = 2 WHERE sequence_id = %s", (expired,))
                conn.execute(
                    "INSERT INTO envelopes (sequence_id, topic, server_ns, expiry_ns, message_hash,"
                    " is_commit_or_proposal, push_eligible, payload)"
                    " SELECT 1000000, topic, 1, 2, sha256('x'), false, true, payload FROM envelopes LIMIT 1"
                )
                assert here.ask("prune") == {"deleted": 1}
                left = conn.execute("SELECT sequence_id FROM envelopes ORDER BY 1").fetchall()
            assert left == [(kept,), (1_000_000,)]  # the one above the cursor stays, expired or not


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["status"], 1, "no pushd runs on this --data-dir"),
        (["explain", "--recipient", "zz", "--sequence", "1"], 2, "64 hex digits"),
        (["send-test"], 2, "name either --recipient, or --channel and --target"),
        (["send-test", "--channel", "fcm"], 2, "name either --recipient, or --channel and --target"),
        (["send-test", "--recipient", "00" * 32, "--target", "t"], 2, "name either --recipient, or --channel and"),
        (["send-test", "--recipient", "00"], 2, "64 hex digits"),
        (["send-test", "--channel", "http", "--target", "https://h/"], 2, "--signing-key must be"),
        (["send-test", "--channel", "fcm", "--target", "t"], 1, "push.fcm: this block is missing"),
        (["prune"], 1, "no pushd runs on this --data-dir"),
    ],
)
def test_mistakes_get_one_clear_line(folder: Path, argv: list[str], code: int, text: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pushd", *argv, "--data-dir", str(folder / "data")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
