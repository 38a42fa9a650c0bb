"""Finds the frames in a byte stream, so that GOAWAY can be taken out before h2 sees it.

h2 treats a connection that received GOAWAY as closed and refuses every later frame, although the streams up to the
named one are still to be answered (RFC 9113 §6.8). APNs sends GOAWAY whenever it wants a client to move, with hundreds
of answers still on their way, so the client reads that one frame itself. The size of each frame is checked here as
well: h2 would first gather up to 16 MiB of a frame that it then refuses.
"""

from __future__ import annotations

from attrs import frozen

_FRAME_HEADER_BYTES = 9
_GOAWAY = 0x7
_GOAWAY_BYTES = 8
_MAX_FRAME_BYTES = 16_384  # the default of SETTINGS_MAX_FRAME_SIZE, which we leave alone


@frozen
class GoAway:
    """The peer takes no stream above `last_stream_id`. Debug data is dropped: it may quote a request."""

    last_stream_id: int
    error_code: int


class FrameFilter:
    """Cuts GOAWAY frames out of received bytes and counts frames."""

    def __init__(self) -> None:
        self.frames = 0
        self._skip = 0  # bytes of the current frame's payload still to come
        self._held = b""  # an incomplete frame header, or a GOAWAY that has not fully arrived

    def feed(self, data: bytes) -> tuple[bytes, list[GoAway]]:
        """The bytes for h2, and the GOAWAY frames among `data`.

        Raises:
            ValueError: a frame of a length no peer may send.
        """
        skip = self._skip
        if not self._held and len(data) < skip:
            self._skip = skip - len(data)
            return data, []
        if self._held:
            data = self._held + data
            self._held = b""
        return self._scan(data, skip)

    def _scan(self, data: bytes, position: int) -> tuple[bytes, list[GoAway]]:
        passed: list[bytes] = []
        found: list[GoAway] = []
        start = 0
        end = len(data)
        while position + _FRAME_HEADER_BYTES <= end:
            length = data[position] << 16 | data[position + 1] << 8 | data[position + 2]
            following = position + _FRAME_HEADER_BYTES + length
            if length > _MAX_FRAME_BYTES:
                raise ValueError("frame too large")
            if data[position + 3] == _GOAWAY:
                if length < _GOAWAY_BYTES:
                    raise ValueError("GOAWAY frame too short")
                if following > end:
                    break
                payload = position + _FRAME_HEADER_BYTES
                found.append(
                    GoAway(
                        int.from_bytes(data[payload : payload + 4], "big") & 0x7FFFFFFF,
                        int.from_bytes(data[payload + 4 : payload + 8], "big"),
                    )
                )
                passed.append(data[start:position])
                start = following
            self.frames += 1
            position = following
        if position < end:
            self._skip = 0
            self._held = data[position:]
            end = position
        else:
            self._skip = position - end
        if start == 0 and end == len(data):
            return data, found
        passed.append(data[start:end])
        return b"".join(passed), found
