"""What the operators' commands read and change, and what the status page shows."""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from pushd.core.explain import EnvelopeFacts, Facts, SubscriptionFacts
from pushd.errors import StoreInvariant
from pushd.model import Channel, Delivery, DeliveryConfig
from pushd.store.database import Connection
from pushd.store.dispatch import STEP_DOWN
from pushd.store.queries import query

COUNTED_ROWS = 100_000  # a lag above this is told as "at least"
PRUNED_ROWS = 1_000  # a statement; small enough to stay far below any time-out


@frozen
class DispatchStatus:
    """Who dispatches and how far it is. Times in nanoseconds since 1970, by the database's clock."""

    cursor: int
    closed_sequence_id: int
    last_sequence_id: int
    holder: str | None
    """`host:pid`, or None when nobody holds the lock."""
    waiting_rows: int
    """Eligible rows above the cursor, counted up to COUNTED_ROWS."""
    oldest_waiting_ns: int | None
    now_ns: int
    oldest_renewal_ns: int | None
    skipped_rows: int
    """Eligible rows that operators ever skipped."""


@frozen
class Holder:
    """One session that holds the dispatcher lock. Two terms of one instance have two."""

    session: tuple[int, float]
    name: str
    """`host:pid` of the instance."""


@frozen
class ChannelCount:
    """Recipients of one channel and the topics they have together."""

    channel: Channel
    recipients: int
    topics: int


@frozen
class Skip:
    """A cursor moved by an operator."""

    from_sequence_id: int
    to_sequence_id: int
    eligible_rows: int


async def load_dispatch_status(connection: Connection) -> DispatchStatus:
    """The state of dispatching. Raises StoreError."""
    row = await connection.fetch_one(query("load_dispatch_status"), {"most": COUNTED_ROWS})
    if row is None:
        raise StoreInvariant
    cursor, closed, last, application, waiting, oldest, now, renewal, skipped = row
    holder = None if application is None else _instance(application)
    return DispatchStatus(cursor, closed, last, holder, waiting, oldest, now, renewal, skipped)


async def find_holder(connection: Connection) -> Holder | None:
    """Who holds the dispatcher lock at this moment. Raises StoreError."""
    row = await connection.fetch_one(query("find_dispatcher_holder"))
    return None if row is None else Holder((row[0], row[1]), _instance(row[2]))


async def ask_to_step_down(connection: Connection) -> None:
    """Ask whoever holds the dispatcher lock to give it away; nobody answers. Raises StoreError."""
    await connection.execute(f"NOTIFY {STEP_DOWN}")


async def count_recipients(connection: Connection) -> list[ChannelCount]:
    """Recipients by channel; channels without one are left out. Raises StoreError."""
    rows = await connection.fetch(query("count_recipients"))
    return [ChannelCount(Channel(channel), recipients, topics) for channel, recipients, topics in rows]


async def load_delivery_facts(
    connection: Connection, recipient_id: bytes, sequence_id: int, configured: Collection[Channel]
) -> Facts:
    """What `explain` judges by, from one snapshot. Raises StoreError."""
    parameters = {"sequence_id": sequence_id, "recipient_id": recipient_id}
    row = await connection.fetch_one(query("load_delivery_facts"), parameters, binary=True)
    if row is None:
        raise StoreInvariant
    closed, cursor, last, skipped = row[:4]
    server_ns, eligible, is_commit, sender_hmac, payload = row[4:9]
    channel, since, include_commits, base = row[9:13]
    return Facts(
        sequence_id=sequence_id,
        closed_sequence_id=closed,
        cursor=cursor,
        last_sequence_id=last,
        skipped=skipped,
        envelope=None if server_ns is None else EnvelopeFacts(server_ns, eligible, is_commit, sender_hmac, payload),
        channel=None if channel is None else Channel(channel),
        subscription=None if since is None else SubscriptionFacts(since, include_commits, base, row[13:16]),
        configured=frozenset(configured),
    )


async def load_test_delivery(connection: Connection, recipient_id: bytes, topic: bytes) -> Delivery | None:
    """A delivery of sequence id 0 on `topic` to a stored recipient, or None for an unknown one. Raises StoreError."""
    row = await connection.fetch_one(query("load_recipient_delivery"), {"recipient_id": recipient_id}, binary=True)
    if row is None:
        return None
    channel, target, signing_key, secret_hash = row
    return Delivery(0, topic, recipient_id, DeliveryConfig(Channel(channel), target, signing_key), secret_hash)


async def skip_cursor(connection: Connection) -> Skip | None:
    """Move the cursor to the closed boundary; None when it is there. Raises StoreError."""
    row = await connection.fetch_one(query("skip_push_cursor"))
    return None if row is None else Skip(*row)


async def prune_envelopes(connection: Connection) -> int:
    """Delete up to PRUNED_ROWS expired envelopes at or below the cursor; how many went. Raises StoreError."""
    return await connection.execute(query("prune_envelopes"), {"rows": PRUNED_ROWS})


def _instance(application_name: str) -> str:
    return application_name.rpartition(" ")[2]
