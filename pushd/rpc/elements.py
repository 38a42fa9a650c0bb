"""How many tiny elements a request has, found out before protobuf makes any of them.

For every element of a message the runtime makes a structure of about 64 bytes, however short its encoding, and an empty
one is two bytes. So 25 MiB of request could become 0.8 GiB before any check of a handler sees it. An element that is
long enough to pay for its own structure is of no interest here; below `SHORT` it counts, and a request may have
`ALLOWED` of those and one more for each `SPREAD` of its bytes. Nothing a client means comes near: the shortest thing
that is repeated in any request is a topic, and that has 17 bytes.

Counting walks the encoding at half a microsecond a field; `may_be_bloated` spares nearly every request that, and one of
more fields than anybody needs is refused before its walk has taken long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pushd.turns import in_turns

SHORT: Final = 8  # bytes of content; below it an element's structure outweighs its encoding more than six times
ALLOWED: Final = 1_024
SPREAD: Final = 12  # what the shortest element that is not short takes, with tags and lengths around it
_FIELD = 6  # bytes a field has at least, on average: a topic with a cursor has nine for each of the three walked
_STEP = 1_000  # fields between two looks at the clock
_NOT_SHORT = bytes(range(SHORT, 256))
_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)  # wire types
_MAX_VARINT_BYTES = 10

Shape = dict[int, Any]
"""What is counted of a message: number of a field -> shape of its message, empty for repeated bytes and strings."""


class Undecodable(Exception):
    """The bytes are no encoded message."""


def shape_of(descriptor: Descriptor, known: dict[str, Shape] | None = None) -> Shape:
    """The shape of a message type."""
    known = {} if known is None else known
    shape = known.get(descriptor.full_name)
    if shape is None:
        shape = known[descriptor.full_name] = {}
        for one in descriptor.fields:
            if one.message_type is not None:
                # A single one as well: members of a oneof that take turns are made anew each time.
                shape[one.number] = shape_of(one.message_type, known)
            elif one.is_repeated and one.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
                shape[one.number] = {}
    return shape


async def is_bloated(payload: bytes, shape: Shape) -> bool:
    """Whether a request has more short elements, or fields, than it may; lets other tasks run in between.

    One at a time, since each may use up every turn it gets.

    Raises:
        Undecodable: the walk came upon something that is not of protobuf's wire format.
    """
    if not may_be_bloated(payload, shape):
        return False
    most = most_short(payload)
    counts = await in_turns(count_short(payload, shape, most))
    return counts[-1] > most


def most_short(payload: bytes) -> int:
    """How many short elements a request of this length may have."""
    return ALLOWED + len(payload) // SPREAD


def may_be_bloated(payload: bytes, shape: Shape) -> bool:
    """Whether a walk is needed: every short element has a byte for its length, and there may be too few small bytes."""
    if not shape or len(payload) <= 2 * ALLOWED:  # an element has two bytes at least
        return False
    return len(payload.translate(None, _NOT_SHORT)) > most_short(payload)


def count_short(payload: bytes, shape: Shape, most: int) -> Iterator[int]:
    """Count the short elements, up to one more than `most`; the last item is the number, others are on the way there.

    Too many fields, of whatever kind, are told as one more than `most` too.

    Raises:
        Undecodable: see `is_bloated`.
    """
    count = walked = at = 0
    end = len(payload)
    most_walked = ALLOWED + end // _FIELD
    outer: list[tuple[int, Shape]] = []  # the messages around the one being walked: where each ends, and its shape
    while True:
        while at == end and outer:
            end, shape = outer.pop()
        if at == end or count > most:
            yield count
            return
        walked += 1
        if walked > most_walked:
            yield most + 1
            return
        if walked % _STEP == 0:
            yield count
        tag, at = _varint(payload, at, end)
        kind = tag & 7
        if kind == _LENGTH:
            length, at = _varint(payload, at, end)
            inner = shape.get(tag >> 3)
            if inner is not None:
                count += length < SHORT
                if inner and 0 < length <= end - at:
                    outer.append((end, shape))
                    end, shape = at + length, inner
                    continue
            at += length
        elif kind == _VARINT:
            _, at = _varint(payload, at, end)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind not in (_GROUP, _GROUP_END):  # no request has groups; what is in one counts as if it were outside
            raise Undecodable
        if at > end:
            raise Undecodable


def _varint(payload: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while at < end and shift < 7 * _MAX_VARINT_BYTES:
        byte = payload[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Undecodable
