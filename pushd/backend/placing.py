"""Lets small publishes that are made at the same time share a statement.

A statement costs a trip to the database and a durable commit, whatever it carries; in a batch of 100 an envelope costs
a tenth as much, on both sides. So while a few statements are under way further callers queue, and the next statement
takes along everybody who waits. Nobody waits for company: on an idle server a publish runs at once.

What makes it safe to join: only publishes whose envelopes are all admissible are joined, so the statement stores all of
them, which is what each asked for. When a shared statement fails for a reason that one of them may have brought in,
each tries again alone; since envelopes are stored once, that is right whatever became of the first attempt. The same
happens to a shared statement that does not come to an end, so that a topic somebody keeps locked holds up its own
publishers only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, islice

import trio

from pushd.core.admission import Folding
from pushd.errors import StoreError, StoreUnavailable
from pushd.model import NewEnvelope
from pushd.store.publish import Placed

JOINING_ENVELOPES = 16  # a larger publish is a batch already
JOINING_BYTES = 65_536
STATEMENT_ENVELOPES = 64  # bounds the locks, the bytes and the company of one statement
LEADS = 2  # one statement commits while the next one is built; more would only make them smaller
SHARED_S = 2.0  # a shared statement takes milliseconds; this is more than a publish has to wait for the boundary
PATIENCE_S = 0.05  # longest wait for a turn: statements that hang do not hold up callers they have not taken along

Store = Callable[[Sequence[NewEnvelope]], Awaitable[list[Placed | None]]]


class _Ticket:
    __slots__ = ("answer", "envelopes", "leads", "turn")

    def __init__(self, envelopes: Sequence[NewEnvelope], *, leads: bool) -> None:
        self.envelopes = envelopes
        self.leads = leads
        self.turn = trio.Event()  # it leads now, or its statement is over
        self.answer: list[Placed | None] | StoreError | None = None


class Placer:
    """Stores publishes, several in one statement where they meet.

    Args:
        store: stores envelopes, all or none, as `pushd.store.publish.publish_envelopes`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: deque[_Ticket] = deque()
        self._free_leads = LEADS

    def __repr__(self) -> str:
        return f"<Placer waiting={len(self._queue)} running={LEADS - self._free_leads}>"

    async def place(self, envelopes: Sequence[NewEnvelope]) -> list[Placed | None]:
        """Store one publish, distinct envelopes, and say where each is; raises what the store raises."""
        if not _may_join(envelopes):
            return await self._store(envelopes)
        ticket = _Ticket(envelopes, leads=self._free_leads > 0)
        if ticket.leads:
            self._free_leads -= 1
        else:
            self._queue.append(ticket)
        try:
            await self._wait_for_turn(ticket)
            if ticket.leads:
                await self._lead(ticket)
        finally:
            if ticket.leads:
                self._pass_lead_on()
            elif ticket in self._queue:
                self._queue.remove(ticket)
        if ticket.answer is None:
            return await self._store(envelopes)
        if isinstance(ticket.answer, StoreError):
            raise ticket.answer
        return ticket.answer

    async def _wait_for_turn(self, ticket: _Ticket) -> None:
        if ticket.leads:
            return
        with trio.move_on_after(PATIENCE_S):
            await ticket.turn.wait()
        if not ticket.turn.is_set() and ticket not in self._queue:
            await ticket.turn.wait()  # its statement is under way

    def _pass_lead_on(self) -> None:
        if self._queue:
            heir = self._queue.popleft()
            heir.leads = True
            heir.turn.set()
        else:
            self._free_leads += 1

    async def _lead(self, ticket: _Ticket) -> None:
        company = self._take_company(len(ticket.envelopes))
        tickets = [ticket, *company]
        folding = Folding()
        for envelope in chain.from_iterable(one.envelopes for one in tickets):
            folding.add(envelope)
        batch = folding.batch()
        try:
            with trio.move_on_after(SHARED_S if company else math.inf):
                placed = await self._store(batch.distinct)
                _answer(tickets, batch.places, placed)
        except StoreUnavailable as error:
            # Not of anybody's making; trying again alone would be a herd in front of a database in trouble.
            for one in company:
                one.answer = StoreUnavailable(error.kind)
            raise
        except StoreError:
            if not company:
                raise
        finally:
            for one in company:
                one.turn.set()

    def _take_company(self, envelopes: int) -> list[_Ticket]:
        company = []
        while self._queue and envelopes + len(self._queue[0].envelopes) <= STATEMENT_ENVELOPES:
            company.append(self._queue.popleft())
            envelopes += len(company[-1].envelopes)
        return company


def _may_join(envelopes: Sequence[NewEnvelope]) -> bool:
    return (
        len(envelopes) <= JOINING_ENVELOPES
        and all(envelope.is_admissible for envelope in envelopes)
        and sum(len(envelope.payload) for envelope in envelopes) <= JOINING_BYTES
    )


def _answer(tickets: Sequence[_Ticket], places: Sequence[int], placed: Sequence[Placed | None]) -> None:
    """Give every ticket its part; an envelope that two of them brought is new to the first only."""
    seen: set[int] = set()
    remaining = iter(places)
    for ticket in tickets:
        part: list[Placed | None] = []
        for place in islice(remaining, len(ticket.envelopes)):
            at = placed[place]
            part.append(Placed(at.meta, is_new=False) if at is not None and place in seen else at)
            seen.add(place)
        ticket.answer = part
