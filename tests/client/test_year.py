"""A year in minutes: a client that is online at random keeps its keys current (PUSH-086, PUSH-087)."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from pushd.client import Consent
from pushd.core.hmac_keys import epoch_at, key_window, root_key_fingerprint
from tests.client.rig import HOUR_NS, ONLY_GROUPS, Clock, Rig, gid, open_rig, topic
from tests.client.worlds import MemoryWorld

DAY_NS = 24 * HOUR_NS
TTL_NS = 30 * DAY_NS
YEAR_NS = 365 * DAY_NS

hours = st.integers(1, 24 * 20) | st.integers(24 * 20, 24 * 100)
sessions = st.lists(st.tuples(hours, st.integers(1, 24)), min_size=1, max_size=40)
"""Pairs of hours offline and hours online, over again until the year has passed."""


class Expiring(MemoryWorld):
    """Forgets a recipient that was not renewed for thirty days, as the backend's sweep does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(now_ns=clock.now_ns)
        self.renewed_ns = 0

    def sweep(self) -> None:
        if self.now_ns() > self.renewed_ns + TTL_NS:
            self.recipients.clear()

    def _state(self, recipient):
        self.renewed_ns = self.now_ns()
        return super()._state(recipient)


@settings(max_examples=6, deadline=None)
@given(sessions=sessions, root_key_cycles=st.integers(0, 3))
def test_keys_are_current_whenever_the_client_is_online(sessions, root_key_cycles: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trio.run(_live, Path(folder), sessions, root_key_cycles)


async def _live(folder: Path, sessions: list[tuple[int, int]], root_key_cycles: int) -> None:
    clock = Clock()
    world = Expiring(clock)
    began = clock.now_ns()
    with open_rig(folder / "client.db", world, clock=clock) as rig:
        rig.groups(0)
        await rig.enabled(ONLY_GROUPS)
        day = 0
        for offline_h, online_h in itertools.cycle(sessions):
            clock.advance(offline_h * HOUR_NS)
            world.sweep()
            rig.client.tasks.start_now("pushd.notifications")
            for hour in range(online_h):
                while began + day * DAY_NS < clock.now_ns() and day < 365:
                    day += 1
                    rig.client.join_group(gid(day % 50))  # a membership change a day
                    rig.client.set_consent(gid(day % 50), consent_of_day(day))
                if hour == 0 and root_key_cycles:
                    root_key_cycles -= 1
                    rig.client.cycle_root_key()
                await rig.settle()
                _check(rig, world, await world.topics(rig.recipient_id))
                clock.advance(HOUR_NS)
                world.sweep()
            if clock.now_ns() > began + YEAR_NS:
                break


def consent_of_day(day: int) -> Consent:
    return Consent.DENIED if day % 7 == 3 else Consent.ALLOWED


def _check(rig: Rig, world: Expiring, stored) -> None:
    wanted = {name for (name,) in rig.db.execute("SELECT topic FROM topic WHERE member AND consent = 2 AND kind <> 4")}
    assert set(stored) == wanted == set(rig.uploaded)
    current = epoch_at(rig.clock.now_ns())
    for one in stored.values():
        assert one.epoch_base is not None
        assert one.epoch_base <= current < current + 1 <= one.epoch_base + 2
    (root_key,) = rig.db.execute("SELECT root_key FROM settings").fetchone()
    assert {row.fingerprint for row in rig.uploaded.values()} <= {root_key_fingerprint(root_key)}
    if topic(0) in stored:
        assert stored[topic(0)].keys == key_window(root_key, gid(0), stored[topic(0)].epoch_base + 1).keys
    assert rig.stale == 0
    assert topic(0) in rig.uploaded or topic(0) not in wanted
    renewal = rig.settings.renewal_ns
    assert renewal is not None
    assert renewal <= world.renewed_ns + TTL_NS // 4
