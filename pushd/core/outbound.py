"""What waits to be sent on one stream, and how much may.

Envelopes that come while others wait join their frame, up to the size a frame aims at: a reader that is a little slow
gets fewer and larger frames, and only one that is slow by megabytes meets the bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field, frozen

FRAME_BYTES = 2 * 2**20
FRAME_HEAD_BYTES = 8  # more than the tag and the length in front of a frame's envelopes
QUEUE_FRAMES = 64
QUEUE_BYTES = 16 * 2**20
ENVELOPE_OVERHEAD_BYTES = 256
"""More than the encoded metadata and framing of one envelope."""
TARGET_BYTES = 64
"""More than one encoded target: 33 bytes of topic, 10 of number, tags and lengths."""
CONTROL_BYTES = 32
"""More than a frame without envelopes and targets."""

Target = tuple[bytes, int]
"""A topic and its newest sequence id, 0 when it is empty."""


@frozen
class Started:
    """The first frame. `targets` only on a static stream."""

    targets: Sequence[Target] = field(default=(), repr=False)


@frozen
class Applied:
    """An update was done; the targets are the topics not followed before."""

    update_id: int
    targets: Sequence[Target] = field(repr=False)


@frozen
class Ping:
    """A question whether the peer still lives."""

    nonce: int


@frozen
class Pong:
    """The answer to the peer's ping."""

    nonce: int


@frozen
class Keepalive:
    """A sign of life on a static stream."""


@define(eq=False)
class Messages:
    """Encoded envelopes, one or more a piece; how many of them were fetched and how many came live."""

    pieces: list[bytes] = field(factory=list, repr=False)
    size: int = 0
    catch_up: int = 0
    live: int = 0


Frame = Started | Applied | Ping | Pong | Keepalive | Messages


class Outbound:
    """The queue of one stream. Times are seconds of any steady clock.

    Args:
        frame_bytes: envelopes of a frame at most, unless it is a single piece.
    """

    def __init__(self, frame_bytes: int = FRAME_BYTES) -> None:
        self._frame_bytes = frame_bytes
        self._frames: deque[tuple[Frame, int, float]] = deque()
        self._open: Messages | None = None  # the last frame, while envelopes may still join it
        self._bytes = 0
        self._burst = -1
        self._is_burst = False

    def __repr__(self) -> str:
        return f"<Outbound frames={len(self._frames)} bytes={self._bytes}>"

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def wants_page(self) -> bool:
        """Whether so little waits that a page may be fetched: less than half of what a page can be."""
        return self._bytes < FRAME_BYTES // 2

    def put(self, frame: Frame, now: float) -> bool:
        """Queue a frame; False, and nothing is queued, when there is no room."""
        targets = len(frame.targets) if isinstance(frame, Started | Applied) else 0
        return self._append(frame, CONTROL_BYTES + targets * TARGET_BYTES, now)

    def put_page(self, envelopes: list[bytes], now: float) -> bool:
        """Queue fetched envelopes as a frame of their own; False, and nothing is queued, when there is no room."""
        size = sum(map(len, envelopes))
        page = Messages(envelopes, size, catch_up=len(envelopes))
        if not self._append(page, size, now):
            return False
        self._open = page
        return True

    def put_live(self, piece: bytes, count: int, now: float) -> bool:
        """Queue `count` envelopes as they came; False, and nothing is queued, when there is no room."""
        size = len(piece)
        frame = self._open
        if frame is None or frame.size + size > self._frame_bytes:
            frame = Messages()
            if not self._append(frame, size, now):
                return False
            self._open = frame
        elif self._bytes + size > QUEUE_BYTES:
            return False
        else:
            self._grow(size)
        frame.pieces.append(piece)
        frame.size += size
        frame.live += count
        return True

    def take(self, now: float) -> tuple[Frame, float] | None:
        """The next frame and the seconds it waited, or None."""
        if not self._frames:
            return None
        frame, size, since = self._frames.popleft()
        self._bytes -= size
        if frame is self._open:
            self._open = None
        return frame, now - since

    def clear(self) -> None:
        """Send none of it."""
        self._frames.clear()
        self._open = None
        self._bytes = 0

    def is_burst(self, batch: int) -> bool:
        """Whether nothing waited when the first envelope of this batch came.

        A batch is offered without a pause, so what of it finds no room then says nothing about the reader.
        """
        if self._burst != batch:
            self._burst = batch
            self._is_burst = not self._frames
        return self._is_burst

    def _append(self, frame: Frame, size: int, now: float) -> bool:
        if len(self._frames) >= QUEUE_FRAMES or self._bytes + size > QUEUE_BYTES:
            return False
        self._frames.append((frame, size, now))
        self._bytes += size
        self._open = None
        return True

    def _grow(self, size: int) -> None:
        frame, before, since = self._frames[-1]
        self._frames[-1] = (frame, before + size, since)
        self._bytes += size
