"""One request and its answer: the values that connections, the client and senders hand each other."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from pushd.errors import PushdError

MAX_BODY_BYTES = 16_384


class ConnectionFailed(PushdError):
    """A request got no answer. `kind` is one of `pushd.core.providers.answers.FAILURES`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class NotProcessed(ConnectionFailed):
    """The peer states that it did not act on the request, so it may be sent again (RFC 9113 §8.7)."""


class Response:
    """An answer.

    `body` is None when it was not waited for, did not end in time, or is over 16 KiB.
    """

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes | None) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def header(self, name: bytes) -> str | None:
        """The first field named `name`, or None."""
        for field_name, value in self.headers:
            if field_name == name:
                return value.decode("latin-1")
        return None


class Exchange:
    """One request and its answer, while it is on a connection."""

    __slots__ = (
        "body_wait_s",
        "content",
        "done",
        "ended",
        "error",
        "headers",
        "left_at",
        "sent_at",
        "size",
        "status",
        "stream_id",
        "unsent",
    )

    def __init__(self, stream_id: int, unsent: bytes, body_wait_s: Mapping[int, float], now: float) -> None:
        self.stream_id = stream_id
        self.unsent = unsent
        self.body_wait_s = body_wait_s
        self.sent_at = now
        self.left_at: float | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.content: list[bytes] | None = []
        self.size = 0
        self.ended = False
        self.error: ConnectionFailed | None = None
        self.done = trio.Event()

    def response(self) -> Response:
        body = b"".join(self.content) if self.ended and self.content is not None else None
        return Response(self.status, self.headers, body)
