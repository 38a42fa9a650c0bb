"""The dispatcher on a real PostgreSQL, in this process and in processes that are stopped and killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pushd.core.retained import Retained
from pushd.model import Channel, Terminal
from tests.bench.bench_fanout import ROWS, SUBSCRIBERS, dispatch, fill
from tests.dispatch.holder_process import holder
from tests.dispatch.instance import POLL_S, instance
from tests.dispatch.memory import Provider
from tests.dispatch.seed import Seed, eventually, target, topic

APNS, FCM, HTTP = Channel


@pytest.fixture
def seed(database_url: str) -> Iterator[Seed]:
    with Seed(database_url) as opened:
        yield opened


async def test_rows_settle_are_sent_and_the_cursor_follows(database_url: str, seed: Seed) -> None:
    seed.recipients(range(1, 4))
    seed.subscribe(range(1, 4), topic(1))
    seed.envelopes([(1, topic(1)), (2, topic(1))])
    seed.settle(1)
    provider = Provider()
    async with instance(database_url, provider) as running:
        await eventually(lambda: seed.cursor() == 1 and running.boundary.requests)
        assert provider.rows() == [1, 1, 1]
        seed.settle(2)
        running.boundary.advance(2)
        await eventually(lambda: seed.cursor() == 2)
        assert seed.lock_holders()[0][1].startswith("pushd dispatcher ")
        await running.stopped(5)
        await eventually(lambda: seed.lock_holders() == [])  # the server may yet have to hear of the closed session
    assert len(set(provider.attempts)) == 6


async def test_dead_recipient_is_deleted_with_its_subscriptions(database_url: str, seed: Seed) -> None:
    seed.recipients([1, 2])
    seed.subscribe([1, 2], topic(1))
    seed.envelopes([(1, topic(1))])
    seed.settle(1)
    dead = target(1, APNS)
    provider = Provider(lambda delivery, attempt: Terminal("x") if delivery.config.target == dead else trio.Event())
    async with instance(database_url, provider) as running:
        await eventually(lambda: seed.recipient_count() == 1)
        assert seed.subscription_count() == 1
        assert running.count(APNS, "dead") == 1


async def test_t107_takeover_sweeps(database_url: str, seed: Seed) -> None:
    seed.recipients([1], renewed_ns=0)
    seed.recipients([2])
    seed.subscribe([1, 2], topic(1))
    async with instance(database_url, Provider()):
        await eventually(lambda: seed.recipient_count() == seed.subscription_count() == 1)


async def test_two_instances_started_together_send_everything_once(database_url: str, seed: Seed) -> None:
    seed.recipients(range(1, 101))
    seed.subscribe(range(1, 101), topic(1))
    seed.envelopes((n, topic(1)) for n in range(1, 21))
    seed.settle(20)
    one, two = Provider(), Provider()
    async with instance(database_url, one) as first, instance(database_url, two) as second:
        await eventually(lambda: seed.cursor() == 20)
        assert first.holds != second.holds
        assert len(seed.lock_holders()) == 1
        winner, loser = (first, second) if first.holds else (second, first)
        await winner.stopped(5)
        await eventually(lambda: loser.holds)
    assert len(one.attempts) + len(two.attempts) == 2_000
    assert 0 in {len(one.attempts), len(two.attempts)}


async def test_t106_killed_lock_session_hands_over_and_the_old_holder_sends_nothing_more(
    database_url: str, seed: Seed
) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    seed.envelopes([(1, topic(1))])
    seed.settle(1)
    stuck, taking = Provider(lambda delivery, attempt: None), Provider()
    async with instance(database_url, stuck) as first:
        await eventually(lambda: stuck.in_flight == 1)
        async with instance(database_url, taking) as second:
            await trio.sleep(4 * POLL_S)
            assert not second.holds
            seed.conn.execute("SELECT pg_terminate_backend(%s)", (seed.lock_holders()[0][0],))
            await eventually(lambda: second.holds and not first.holds)
            seed.envelopes([(2, topic(1))])
            seed.settle(2)
            await eventually(lambda: seed.cursor() == 2)
            assert sorted(taking.rows()) == [1, 2]  # two windows in flight together may start in either order
            assert stuck.rows() == [1]


async def test_primary_that_fails_the_cursor_write_has_the_windows_sent_again(database_url: str, seed: Seed) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    seed.envelopes((n, topic(1)) for n in range(1, 4))
    provider = Provider()
    async with instance(database_url, provider) as running:
        await eventually(lambda: running.holds)
        with psycopg.connect(database_url) as blocker:
            blocker.execute("SELECT 1 FROM push_cursor FOR UPDATE")
            seed.settle(3)
            await eventually(lambda: len(provider.attempts) == 3)
            pid = seed.lock_holders()[0][0]
            await eventually(
                lambda: seed._one(
                    f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
                )
            )
            seed.conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
        await eventually(lambda: seed.cursor() == 3)
    assert Counter(provider.rows()) == {1: 2, 2: 2, 3: 2}


async def test_t114_drain_interrupts_blocked_statements(database_url: str, seed: Seed) -> None:
    seed.recipients([1])
    seed.subscribe([1], topic(1))
    async with instance(database_url, Provider()) as running:
        await eventually(lambda: running.holds)
        with psycopg.connect(database_url) as blocker:
            for table in ("envelopes", "push_subscription", "push_recipient", "push_cursor", "allocation_boundary"):
                blocker.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            await trio.sleep(4 * POLL_S)
            # Uninterrupted, they would wait for their time-outs, which are seconds away.
            with trio.fail_after(2):
                await running.stopped(0.1)
            await eventually(lambda: not seed.lock_holders())


async def test_replica_that_lags_delays_pushes_and_deletions_and_loses_none(
    postgres: str, database_url: str, seed: Seed
) -> None:
    """The read database is a second one that this test replays into by hand."""
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute("DROP DATABASE IF EXISTS lagging")
        conn.execute("CREATE DATABASE lagging TEMPLATE migrated")
    replica_url = make_conninfo(postgres, dbname="lagging")
    try:
        provider = Provider()
        with Seed(replica_url) as replica:
            for database in (seed, replica):
                database.recipients([1])
                database.subscribe([1], topic(1))
            seed.envelopes([(1, topic(1)), (2, topic(1))])
            seed.settle(2)
            async with instance(database_url, provider, replica_url=replica_url) as running:
                await eventually(lambda: running.holds)
                running.boundary.advance(2)
                await trio.sleep(4 * POLL_S)
                assert (provider.attempts, seed.cursor()) == ([], 0)
                replica.envelopes([(1, topic(1)), (2, topic(1))])
                replica.settle(1)
                await eventually(lambda: seed.cursor() == 1)
                seed.conn.execute("DELETE FROM push_recipient")
                replica.settle(2)
                await eventually(lambda: seed.cursor() == 2)
                assert provider.rows() == [1, 2]
                assert replica.cursor() == 0
                await running.stopped(5)
    finally:
        with psycopg.connect(postgres, autocommit=True) as conn:
            conn.execute("DROP DATABASE lagging WITH (FORCE)")


def five_thousand(seed: Seed) -> None:
    """One window of 5,000 deliveries."""
    seed.recipients(range(1, 1_001))
    seed.subscribe(range(1, 1_001), topic(1))
    seed.envelopes((n, topic(1)) for n in range(1, 6))
    seed.settle(5)


@pytest.mark.slow
async def test_stop_in_the_middle_of_a_window_sends_nothing_twice(database_url: str, seed: Seed) -> None:
    five_thousand(seed)
    async with holder(database_url, attempt_s=0.02) as first:
        await eventually(lambda: len(first.ended()) > 300)
        first.process.send_signal(signal.SIGTERM)
        await first.wait()
    assert first.lines[-1] == "stopped"
    assert seed.cursor() == 5
    seed.envelopes([(6, topic(1))])
    seed.settle(6)
    async with holder(database_url) as second:
        await eventually(lambda: seed.cursor() == 6)
    sent = first.ended() + second.ended()
    assert len(first.began()) == 5_000
    assert len(sent) == len(set(sent)) == 6_000


@pytest.mark.slow
async def test_killed_holder_is_followed_by_one_that_sends_the_rest_and_repeats_open_windows_only(
    database_url: str, seed: Seed
) -> None:
    seed.recipients(range(1, 11))
    seed.subscribe(range(1, 11), topic(1))
    seed.envelopes((n, topic(1)) for n in range(1, 3_001))
    seed.settle(3_000)
    async with holder(database_url, attempt_s=0.03) as first:
        await eventually(lambda: seed.cursor() >= 1_024)
        first.process.kill()
        await first.wait()
    persisted = seed.cursor()
    async with holder(database_url) as second:
        await eventually(lambda: seed.cursor() == 3_000)
    sent = set(first.ended()) | set(second.ended())
    assert len(sent) == 30_000
    twice = set(first.began()) & set(second.began())
    assert twice
    assert min(int(name.split()[0]) for name in second.began()) > persisted
    assert len(second.began()) == len(set(second.began()))


@pytest.mark.slow
async def test_stopped_holder_loses_the_lock_and_begins_nothing_when_it_goes_on(database_url: str, seed: Seed) -> None:
    seed.recipients(range(1, 1_001))
    seed.subscribe(range(1, 1_001), topic(1))
    seed.envelopes((n, topic(1)) for n in range(1, 11))
    seed.settle(10)
    async with holder(database_url, attempt_s=0.1) as first:
        await eventually(lambda: len(first.ended()) > 500)
        first.process.send_signal(signal.SIGSTOP)
        stopped = trio.current_time()
        await eventually(lambda: not seed.lock_holders())
        freed_s = trio.current_time() - stopped
        assert freed_s < 6
        taking = Provider()
        async with instance(database_url, taking) as second:
            await eventually(lambda: second.holds)
            await trio.sleep(0.2)
            began = set(first.began())
            first.process.send_signal(signal.SIGCONT)
            await eventually(lambda: "no term" in first.lines)
            await eventually(lambda: seed.cursor() == 10)
            await trio.sleep(1)
        assert set(first.began()) - began == set(), "only attempts in flight go on"
        assert set(first.ended()) == began
    assert len(taking.attempts) == 10_000


class DeafProxy:
    """Stands between a client and PostgreSQL's socket and can stop to hear either of them."""

    def __init__(self, server_socket: str) -> None:
        self._server_socket = server_socket
        self._open = trio.Event()
        self._open.set()

    def go_deaf(self) -> None:
        """Keep the connections and pass nothing on any more; new ones are accepted and ignored."""
        self._open = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            server = await trio.open_unix_socket(self._server_socket)
            async with server, trio.open_nursery() as nursery:
                nursery.start_soon(self._pass, stream, server, nursery)
                nursery.start_soon(self._pass, server, stream, nursery)

    async def _pass(self, source: trio.SocketStream, target: trio.SocketStream, nursery: trio.Nursery) -> None:
        try:
            while data := await source.receive_some():
                await self._open.wait()
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        # While deaf, the other side must not learn that this one is gone.
        await self._open.wait()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def deaf_proxy(url: str, folder: Path) -> AsyncIterator[tuple[str, DeafProxy]]:
    """A URL that leads to the same database through a proxy."""
    parts = conninfo_to_dict(url)
    name = ".s.PGSQL.5432"
    proxy = DeafProxy(f"{parts['host']}/{name}")
    listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listener.bind(str(folder / name))
    listener.listen(64)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, proxy.serve, [trio.SocketListener(listener)])
        yield f"postgresql:///{parts['dbname']}?host={quote(str(folder), safe='')}&user={parts['user']}", proxy
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_holder_whose_network_goes_deaf_ends_its_term_and_a_successor_takes_over(
    database_url: str, seed: Seed, tmp_path: Path
) -> None:
    five_thousand(seed)
    stuck, taking = Provider(lambda delivery, attempt: None), Provider()
    async with deaf_proxy(database_url, tmp_path) as (url, proxy), instance(url, stuck) as first:
        await eventually(lambda: stuck.in_flight == 256)
        async with instance(database_url, taking) as second:
            proxy.go_deaf()
            deaf = trio.current_time()
            await eventually(lambda: not first.holds)
            assert trio.current_time() - deaf < 4.5, "before the successor may have the lock"
            await eventually(lambda: second.holds)
            await eventually(lambda: seed.cursor() == 5)
            assert len(stuck.attempts) == 256
    assert len(taking.attempts) == 5_000


