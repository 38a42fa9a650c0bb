"""Deletes recipients whose provider named the token as dead, apart from the sending (PUSH-046).

An attempt that learns of a dead token only notes it here, so that a slow primary holds no permit. What fails, or is
left some seconds after the lock was lost, is forgotten: the next push to that recipient brings the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import trio

from pushd.core.retry import Result
from pushd.errors import StoreError, StoreTimeout
from pushd.model import RETAINED_DELIVERIES, Delivery, DeliveryConfig
from pushd.store.dispatch import Grave
from pushd.telemetry import Event, Metrics, get_logger

BATCH = 50  # recipients a statement; their subscriptions go with them, some hundreds each
STATEMENT_S = 10.0


Drop: TypeAlias = Callable[[bytes, DeliveryConfig, bytes], None]


class GraveStore(Protocol):
    """What this loop needs of the database."""

    async def delete_dead(self, graves: Sequence[Grave]) -> list[Grave]: ...


class Graves:
    """The recipients to delete, each noted once.

    Args:
        store: deletes.
        metrics: counts deleted recipients.
    """

    def __init__(self, store: GraveStore, metrics: Metrics) -> None:
        self._store = store
        self._deleted = metrics.push_recipients.labels(Result.DEAD.value)
        self._log = get_logger()
        self._pending: dict[Grave, None] = {}
        self._changed = trio.Event()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Graves pending={len(self._pending)}>"

    def note(self, delivery: Delivery) -> None:
        """Ask for the deletion of the recipient of `delivery`, as it was when the attempt was made."""
        if len(self._pending) < RETAINED_DELIVERIES:
            self._pending[Grave(delivery.recipient_id, delivery.config, delivery.secret_hash)] = None
            self._changed.set()

    def close(self) -> None:
        """Nothing more will be noted: `run` returns when what is noted is done."""
        self._is_closed = True
        self._changed.set()

    async def run(self, drop: Drop) -> None:
        """Delete what is noted, until closed; `drop` forgets and counts the pending work of a deleted recipient."""
        while True:
            while self._pending:
                batch = list(self._pending)[:BATCH]
                for grave in batch:
                    del self._pending[grave]
                await self._delete(batch, drop)
            if self._is_closed:
                return
            self._changed = trio.Event()
            await self._changed.wait()

    async def _delete(self, batch: Sequence[Grave], drop: Drop) -> None:
        """Delete one batch; on failure forget it, and when the primary is away all that is noted.

        Whoever waits for `run` to return waits for a few seconds at most.
        """
        try:
            await self._delete_now(batch, drop)
        except StoreTimeout:
            if len(batch) > 1:  # one of them may have very many subscriptions: the others need not wait for it
                await self._delete_singly(batch, drop)
            else:
                self._log.warning(Event.DEAD_DELETE_FAILED, recipients=1)
        except (StoreError, trio.TooSlowError):
            self._log.warning(Event.DEAD_DELETE_FAILED, recipients=len(batch) + len(self._pending))
            self._pending.clear()

    async def _delete_singly(self, batch: Sequence[Grave], drop: Drop) -> None:
        for done, grave in enumerate(batch):
            try:
                await self._delete_now([grave], drop)
            except (StoreError, trio.TooSlowError):
                self._log.warning(Event.DEAD_DELETE_FAILED, recipients=len(batch) - done)
                return

    async def _delete_now(self, batch: Sequence[Grave], drop: Drop) -> None:
        with trio.fail_after(STATEMENT_S):
            deleted = await self._store.delete_dead(batch)
        for grave in deleted:
            self._deleted.inc()
            drop(grave.recipient_id, grave.config, grave.secret_hash)
