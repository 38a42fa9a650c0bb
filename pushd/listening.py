"""Listeners that go on listening while the process, or the machine, has no file descriptor left."""

from __future__ import annotations

import errno
import math

import trio

from pushd.telemetry import Event, get_logger

RETRY_S = 0.1
REPORT_S = 60.0
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

log = get_logger()


class PatientListener(trio.abc.Listener[trio.SocketStream]):
    """Waits until a connection can be accepted again, and tells of it once a minute.

    `trio.serve_listeners` would wait too, but writes a traceback past the log ten times a second.
    """

    def __init__(self, inner: trio.abc.Listener[trio.SocketStream]) -> None:
        self._inner = inner
        self._silent_until = -math.inf

    async def accept(self) -> trio.SocketStream:
        """The next connection.

        Raises:
            OSError: an error that time does not mend.
            trio.ClosedResourceError: the listener was closed.
        """
        while True:
            try:
                return await self._inner.accept()
            except OSError as exc:
                if exc.errno not in _SHORTAGES:
                    raise
                self._report(errno.errorcode[exc.errno])
            await trio.sleep(RETRY_S)

    def _report(self, error: str) -> None:
        now = trio.current_time()
        if now >= self._silent_until:
            self._silent_until = now + REPORT_S
            log.error(Event.ACCEPT_FAILED, error=error)

    async def aclose(self) -> None:
        """Close the listener."""
        await self._inner.aclose()
