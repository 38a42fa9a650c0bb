"""Makes statements meet: several sessions brought to wait for one lock, so that letting go starts them together."""

from __future__ import annotations

import trio

from pushd.store.database import Connection

_WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND state = 'active'
"""


async def wait_until_blocked(observer: Connection, sessions: int) -> None:
    """Return once exactly `sessions` sessions of this database wait for a lock.

    The observer may hold that lock in an open transaction: the view it reads is not part of the snapshot.
    """
    with trio.fail_after(20):
        while True:
            await observer.execute("SELECT pg_stat_clear_snapshot()")
            row = await observer.fetch_one(_WAITING)
            if row == (sessions,):
                return
            await trio.sleep(0.005)
