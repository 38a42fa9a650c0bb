"""Recipients and their subscriptions as their owners change them (spec §4.3).

Each function is one statement in autocommit mode, so each is a transaction of its own and a cancelled one is either
done or undone. The clock is the database's: instances whose own clocks differ still agree on who has expired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from attrs import frozen

from pushd.core.checks import Claim, Refusal
from pushd.model import KEY_WINDOW_KEYS, Channel, DeliveryConfig, RecipientState, SubscriptionChange
from pushd.store.arrays import Array, BigintArray, BooleanArray, ByteaArray, encoded
from pushd.store.database import Params
from pushd.store.queries import query


class Session(Protocol):
    """Where one statement runs: the `Database` itself, which is cheapest, or a `Connection` one already holds."""

    async def fetch_one(self, query: str, params: Params = None) -> tuple[Any, ...] | None: ...


@frozen
class SubscriptionsUpdated:
    """What an update did: the recipient as it is now, and how many rows are new and gone.

    A replaced key window counts as neither.
    """

    state: RecipientState
    added: int
    removed: int


_REFUSALS = {
    "not_registered": Refusal.NOT_REGISTERED,
    "wrong_secret": Refusal.WRONG_SECRET,
    "topic_limit": Refusal.TOPIC_LIMIT,
}


async def find_secret_hash(session: Session, recipient_id: bytes) -> bytes | None:
    """The stored SHA-256 of the recipient's secret, or None when there is no such recipient."""
    row = await session.fetch_one(query("find_recipient_secret_hash"), {"recipient_id": recipient_id})
    return None if row is None else bytes(row[0])


async def save_recipient(session: Session, claim: Claim, config: DeliveryConfig) -> RecipientState | Refusal:
    """Create the recipient without topics, or replace its delivery and renew it (PUSH-001, PUSH-002).

    WRONG_SECRET, with nothing changed, when the recipient exists under another secret.
    """
    row = await session.fetch_one(
        query("save_recipient"),
        {
            "recipient_id": claim.recipient_id,
            "secret_hash": claim.secret_hash,
            "channel": config.channel.value,
            "delivery": config.target,
            "signing_key": config.signing_key,
        },
    )
    return Refusal.WRONG_SECRET if row is None else RecipientState(row[0], Channel(row[1]), row[2])


async def delete_recipient(session: Session, claim: Claim) -> int | Refusal:
    """Delete the recipient with all its subscriptions (PUSH-006); how many these were.

    NOT_REGISTERED when it is not there under this secret. The caller has compared the secret before, so a recipient
    under another one was deleted and made anew in between, and for a moment was indeed not registered.
    """
    row = await session.fetch_one(
        query("delete_recipient"), {"recipient_id": claim.recipient_id, "secret_hash": claim.secret_hash}
    )
    return Refusal.NOT_REGISTERED if row is None else int(row[0])


async def update_subscriptions(
    session: Session,
    claim: Claim,
    adds: Sequence[SubscriptionChange],
    removes: Sequence[bytes],
    *,
    max_topics: int,
) -> SubscriptionsUpdated | Refusal:
    """Apply every add and remove and renew the recipient, or change nothing at all (PUSH-020, PUSH-021, PUSH-026).

    New topics start at the closed allocation boundary; known ones keep their start position.

    Args:
        adds: of well-formed topics, none of them twice and none in `removes`.
        removes: topics; an unknown one is passed over.
        max_topics: the most topics a recipient may grow to.
    """
    row = await session.fetch_one(
        query("update_subscriptions"),
        {
            "recipient_id": claim.recipient_id,
            "secret_hash": claim.secret_hash,
            **{name: await encoded(column) for name, column in _columns(adds)},
            "removes": await encoded(ByteaArray(removes)),
            "max_topics": max_topics,
        },
    )
    assert row is not None  # the function returns one row whatever it finds
    verdict, topic_count, channel, renewed_ns, added, removed = row
    if verdict in _REFUSALS:
        return _REFUSALS[verdict]
    return SubscriptionsUpdated(RecipientState(topic_count, Channel(channel), renewed_ns), added, removed)


def _columns(adds: Sequence[SubscriptionChange]) -> Iterator[tuple[str, Array]]:
    """The adds turned on their side: one flat array per column, which is how one statement binds any number of rows."""
    windows = [add.key_window for add in adds]
    yield "topics", ByteaArray([add.topic for add in adds])
    yield "epoch_bases", BigintArray([None if window is None else window.epoch_base for window in windows])
    yield "include_commits", BooleanArray([add.include_commits for add in adds])
    keys = [window.keys if window is not None else () for window in windows]
    for slot in range(KEY_WINDOW_KEYS):
        yield f"keys_{slot}", ByteaArray([mine[slot] if slot < len(mine) else None for mine in keys])
