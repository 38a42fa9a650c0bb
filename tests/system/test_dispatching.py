"""What a whole `pushd serve` that dispatches does to its database: what idling costs, and how a bug ends it."""

from __future__ import annotations

from pathlib import Path

import trio

from pushd.model import Channel
from tests.bench.measuring import StatementLog
from tests.dispatch.seed import Seed, eventually, recipient_id, target, topic
from tests.support.postgres import as_url
from tests.support.server import base_config, running_server

POLL_S = 0.1
STATEMENTS = 100


async def test_idle_tick_costs_four_statements_b119(database_url: str, tmp_path: Path) -> None:
    """The lock is proven, a page looked for, maintenance asked for and the log tailed, once a poll interval each.

    The time is taken to tell how many ticks there were at most: on a slow machine there are fewer statements.
    """
    with Seed(database_url) as seed:
        [(database, data_directory)] = seed.conn.execute(
            "SELECT current_database(), current_setting('data_directory')"
        ).fetchall()
        # For the sessions that begin from now on, which are the server's.
        seed.conn.execute(f"ALTER DATABASE {database} SET log_statement = 'all'".encode())
        seed.recipients([1])
        seed.subscribe([1], topic(1))
        seed.envelopes((number, topic(2)) for number in range(1, 1_001))
        seed.settle(1_000)
        seed.conn.execute("SELECT setval('envelope_sequence', 1000)")
        log = StatementLog(Path(data_directory).parent)
        async with running_server(tmp_path, base_config(database={"url": as_url(database_url)})) as server:
            await server.wait_event("term_started")
            await eventually(lambda: seed.cursor() == 1_000)
            log.skip()
            await eventually(lambda: log.count() >= STATEMENTS)  # what a new server does once is among these
            log.skip()
            began = trio.current_time()
            await eventually(lambda: log.count() >= STATEMENTS)
            assert log.count() <= 4 * ((trio.current_time() - began) / POLL_S + 1)


async def test_unexpected_error_in_the_dispatcher_ends_the_process_with_70(database_url: str, tmp_path: Path) -> None:
    with Seed(database_url) as seed:
        # What no release of pushd has stored, and the schema forbids: a channel there is not.
        seed.conn.execute("ALTER TABLE push_recipient DROP CONSTRAINT push_recipient_channel_check")
        seed.recipients([1])
        seed.conn.execute("UPDATE push_recipient SET channel = 9")
        seed.subscribe([1], topic(1))
        seed.envelopes([(1, topic(1))])
        seed.settle(1)
        seed.conn.execute("SELECT setval('envelope_sequence', 1)")
        async with running_server(
            tmp_path, base_config(database={"url": as_url(database_url)}), wait_ready=False
        ) as server:
            with trio.fail_after(60):
                assert await server.wait_exit() == 70
                await server.wait_ended()
        [crashed] = [event for event in server.events if event.get("event") == "crashed"]
        assert crashed["level"] == "critical"
        said = "\n".join(server.lines)
        assert "ValueError" in said
        assert "dispatch_pages.py" in said
        for private in (target(1, Channel.APNS), recipient_id(1).hex(), topic(1).hex()):
            assert private not in said
        assert seed.cursor() == 0, "the row is still to be sent"
        await eventually(lambda: seed.lock_holders() == [])
