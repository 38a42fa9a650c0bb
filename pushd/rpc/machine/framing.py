"""gRPC's message framing: one flag byte, four bytes of length, the message (gRPC doc/PROTOCOL-HTTP2.md)."""

from __future__ import annotations

import enum

from pushd.errors import PushdError

PREFIX_BYTES = 5


class Fault(enum.Enum):
    """Why the rest of a peer's messages on a stream cannot be used."""

    COMPRESSED = "compressed"
    BAD_FLAG = "flag byte neither 0 nor 1"
    TOO_LARGE = "longer than the limit"
    TRUNCATED = "the stream ended inside a message"
    OVERLOADED = "the receive budget is used up"


class FramingError(PushdError):
    """The stream's bytes are not a sequence of acceptable messages; nothing more can be read from it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


def encode_message(payload: bytes) -> bytes:
    """One uncompressed message with its prefix."""
    return b"\x00" + len(payload).to_bytes(4, "big") + payload


class MessageDecoder:
    """Cuts a stream's bytes into messages.

    A prefix is judged as soon as it is complete, so a length beyond the limit is refused before its bytes are held.
    """

    __slots__ = ("_buffer", "_limit", "_need")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._need = PREFIX_BYTES  # bytes the buffer must have before anything can be decided

    @property
    def missing(self) -> int:
        """How many bytes the message that has begun still lacks; 0 when its prefix is incomplete or none has begun."""
        return self._need - len(self._buffer) if self._need > PREFIX_BYTES else 0

    @property
    def partial(self) -> bool:
        """Whether the bytes so far end inside a message or its prefix."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Takes bytes in stream order and returns the messages they complete.

        Raises:
            FramingError: a prefix is not acceptable; messages complete before it are lost with the stream.
        """
        buffer = self._buffer
        if not buffer and len(data) >= PREFIX_BYTES:
            size = self._judge(data)
            if len(data) == size:  # the common case: one DATA frame carries one message
                return [data[PREFIX_BYTES:]]
        buffer += data
        if len(buffer) < self._need:
            return []
        return self._cut()

    def _cut(self) -> list[bytes]:
        buffer, messages, start = self._buffer, [], 0
        self._need = PREFIX_BYTES
        while len(buffer) - start >= PREFIX_BYTES:
            end = start + self._judge(buffer[start : start + PREFIX_BYTES])
            if len(buffer) < end:
                self._need = end - start
                break
            messages.append(bytes(memoryview(buffer)[start + PREFIX_BYTES : end]))
            start = end
        del buffer[:start]
        return messages

    def _judge(self, data: bytes | bytearray) -> int:
        """The size of the message that starts `data`, prefix included."""
        if data[0] != 0:
            raise FramingError(Fault.COMPRESSED if data[0] == 1 else Fault.BAD_FLAG)
        length = int.from_bytes(data[1:PREFIX_BYTES], "big")
        if length > self._limit:
            raise FramingError(Fault.TOO_LARGE)
        return PREFIX_BYTES + length
