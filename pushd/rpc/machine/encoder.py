"""A header encoder without memory, for the server's few and short response headers.

hpack's encoder spends its time on its table, for headers that are either constant or never repeated. Literals without
indexing (RFC 7541 §6.2.2) can be prepared once and joined. The first block says that our dynamic table has size 0, so
no later wish of the peer about its size needs an answer.
"""

from __future__ import annotations

from collections.abc import Iterable

_STATUS_200 = b"\x88"  # entry 8 of the static table
_TABLE_SIZE_0 = b"\x20"


class PlainEncoder:
    """Encodes the header blocks of one connection."""

    def __init__(self) -> None:
        self._prefix = _TABLE_SIZE_0

    def encode(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """One header block."""
        block = self._prefix + b"".join(
            [_constant.get((name, value)) or _literal(name, value) for name, value in headers]
        )
        self._prefix = b""
        return block


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _string(name) + _string(value)


def _string(value: bytes) -> bytes:
    """Length in a seven-bit prefix (RFC 7541 §5.1), then the bytes without Huffman coding."""
    length = len(value)
    if length < 127:
        return bytes((length,)) + value
    encoded = bytearray((127,))
    length -= 127
    while length >= 128:
        encoded.append(length % 128 + 128)
        length //= 128
    encoded.append(length)
    return bytes(encoded) + value


_constant = {
    (b":status", b"200"): _STATUS_200,
    (b"content-type", b"application/grpc"): _literal(b"content-type", b"application/grpc"),
    (b"grpc-status", b"0"): _literal(b"grpc-status", b"0"),
}
