"""PostgreSQL arrays in their binary form, encoded in one pass.

psycopg finds a dumper for every element of a list anew; for a batch of 100 envelopes that was 2 ms, these take 0.2 ms.
The layout is that of `array_recv`: dimensions, whether there are nulls, element type, length, lower bound; then each
element with its length in front, -1 for NULL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import psycopg
from attrs import field, frozen
from psycopg import pq
from psycopg.adapt import Buffer, Dumper

from pushd.turns import in_turns

_HEADER = struct.Struct("!iiIii")
_NULL = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("!i").pack
_BIGINT = struct.Struct("!iq").pack
_TRUE, _FALSE = b"\x00\x00\x00\x01\x01", b"\x00\x00\x00\x01\x00"
_PIECE = 1_000  # elements encoded without a look at the clock
_BYTEA_OID, _BIGINT_OID, _BOOLEAN_OID = 17, 20, 16


class Array(Protocol):
    """One of the types below."""

    def elements(self) -> tuple[int, int, Iterator[bytes]]:
        """The type and the number of the elements, and each one's encoding."""
        ...


@frozen
class ByteaArray:
    """A parameter of type bytea[]."""

    items: Sequence[bytes | None]

    def elements(self) -> tuple[int, int, Iterator[bytes]]:
        encoded = (_NULL if one is None else _LENGTH(len(one)) + one for one in self.items)
        return _BYTEA_OID, len(self.items), encoded


@frozen
class BigintArray:
    """A parameter of type bigint[]."""

    items: Sequence[int | None]

    def elements(self) -> tuple[int, int, Iterator[bytes]]:
        return _BIGINT_OID, len(self.items), (_NULL if one is None else _BIGINT(8, one) for one in self.items)


@frozen
class BooleanArray:
    """A parameter of type boolean[]."""

    items: Sequence[bool]

    def elements(self) -> tuple[int, int, Iterator[bytes]]:
        return _BOOLEAN_OID, len(self.items), (_TRUE if one else _FALSE for one in self.items)


@frozen
class EncodedArray:
    """An array that is encoded already. The statement has to name its type with a cast."""

    data: bytes = field(repr=False)


async def encoded(array: Array) -> EncodedArray:
    """The encoding of an array that may be too long to keep others waiting for it."""
    element_oid, length, elements = array.elements()
    pieces = iter(lambda: b"".join(islice(elements, _PIECE)), b"")
    return EncodedArray(_header(element_oid, length) + b"".join(await in_turns(pieces)))


def _header(element_oid: int, length: int) -> bytes:
    if length == 0:
        return _HEADER.pack(0, 0, element_oid, 0, 0)[:12]
    return _HEADER.pack(1, 1, element_oid, length, 1)


class _ArrayDumper(Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Any) -> Buffer:
        element_oid, length, elements = obj.elements()
        return _header(element_oid, length) + b"".join(elements)


class _EncodedDumper(Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Any) -> Buffer:
        data: bytes = obj.data
        return data


for _type, _oid in ((ByteaArray, 1001), (BigintArray, 1016), (BooleanArray, 1000)):
    psycopg.adapters.register_dumper(_type, type(f"{_type.__name__}Dumper", (_ArrayDumper,), {"oid": _oid}))
psycopg.adapters.register_dumper(EncodedArray, _EncodedDumper)
