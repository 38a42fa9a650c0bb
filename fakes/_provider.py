"""What the two provider fakes have in common: scripted answers by token, recording, latency, statistics."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._http2 import Connection

MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4  # RFC 9113 §6.5.2

_TICK_S = 0.0005  # answers due within this are sent together: timers are not more exact than that anyway


@dataclass
class Answer:
    """What to do with one request. The field names are those of the control protocol.

    Args:
        status: HTTP status.
        headers: more response headers.
        body: response body.
        delay_ms: before anything is sent, instead of the server's latency.
        stall: "headers" sends nothing ever, "body" sends the headers and no end.
        chunks: number of DATA frames the body is cut into.
        trailing_ms: pause between the headers and the body.
        reset: RST_STREAM with this error code instead of an answer.
        goaway: GOAWAY with this error code instead of an answer; streams from this one on are not processed.
        debug: GOAWAY's debug data.
        close: close the connection instead of answering.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    delay_ms: float | None = None
    stall: str = ""
    chunks: int = 1
    trailing_ms: float = 0
    reset: int | None = None
    goaway: int | None = None
    debug: str = ""
    close: bool = False


@dataclass
class Request:
    """One complete request."""

    connection: int
    stream_id: int
    headers: dict[str, str]
    body: bytes
    received_s: float
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        """For the control protocol."""
        return {
            "connection": self.connection,
            "stream_id": self.stream_id,
            "headers": self.headers,
            "body": self.body.decode("utf-8", "replace"),
            "received_s": self.received_s,
            "wall_s": self.wall_s,
        }


class Provider:
    """Base of a fake: scripts by token, recording, latency, statistics. Subclasses say what a request deserves."""

    def __init__(self, *, latency_ms: float, streams: int, record: int) -> None:
        self.latency_s = latency_ms / 1_000
        self.settings = {MAX_CONCURRENT_STREAMS: streams}
        self.scripts: dict[str, deque[Answer]] = {}
        self.default: Answer | None = None
        self.recorded: deque[Request] = deque(maxlen=record)
        self.statuses: Counter[int] = Counter()
        self.requests = 0
        self.resets = 0
        self.pings = 0
        self.connections: set[Connection] = set()
        self.opened = itertools.count(1)
        self.opened_total = 0
        self.in_flight = 0
        self.peak = 0
        self._due: list[tuple[float, int, Connection, int, Answer]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def token(self, request: Request) -> str:
        """The device token a request is for."""
        raise NotImplementedError

    def judge(self, request: Request) -> Answer:
        """The answer for a request that no script covers."""
        raise NotImplementedError

    def shorthand(self, fields: dict[str, Any]) -> Answer:
        """An answer from the control protocol's fields."""
        return Answer(**fields)

    def on_request(self, connection: Connection, request: Request) -> None:
        """A request has arrived in full: choose its answer and when to give it."""
        self.requests += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        if self.recorded.maxlen:
            self.recorded.append(request)
        script = self.scripts.get(self.token(request)) if self.scripts else None
        answer = script.popleft() if script else self.default or self.judge(request)
        delay_s = self.latency_s if answer.delay_ms is None else answer.delay_ms / 1_000
        if delay_s <= 0:
            connection.give(request.stream_id, answer)
        else:
            self.later(delay_s, connection, request.stream_id, answer)

    def later(self, delay_s: float, connection: Connection, stream_id: int, answer: Answer) -> None:
        """Give `answer` after `delay_s` seconds."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        heapq.heappush(self._due, (due, next(self._order), connection, stream_id, answer))
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._give_due)

    def _give_due(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _TICK_S
        due = self._due
        while due and due[0][0] <= until:
            _, _, connection, stream_id, answer = heapq.heappop(due)
            connection.give(stream_id, answer)
        self._timer = loop.call_at(due[0][0], self._give_due) if due else None

    def forget(self) -> None:
        """Scripts, records and counters start anew; connections stay."""
        self.scripts.clear()
        self.default = None
        self.recorded.clear()
        self.statuses.clear()
        self.requests = self.resets = self.pings = self.peak = 0

    def statistics(self) -> dict[str, Any]:
        """Counters for the control protocol."""
        return {
            "requests": self.requests,
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "resets": self.resets,
            "pings": self.pings,
            "connections_opened": self.opened_total,
            "connections_open": len(self.connections),
            "in_flight": self.in_flight,
            "in_flight_peak": self.peak,
        }
