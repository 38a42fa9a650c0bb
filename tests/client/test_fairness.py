"""What a stalled or failing backend may cost the messenger's own work (PUSH-091, PUSH-103, PUSH-105).

On a virtual clock, so that the thirty seconds are exact.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from pushd.client import Client, Consent, Failed, NotificationsDelayed, open_with_backend
from pushd.errors import Code
from tests.client.rig import CONFIG, INSTALLATION, FaultPoint, gid
from tests.client.worlds import MemoryWorld
from tests.support.envelopes import private_message

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS


def virtual_ns() -> int:
    return START_NS + round(trio.current_time() * SECOND_NS)


@asynccontextmanager
async def running_client(tmp_path: Path) -> AsyncIterator[tuple[Client, FaultPoint]]:
    """An enabled client with its runner on the virtual clock, in step with its backend."""
    faults = FaultPoint(MemoryWorld(now_ns=virtual_ns))
    async with open_with_backend(
        tmp_path / "client.db", faults, installation_key=INSTALLATION, now_ns=virtual_ns
    ) as client:
        client._db.execute("PRAGMA synchronous = OFF")  # thousands of tasks, and no power cut
        await client.enable_notifications(CONFIG)
        await trio.sleep(1)
        faults.take()
        yield client, faults


async def test_T187_stalled_backend_delays_nothing_beyond_its_attempt(tmp_path: Path, autojump_clock) -> None:
    async with running_client(tmp_path) as (client, faults):
        faults.always["update"] = "stall"
        began = trio.current_time()
        rotated = trio.Event()

        async def rotate_key_package(payload: bytes) -> None:
            rotated.set()

        client.tasks.handle("key-package", rotate_key_package)
        client.tasks.add("key-package", due_ns=virtual_ns() + 5 * SECOND_NS)
        client.create_group(gid(1))
        await trio.sleep(1)
        assert faults.names == ["update"]

        client.set_consent(gid(1), Consent.DENIED)
        await client.publish_message(private_message(gid(1)))
        client.join_group(gid(2))
        assert trio.current_time() - began == 1
        await rotated.wait()
        assert trio.current_time() - began == 30  # when the attempt has run out of time; at most 32


async def test_lateness_of_other_tasks_is_one_attempt_at_most(tmp_path: Path, autojump_clock) -> None:
    async with running_client(tmp_path) as (client, faults):
        faults.always |= {"update": "stall", "register": "stall"}
        lateness: list[float] = []
        due_ns = virtual_ns()

        async def timed(payload: bytes) -> int:
            nonlocal due_ns
            lateness.append((virtual_ns() - due_ns) / SECOND_NS)
            due_ns = virtual_ns() + 17 * SECOND_NS
            return due_ns

        client.tasks.handle("timed", timed)
        client.tasks.add("timed")
        client.create_group(gid(1))
        await trio.sleep(2 * 3_600)
        assert max(lateness) <= 30
        assert len(faults.calls) >= 6
        assert sum(late > 0 for late in lateness) <= len(faults.calls)


async def test_attempts_on_a_stalled_backend_are_a_minute_apart_and_then_more(tmp_path: Path, autojump_clock) -> None:
    async with running_client(tmp_path) as (client, faults):
        faults.always["update"] = "stall"
        times: list[float] = []
        original = faults.update_subscriptions

        async def timed(request):
            times.append(trio.current_time())
            return await original(request)

        faults.update_subscriptions = timed  # type: ignore[method-assign]
        client.create_group(gid(1))
        await trio.sleep(3 * 3_600)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert gaps[:6] == [90, 150, 270, 510, 990, 1_950]  # 30 s of trying and 1, 2, 4, ... minutes of waiting


@pytest.mark.parametrize("code", [code for code in Code if code not in (Code.OK, Code.NOT_FOUND)])
async def test_failing_backend_never_fails_a_message_or_a_decision(tmp_path: Path, autojump_clock, code: Code) -> None:
    async with running_client(tmp_path) as (client, faults):
        faults.always |= dict.fromkeys(("register", "update", "unregister"), code)
        for number in range(5):
            client.create_group(gid(number))
            client.set_consent(gid(number), Consent.ALLOWED)
            await client.publish_message(private_message(gid(number)))
            await trio.sleep(10)
        await trio.sleep(86_400)
        # First retry after a minute, then up to an hour: never a storm.
        assert len(faults.calls) <= 32
        if isinstance(client.notification_state(), Failed):
            assert len(faults.calls) == 1


async def test_task_behind_a_stalled_inline_call_waits_inside_its_own_thirty_seconds(
    tmp_path: Path, autojump_clock
) -> None:
    async with running_client(tmp_path) as (client, faults):
        faults.always["register"] = "stall"
        ran: list[float] = []

        async def work(payload: bytes) -> None:
            ran.append(trio.current_time())

        client.tasks.handle("work", work)
        async with trio.open_nursery() as nursery:

            async def enable() -> None:
                with pytest.raises(NotificationsDelayed) as caught:
                    await client.enable_notifications(CONFIG)
                assert caught.value.code is Code.DEADLINE_EXCEEDED

            began = trio.current_time()
            nursery.start_soon(enable)
            await trio.sleep(1)
            client.tasks.restart("pushd.notifications", virtual_ns())
            client.tasks.add("work", due_ns=virtual_ns() + SECOND_NS)
        assert trio.current_time() - began == 30
        await trio.sleep(5)
        assert ran[0] - began <= 32


async def test_enable_that_is_cancelled_is_registered_by_the_running_task(tmp_path: Path, autojump_clock) -> None:
    faults = FaultPoint(MemoryWorld(now_ns=virtual_ns))
    faults.next("register", "stall")
    async with open_with_backend(
        tmp_path / "client.db", faults, installation_key=INSTALLATION, now_ns=virtual_ns
    ) as client:
        await trio.sleep(1)  # the runner has found nothing to do, and sleeps for a day
        with trio.move_on_after(5):
            await client.enable_notifications(CONFIG)
        assert faults.names == ["register"]
        await trio.sleep(60)
        assert faults.names == ["register", "register", "update"]


async def test_running_client_looks_every_hour_and_makes_no_call_in_vain(tmp_path: Path, autojump_clock) -> None:
    async with running_client(tmp_path) as (_client, faults):
        await trio.sleep(7 * 86_400)
        assert faults.names == []
        await trio.sleep(86_400)
        assert faults.names == ["register"]  # a quarter of thirty days


async def test_client_without_a_runner_keeps_what_the_messenger_tells(tmp_path: Path, autojump_clock) -> None:
    faults = FaultPoint(MemoryWorld(now_ns=virtual_ns))
    path = tmp_path / "client.db"
    async with running_client(tmp_path):
        pass
    async with open_with_backend(
        path, faults, installation_key=INSTALLATION, runner=False, now_ns=virtual_ns
    ) as client:
        client.create_group(gid(1))
        await trio.sleep(86_400)
    assert faults.names == []
    async with open_with_backend(path, faults, installation_key=INSTALLATION, now_ns=virtual_ns):
        await trio.sleep(1)
    assert faults.names == ["update", "register", "update"]  # another, empty backend: it knows no such recipient
