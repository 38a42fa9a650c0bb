"""The little of RFC 9420 a server without keys has to read: where a message goes and what kind it is.

`Reader` takes TLS presentation language apart (RFC 9420 §2.1); `read_framing` reads the clear-text part of an
MLSMessage (§6). Private messages are read to their last field, so a cut tail is noticed. Public messages are read up to
their content type only: what follows is a Commit or a Proposal with whole leaf nodes inside, which decides nothing
here and would be most of an MLS library. A public message that is malformed behind its content type is therefore
accepted.
"""

from __future__ import annotations

import enum
import struct

from attrs import field, frozen

MLS_10 = 1  # ProtocolVersion, RFC 9420 §6
PUBLIC_MESSAGE = 1  # WireFormat, RFC 9420 §17.2
PRIVATE_MESSAGE = 2
_PUBLIC_HEAD, _PRIVATE_HEAD = (struct.pack("!HH", MLS_10, wire) for wire in (PUBLIC_MESSAGE, PRIVATE_MESSAGE))


class Malformed(ValueError):
    """The bytes do not follow RFC 9420. Carries no text, so that nothing of the input can end up in one."""


class ContentType(enum.IntEnum):
    """RFC 9420 §6; in clear in both framings."""

    APPLICATION = 1
    PROPOSAL = 2
    COMMIT = 3


_CONTENT_TYPES = {int(one): one for one in ContentType}  # a look-up; the enumeration's own takes five times as long


class SenderType(enum.IntEnum):
    """RFC 9420 §6."""

    MEMBER = 1
    EXTERNAL = 2
    NEW_MEMBER_PROPOSAL = 3
    NEW_MEMBER_COMMIT = 4


class Reader:
    """Reads big-endian numbers and vectors from the front of a byte string.

    Every method raises Malformed when the bytes end early or break a rule.
    """

    __slots__ = ("_data", "_end", "position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._end = len(data)
        self.position = 0

    @property
    def at_end(self) -> bool:
        """Whether every byte was read."""
        return self.position == self._end

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        start = self.position
        end = start + size
        if end > self._end:
            raise Malformed
        self.position = end
        return self._data[start:end]

    def skip(self, size: int) -> None:
        """Pass over the next `size` bytes."""
        end = self.position + size
        if end > self._end:
            raise Malformed
        self.position = end

    def byte(self) -> int:
        """An unsigned number of one byte."""
        start = self.position
        if start == self._end:
            raise Malformed
        self.position = start + 1
        return self._data[start]

    def uint(self, size: int) -> int:
        """An unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "big")

    def vector(self) -> bytes:
        """The content of an `opaque<V>`: its length in the variable-size integer of RFC 9420 §2.1.2."""
        return self.take(self._length())

    def skip_vector(self) -> None:
        """Pass over an `opaque<V>`."""
        self.skip(self._length())

    def _length(self) -> int:
        first = self.byte()
        if first < 0x40:
            return first
        size_class = first >> 6
        if size_class == 3:
            raise Malformed
        more = (1 << size_class) - 1
        length = (first & 0x3F) << (8 * more) | self.uint(more)
        if length < (0x40 if size_class == 1 else 0x4000):  # a shorter prefix would have done (§2.1.2)
            raise Malformed
        return length


@frozen
class Framing:
    """The clear-text head of a group message."""

    group_id: bytes = field(repr=False)
    content_type: ContentType

    @property
    def is_commit_or_proposal(self) -> bool:
        return self.content_type is not ContentType.APPLICATION


def read_framing(data: bytes) -> Framing:
    """Read the MLSMessage at the front of `data`; bytes behind it are ignored, as the sender may have padded it.

    Raises:
        Malformed: not a public or private message of MLS 1.0.
    """
    reader = Reader(data)
    head = reader.take(4)
    if head == _PRIVATE_HEAD:
        return _private_framing(reader)
    if head == _PUBLIC_HEAD:
        return _public_framing(reader)
    raise Malformed  # Welcome, GroupInfo and KeyPackage are not sent to a group


def _private_framing(reader: Reader) -> Framing:
    group_id = reader.vector()
    reader.skip(8)  # epoch
    content_type = _content_type(reader)
    reader.skip_vector()  # authenticated_data
    reader.skip_vector()  # encrypted_sender_data
    reader.skip_vector()  # ciphertext
    return Framing(group_id, content_type)


def _public_framing(reader: Reader) -> Framing:
    group_id = reader.vector()
    reader.skip(8)  # epoch
    try:
        sender = SenderType(reader.byte())
    except ValueError:
        raise Malformed from None
    if sender in (SenderType.MEMBER, SenderType.EXTERNAL):
        reader.skip(4)  # leaf_index or sender_index
    reader.skip_vector()  # authenticated_data
    return Framing(group_id, _content_type(reader))


def _content_type(reader: Reader) -> ContentType:
    content_type = _CONTENT_TYPES.get(reader.byte())
    if content_type is None:
        raise Malformed
    return content_type