@pytest.mark.slow
async def test_reader_whose_server_process_hangs_is_replaced_within_the_term(
    database_url: str, seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pushd.store.database.ANSWER_S", -4.0)  # one second with the statement's five
    five_thousand(seed)
    provider = Provider()
    async with instance(database_url, provider) as running:
        await eventually(lambda: seed.cursor() == 5)
        ((pid,),) = seed.conn.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE application_name LIKE 'pushd loader %' AND datname = current_database()"
        )
        os.kill(pid, signal.SIGSTOP)
        try:
            seed.envelopes([(6, topic(1))])
            seed.settle(6)
            await eventually(lambda: seed.cursor() == 6)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert running.metrics.push_terms_started._value.get() == 1


@pytest.mark.slow
async def test_stop_behind_a_deaf_network_is_not_held_up_by_statements_that_do_not_return(
    database_url: str, seed: Seed, tmp_path: Path
) -> None:
    five_thousand(seed)
    async with deaf_proxy(database_url, tmp_path) as (url, proxy), instance(url, Provider()) as running:
        await eventually(lambda: seed.cursor() == 5)
        proxy.go_deaf()
        await trio.sleep(4 * POLL_S)
        with trio.fail_after(4):  # the driver alone would take ten seconds
            await running.stopped(0.1)


@pytest.mark.slow
async def test_million_deliveries_of_one_window_are_all_handed_out_within_the_bounds(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real: Callable[..., int] = Retained.admit

    def watching(retained: Retained, *args: object) -> int:
        nonlocal most
        count = real(retained, *args)
        most = max(most, retained.waiting)
        assert count <= 1_000
        return count

    monkeypatch.setattr(Retained, "admit", watching)
    fill(database_url, others=False)
    with trio.fail_after(300):
        result = await dispatch(database_url, with_tasks=False)
    assert result["count"] == ROWS * SUBSCRIBERS
    assert most <= 10_000
