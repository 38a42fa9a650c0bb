"""Whole runs with a real server: under both event loops, and while its notification methods stall."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import psycopg
import pytest
import trio

from pushd.client import (
    Client,
    Consent,
    Disabled,
    Enabled,
    NotificationConfig,
    NotificationsStopped,
    UnknownConversation,
    fcm,
    notifications,
    open_client,
    webhook,
)
from pushd.client.groups import group_topic
from pushd.core.hmac_keys import derive_key, epoch_at, sender_hmac
from pushd.errors import Code
from tests.client.rig import INSTALLATION
from tests.client.worlds import ServerAddress
from tests.support.envelopes import COMMIT, private_message, welcome_envelope
from tests.support.server import base_config, running_server

# Nobody listens there: what is published in these tests makes the server knock, and nothing more.
NOWHERE = NotificationConfig(webhook("https://127.0.0.1:9/hook", bytes(32)))


def rows(server: ServerAddress, statement: str, *parameters: object) -> list[tuple]:
    with psycopg.connect(server.database_url, autocommit=True) as connection:
        return connection.execute(statement, parameters).fetchall()


async def until_stored(server: ServerAddress, topic: bytes) -> None:
    with anyio.fail_after(30):
        # Another process's table has no event to wait for.
        while not rows(server, "SELECT 1 FROM push_subscription WHERE topic = %s", topic):  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def until_waiting(server: ServerAddress) -> None:
    """Until a statement of the server waits for a lock."""
    statement = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with anyio.fail_after(30):
        while not rows(server, statement):  # noqa: ASYNC110
            await anyio.sleep(0.02)


def registered(client: Client) -> bool:
    state = client.notification_state()
    return isinstance(state, Enabled) and state.registered


def test_import_brings_in_nothing_of_the_server() -> None:
    server = {"trio", "psycopg", "purerpc", "structlog", "grpc"}
    script = f"import sys, pushd.client; print(sorted({server} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_one_code_base_runs_under_both_loops(start_server, tmp_path: Path, loop: str) -> None:
    server = start_server(100_000)
    anyio.run(_live, server, tmp_path / "client.db", backend=loop)


async def _live(server: ServerAddress, path: Path) -> None:
    address = f"http://{server.grpc}"
    group_id, installation = os.urandom(16), os.urandom(32)
    async with open_client(path, address, installation_key=installation) as client:
        assert client.notification_state() == Disabled()
        with pytest.raises(UnknownConversation):
            client.conversation(group_id)
        state = await client.enable_notifications(NOWHERE)
        assert state.topic_count == 0
        client.create_group(group_id)
        await until_stored(server, group_topic(group_id))
        root_key = client.cycle_root_key()

        first = await client.publish_message(private_message(group_id))
        await client.publish_message(private_message(group_id, COMMIT), should_push=True)
        await client.publish(welcome_envelope(installation))
        topic = group_topic(group_id)
        page = await client.query({topic: 0}, limit=1)
        assert page.has_more
        assert [one.meta.cursor.sequence_id for one in page.envelopes] == [first.cursor.sequence_id]
        stored = page.envelopes[0]
        key = derive_key(root_key, group_id, epoch_at(stored.meta.server_ns))
        assert stored.envelope.group_message.sender_hmac == sender_hmac(key, private_message(group_id))
        assert page.envelopes[0].envelope.group_message.should_push
        page = await client.query({topic: first.cursor.sequence_id, b"\x01" + installation: 0})
        assert not page.has_more
        assert [one.meta.is_commit_or_proposal for one in page.envelopes][:1] == [True]

        async def run() -> None:
            ran.set()

        ran = anyio.Event()
        client.tasks.handle("app", lambda payload: run())
        client.tasks.add("app")
        with anyio.fail_after(30):
            await ran.wait()

    # A restart with nothing to say says nothing; the state is there.
    async with open_client(path, "http://127.0.0.1:9", installation_key=installation) as client:
        await anyio.sleep(0.1)
        assert registered(client)

    # What the app's own code raises inside the block comes out as it is.
    with pytest.raises(KeyError):
        async with open_client(path, address, installation_key=installation) as client:
            await client.disable_notifications()
            assert client.notification_state() == Disabled()
            raise KeyError


async def test_channel_the_server_does_not_have_stops_notifications(own_database: str, tmp_path: Path) -> None:
    async with running_server(tmp_path, base_config(database={"url": own_database})) as server:
        async with open_client(tmp_path / "c.db", f"http://{server.grpc}", installation_key=INSTALLATION) as client:
            with pytest.raises(NotificationsStopped) as caught:
                await client.enable_notifications(NotificationConfig(fcm("token")))
            assert caught.value.code is Code.FAILED_PRECONDITION


async def test_T187_messages_flow_while_the_servers_notification_methods_stall(
    start_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, installation = start_server(100_000), os.urandom(32)
    async with open_client(tmp_path / "c.db", f"http://{server.grpc}", installation_key=installation) as client:
        await client.enable_notifications(NOWHERE)
        await until_stored(server, b"\x01" + installation)
        groups = os.urandom(16), os.urandom(16)
        rotated = trio.Event()

        async def rotate(payload: bytes) -> None:
            rotated.set()

        client.tasks.handle("key-package", rotate)
        # The thirty seconds themselves are measured on the virtual clock; here a real server really hangs.
        monkeypatch.setattr(notifications, "REQUEST_S", 3.0)
        lock = await trio.to_thread.run_sync(_lock_recipients, server.database_url)
        try:
            client.create_group(groups[0])
            await until_waiting(server)  # the update is in the server, which cannot go on
            client.tasks.add("key-package")
            client.set_consent(groups[0], Consent.DENIED)
            client.set_consent(groups[0], Consent.ALLOWED)
            with trio.fail_after(30):
                await client.publish_message(private_message(groups[0]))
                client.create_group(groups[1])
                await rotated.wait()  # the attempt gives up by itself, and the next task has its turn
        finally:
            await trio.to_thread.run_sync(lock.close)
        assert isinstance(client.notification_state(), Enabled)
        monkeypatch.undo()
        client.tasks.start_now("pushd.notifications")
        await until_stored(server, group_topic(groups[1]))


def _lock_recipients(database_url: str) -> psycopg.Connection:
    connection = psycopg.connect(database_url)
    connection.execute("LOCK TABLE push_recipient IN ACCESS EXCLUSIVE MODE")
    return connection
