"""Sessions that are terminated, servers that restart and crash, statements that run out of time."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from tests.faults.cluster import DbProcess, until
from tests.faults.moments import locked, logged, settled
from tests.faults.world import Fakes, Tell, World, open_world


async def test_terminated_sessions_lose_nothing_and_only_that_of_the_lock_repeats(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, is_short: bool, tell: Tell
) -> None:
    """pg_terminate_backend on every kind of session, of both instances, under load."""
    # Named as its own replica, the database has a second pool to lose.
    async with open_world(db, fakes, folder, instances=2, replica_url=lambda url: url) as world:
        world.latency(100)
        async with world.load(150):
            kinds = ["loader", "primary", "replica", "tailer"] * (1 if is_short else 3)
            rng.shuffle(kinds)
            for kind in kinds:
                await world.received_more(100)
                holder = await world.holder()
                # One that was ended before may be on its way back.
                await until(lambda kind=kind, holder=holder: world.terminate(kind, holder.pid) > 0)
                for other in world.up:
                    world.terminate(kind, other.pid)
            await world.received_more(100)
            assert len(world.cursors) == 1, "none of these is the session that holds the lock"
            for _ in range(1 if is_short else 3):
                holder = await world.holder()
                async with world.next_term():
                    assert world.terminate("dispatcher", holder.pid) == 1
                await world.received_more(100)
        report = await world.settle()
        # Everything in flight when the lock was lost finished and was counted; nothing was killed.
        assert report.outcomes == {"delivered": report.received}
        tell(report)


async def test_database_that_restarts_and_crashes_loses_nothing_it_acknowledged(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """An orderly restart, a crash of one backend, a crash of the server, and `pushd db` killed beside its server."""

    async def restart() -> None:
        await db.stop()
        await db.start()

    async def crash_of_a_backend() -> None:
        holder = await world.holder()
        name = f"pushd dispatcher %:{holder.pid}"
        ((pid,),) = world.ask("SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s", name)
        os.kill(pid, signal.SIGKILL)
        world.close()

    async def crash() -> None:
        await db.crash()
        await db.start()

    async def takeover() -> None:
        await db.kill()
        await db.start()

    outages = [restart, crash_of_a_backend, crash, takeover]
    rng.shuffle(outages)
    async with open_world(db, fakes, folder, instances=2) as world:
        world.latency(50)
        async with world.load(100):
            for outage in outages:
                await world.received_more(50)
                async with world.next_term():
                    await outage()
                    world.close()
            await world.received_more(50)
        report = await world.settle()
        assert report.outcomes == {"delivered": report.received}
        tell(report)


async def test_statements_that_run_out_of_time_are_tried_again(
    db: DbProcess, fakes: Fakes, folder: Path, rng: random.Random, tell: Tell
) -> None:
    """Locks held by somebody else make one kind of statement after the other time out, under load.

    Each lock is held until every statement that wants it has given up, so one without a limit of its own is noticed.
    """
    limits = {"database": {"max_statement_timeout_ms": 400}, "publishing": {"max_publish_duration_ms": 800}}
    tables = ["envelopes", "push_subscription", "push_recipient", "allocation_boundary"]
    rng.shuffle(tables)
    async with open_world(db, fakes, folder, instances=2, **limits) as world:
        async with world.load(100):
            for table in tables:
                await world.received_more(50)
                async with locked(world, f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"):
                    await _given_up(world, table)
            await world.received_more(50)
            assert len(world.cursors) == 1, "the lock's own session needed none of these"
            # The cursor write is a statement of the session that holds the lock, which has limits of its own.
            first = await world.holder()
            async with world.next_term(), locked(world, "SELECT 1 FROM push_cursor FOR UPDATE"):
                await until(lambda: logged(first, "term_ended"))
            assert logged(first, "term_ended")[0]["reason"] in ("database_timeout", "database_connection")
        report = await world.settle()
        assert report.terms == 2
        assert report.outcomes == {"delivered": report.received}
        tell(report)


async def _given_up(world: World, table: str) -> None:
    """Return once the statements that need this table have run out of time."""
    holder = await world.holder()
    seen = {instance: len(instance.server.events) for instance in world.up}
    repeated = world.repeated

    def pages() -> bool:
        return any(event["kind"] == "timeout" for event in logged(holder, "page_failed", after=seen[holder]))

    def boundary() -> bool:
        found = [event for each, since in seen.items() for event in logged(each, "boundary_failed", after=since)]
        return any(event["kind"] == "timeout" for event in found)

    await until(pages)
    if table == "allocation_boundary":
        await until(boundary)
    if table == "envelopes":
        await until(lambda: world.repeated > repeated)


async def test_publish_that_hangs_in_the_middle_holds_back_later_rows_and_loses_none(
    db: DbProcess, fakes: Fakes, folder: Path, is_short: bool, tell: Tell
) -> None:
    """A publish has taken its ids and cannot commit, while others take higher ones and do. Whoever dispatched those
    and moved the cursor past the gap would lose what fills it (PUSH-041, PUSH-042)."""
    async with open_world(db, fakes, folder, instances=2) as world:
        async with world.load(60):
            for _ in range(1 if is_short else 4):
                await world.received_more(100)
                topic = world.topics[0].hex()
                async with locked(world, f"SELECT 1 FROM topic_watermark WHERE topic = '\\x{topic}' FOR UPDATE"):
                    await until(lambda: world.ask(_WAITING_PUBLISH))
                    seen = {instance: len(instance.server.events) for instance in world.up}
                    higher = max(world.rows)
                    await until(lambda higher=higher: max(world.rows) > higher)
                    await until(
                        lambda seen=seen: any(
                            logged(each, "boundary_lock_timeout", after=since) for each, since in seen.items()
                        )
                    )
                    arrived = max(number for _, number in await world.arrived())
                    assert arrived <= settled(world)
            await world.received_more(100)
        report = await world.settle()
        assert report.repeats == 0
        assert report.outcomes == {"delivered": report.received}
        tell(report)


_WAITING_PUBLISH = (
    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%publish_envelopes(%' LIMIT 1"
)
