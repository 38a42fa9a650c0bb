"""How much input is worked off before everybody else has a turn.

A task that reads from a busy peer hardly ever waits, and with a thousand of them one round of the event loop could take
seconds: calls would miss their deadlines, and the holder of the dispatcher's lock its proof. So all connections of a
server share one allowance a round, and what does not fit waits in line. Bytes are the measure because the worst cost of
one is known: 1 µs, in DATA frames of a single byte. A round of calls, of the common size, takes as long.
"""

from __future__ import annotations

from collections import deque

import trio

PIECE_BYTES = 16 * 1024  # a connection hands in so much at a time, then it is the next one's turn
ROUND_BYTES = 64 * 1024  # some 60 ms of work at the worst, while a round itself costs about 50 µs


class Rounds:
    """The line of connections with input. `run` has to be running."""

    def __init__(self) -> None:
        self._left = ROUND_BYTES
        self._line: deque[tuple[int, trio.Event]] = deque()
        self._used_up = trio.Event()

    def __repr__(self) -> str:
        return f"<Rounds left={self._left} waiting={len(self._line)}>"

    async def take(self, size: int) -> None:
        """Returns when so much input may be worked off, at once if this round has room."""
        if self._line or self._left <= 0:
            turn = trio.Event()
            self._line.append((size, turn))
            await turn.wait()
            return
        self._left -= size
        if self._left <= 0:
            self._used_up.set()

    async def run(self) -> None:
        """Begins a round whenever one is used up, and the loop has gone around since."""
        while True:
            await self._used_up.wait()
            self._left = ROUND_BYTES
            while self._line and self._left > 0:
                size, turn = self._line.popleft()
                self._left -= size
                turn.set()
            if self._left > 0:
                self._used_up = trio.Event()
