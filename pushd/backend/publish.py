"""Publish: refuse what must not be stored, store the rest at once, answer every envelope in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio
from attrs import evolve, field, frozen

from pushd.backend.placing import Placer
from pushd.core.admission import (
    Batch,
    Intake,
    Offer,
    PublishLimits,
    PublishRefusal,
    Reason,
    Retention,
    refuse_envelope,
)
from pushd.errors import Code, StatusError
from pushd.model import EnvelopeMeta
from pushd.store.database import Database
from pushd.store.publish import Placed, publish_envelopes
from pushd.telemetry import Metrics
from pushd.turns import in_turns


@frozen
class PublishSettings:
    """What an operator decides about publishing; `max_duration_ms` bounds one call as a whole."""

    limits: PublishLimits = field(factory=PublishLimits)
    retention: Retention = field(factory=Retention)
    max_duration_ms: int = 10_000


class Publisher:
    """The publishing half of the backend.

    Args:
        database: envelopes go to its primary.
        settings: bounds and retention.
        request_boundary: called after a commit that stored something a push may be due for, so that it can become
            settled without waiting for anybody to notice it; see `BoundaryTask.request`.
        metrics: counts envelopes by outcome and refused requests by reason.
    """

    def __init__(
        self, database: Database, settings: PublishSettings, request_boundary: Callable[[], None], metrics: Metrics
    ) -> None:
        self._settings = settings
        self._placer = Placer(lambda envelopes: publish_envelopes(database, envelopes, settings.retention))
        self._request_boundary = request_boundary
        outcomes = metrics.publish_envelopes
        self._stored, self._duplicate, self._rejected = (
            outcomes.labels(outcome) for outcome in ("stored", "duplicate", "rejected")
        )
        self._refused = {reason: metrics.publish_rejections.labels(f"REASON_{reason.name}") for reason in Reason}

    async def publish(self, offers: Iterable[Offer]) -> list[EnvelopeMeta] | PublishRefusal:
        """Store all of `offers` or none, and return where each one is, repeats and known envelopes included.

        `offers` may do the parsing as it goes: a request of the largest size holds enough envelopes to keep a processor
        busy for a minute, which must neither stall everybody else nor outlast the call's time.

        Raises:
            StatusError: DEADLINE_EXCEEDED, the outcome is unknown.
            StoreError: as `pushd.store.publish.publish_envelopes`.
        """
        intake = Intake(self._settings.limits)
        with trio.move_on_after(self._settings.max_duration_ms / 1_000):
            await in_turns(map(intake.add, offers))
            answer = await self._publish(intake)
            if isinstance(answer, PublishRefusal):
                self._rejected.inc(intake.count)
                if answer.reason is not None:
                    self._refused[answer.reason].inc()
            return answer
        raise StatusError(Code.DEADLINE_EXCEEDED, "publish timed out")

    async def _publish(self, intake: Intake) -> list[EnvelopeMeta] | PublishRefusal:
        refusal = intake.refusal()
        if refusal is not None or not intake.count:
            return refusal or []
        batch = intake.routable.batch()
        if intake.unroutable is not None:
            return await self._refuse_for(batch, intake.unroutable)
        placed = await self._placer.place(batch.distinct)
        invalid = _first_invalid(batch, placed)
        if invalid is not None:
            return invalid
        self._count(batch, placed)
        return await in_turns(map(partial(_meta, placed), batch.places))

    async def _refuse_for(self, before: Batch, unroutable: int) -> PublishRefusal:
        """The refusal of a request whose envelope at `unroutable` has no topic: that one, or an earlier invalid one.

        An earlier one is at fault only if it is not stored already. The database is asked by a publish in which
        nothing is admissible, and only when that can matter.
        """
        if not all(envelope.is_admissible for envelope in before.distinct):
            placed = await self._placer.place([evolve(envelope, is_admissible=False) for envelope in before.distinct])
            invalid = _first_invalid(before, placed)
            if invalid is not None:
                return invalid
        return refuse_envelope(unroutable, Reason.MALFORMED_PAYLOAD)

    def _count(self, batch: Batch, placed: Sequence[Placed | None]) -> None:
        stored = [envelope for envelope, at in zip(batch.distinct, placed, strict=True) if at is not None and at.is_new]
        self._stored.inc(len(stored))
        self._duplicate.inc(len(batch.places) - len(stored))
        if any(envelope.push_eligible for envelope in stored):
            self._request_boundary()


def _first_invalid(batch: Batch, placed: Sequence[Placed | None]) -> PublishRefusal | None:
    """The refusal for the first position whose envelope failed validation and is not stored.

    Key packages are the only kind that is validated beyond its structure.
    """
    for index, place in enumerate(batch.places):
        if placed[place] is None and not batch.distinct[place].is_admissible:
            return refuse_envelope(index, Reason.INVALID_KEY_PACKAGE)
    return None


def _meta(placed: Sequence[Placed | None], place: int) -> EnvelopeMeta:
    at = placed[place]
    assert at is not None
    return at.meta
