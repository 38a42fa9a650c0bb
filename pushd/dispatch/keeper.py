"""Owns the lock session: proves that it lives, moves the cursor, and says how long the lock may be trusted.

PostgreSQL ends a session that is silent for five seconds (`idle_session_timeout`), so a holder that was stopped or cut
off frees the lock by itself. Turned round: within four seconds of the start of the last good statement the lock is ours
for certain, and no attempt begins later than that (PUSH-040). A cursor write proves as much as a probe.

Both count on clocks of their own. Trio's stands still while the machine is suspended, so a holder on a virtual machine
that was paused trusts its lock on waking until the next proof fails, at most four seconds: pushes may then be sent
twice. No clock a process can read is sure to count a hypervisor's pause, and a question to the database before every
attempt would cost a statement a delivery. The cursor is safe, because its write compares.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import trio

from pushd.core.window import Windows
from pushd.errors import OwnershipLost, StoreError

TRUST_S = 4.0  # a second less than the server waits before it ends a silent session
STATEMENT_S = 3.0  # a statement that takes longer is cut, so that a loss is known before trust ends
BEAT_S = 1.0  # longest pause between two proofs, whatever the poll interval
FINAL_MARK_S = 0.25  # the last cursor write may overrun a deadline that has passed by this much

_T = TypeVar("_T")


class LockSession(Protocol):
    """The session that holds, or tries for, the lock."""

    @property
    def is_asked_to_step_down(self) -> bool: ...
    async def try_lock(self) -> bool: ...
    async def listen(self) -> None: ...
    async def probe(self) -> None: ...
    async def read_cursor(self) -> int: ...
    async def move_cursor(self, known: int, mark: int) -> bool: ...
    def sever(self) -> None: ...


class Trust:
    """Until when the lock is ours for certain."""

    def __init__(self) -> None:
        self._until = -math.inf

    def __repr__(self) -> str:
        return f"<Trust valid={self.is_valid}>"

    @property
    def is_valid(self) -> bool:
        """Whether a statement that began less than TRUST_S ago proved the lock."""
        return trio.current_time() < self._until

    def extend(self, proof_began: float) -> None:
        """A statement that began then has succeeded on the session that holds the lock."""
        self._until = proof_began + TRUST_S


class Keeper:
    """One lock session, from the first try for the lock to the final mark.

    Args:
        session: used by this object alone.
        trust: kept current for whoever begins attempts.
        poll_interval_s: least time between two tries, and between two cursor writes.
    """

    def __init__(self, session: LockSession, trust: Trust, poll_interval_s: float) -> None:
        self._session = session
        self._trust = trust
        self._poll_interval_s = poll_interval_s
        self._next_write = -math.inf
        self._unsure: int | None = None
        self.cursor = 0
        """The stored cursor as far as this holder knows."""

    def __repr__(self) -> str:
        return f"<Keeper cursor={self.cursor} {self._trust!r}>"

    @property
    def is_asked_to_step_down(self) -> bool:
        """Whether an operator asked this holder to give the lock away; known after the next proof."""
        return self._session.is_asked_to_step_down

    async def win(self) -> bool:
        """Try for the lock once; on success read the cursor. Raises StoreError."""
        started = trio.current_time()
        if not await self._limited(self._session.try_lock):
            return False
        await self._limited(self._session.listen)
        self.cursor = await self._limited(self._session.read_cursor)
        self._trust.extend(started)
        return True

    async def prove(self) -> None:
        """Keep the session from falling silent. Raises StoreError."""
        await self._limited(self._session.probe)

    async def run(self, windows: Windows, on_proof: Callable[[], None]) -> None:
        """Prove the lock on a steady beat and write the mark when it moved, at most once a poll interval.

        Args:
            windows: the mark.
            on_proof: called after each proof.

        Raises:
            OwnershipLost: the cursor is not what this holder wrote.
            StoreError: the session failed or did not answer; the lock may be somebody else's.
        """
        while True:
            started = trio.current_time()
            if windows.mark > self.cursor and started >= self._next_write:
                await self._write(windows.mark)
            else:
                await self.prove()
            self._trust.extend(started)
            on_proof()
            await trio.sleep_until(started + min(self._poll_interval_s, BEAT_S))

    async def finish(self, mark: int) -> None:
        """Write the final mark, a poll interval after the last write. Raises as `run`."""
        if mark > self.cursor:
            while (now := trio.current_time()) < self._next_write:
                await trio.sleep_until(min(self._next_write, now + BEAT_S))
                await self.prove()
            await self._write(mark)

    async def finish_late(self, mark: int) -> None:
        """Write the final mark although the deadline has passed: at once, or not at all."""
        with trio.move_on_after(FINAL_MARK_S, shield=True):
            try:
                if mark > self.cursor:
                    await self._write(mark, FINAL_MARK_S)
            except (StoreError, OwnershipLost):
                pass  # the windows above the stored cursor are sent again; the session is about to end anyway

    async def _write(self, mark: int, limit_s: float = STATEMENT_S) -> None:
        if self._unsure is not None:
            # A write was cut, by a deadline: whether it happened has to be seen before a refusal can be judged.
            stored = await self._limited(self._session.read_cursor, limit_s)
            if stored not in (self.cursor, self._unsure):
                raise OwnershipLost
            self.cursor, self._unsure = stored, None
            if mark <= stored:
                return
        self._unsure = mark
        self._next_write = trio.current_time() + self._poll_interval_s
        moved = await self._limited(lambda: self._session.move_cursor(self.cursor, mark), limit_s)
        self._unsure = None
        if not moved:
            raise OwnershipLost
        self.cursor = mark

    async def _limited(self, call: Callable[[], Awaitable[_T]], limit_s: float = STATEMENT_S) -> _T:
        """Run one statement; cut the connection when it does not return in time.

        The connection is cut rather than the statement cancelled, because cancelling waits for the server's answer. The
        fuse burns on while the caller is being cancelled, so that a network that went deaf holds up a stop no longer.
        """
        fuse = trio.CancelScope(shield=True)

        async def burn() -> None:
            with fuse:
                await trio.sleep(limit_s)
                self._session.sever()

        failure: StoreError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(burn)
            try:
                return await call()
            except StoreError as error:
                failure = error  # raised outside, as a nursery would wrap it into a group
            finally:
                fuse.cancel()
        raise failure
