"""The wish to stop: one event and one absolute deadline that can only come nearer."""

from __future__ import annotations

import math
import signal

import trio


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop. SIGHUP says that the terminal was closed, unless nohup hides it."""
    wanted = [signal.SIGTERM, signal.SIGINT]
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*wanted, signal.SIGHUP]


class StopSignal:
    """Shared by everything that drains, so that all of it ends at the same instant.

    `deadline` is on Trio's clock; it is infinite until a stop is requested.
    """

    def __init__(self) -> None:
        self.deadline = math.inf
        self._requested = trio.Event()
        self._scopes: set[trio.CancelScope] = set()

    def __repr__(self) -> str:
        return f"<StopSignal requested={self.requested}>"

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested.is_set()

    def request(self, deadline: float) -> None:
        """Stop by `deadline`. A later deadline than the present one changes nothing; an earlier one shortens it."""
        self.deadline = min(self.deadline, deadline)
        self._requested.set()
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, self.deadline)

    async def wait(self) -> None:
        """Return once a stop was requested."""
        await self._requested.wait()

    def bound(self, scope: trio.CancelScope) -> None:
        """Let `scope` end at the deadline, also when the deadline is set or shortened later."""
        scope.deadline = min(scope.deadline, self.deadline)
        self._scopes.add(scope)

    def release(self, scope: trio.CancelScope) -> None:
        """Forget a scope given to `bound`; safe when it is not there."""
        self._scopes.discard(scope)
