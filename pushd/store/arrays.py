"""PostgreSQL arrays in their binary form, encoded in one pass.

psycopg finds a dumper for every element of a list anew; for a batch of 100 envelopes that was 2 ms, these take 0.2 ms.
The layout is that of `array_recv`: dimensions, whether there are nulls, element type, length, lower bound; then each
element with its length in front, -1 for NULL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from attrs import frozen
from psycopg import pq
from psycopg.adapt import Buffer, Dumper

_HEADER = struct.Struct("!iiIii")
_NULL = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("!i").pack
_BIGINT = struct.Struct("!iq").pack
_TRUE, _FALSE = b"\x00\x00\x00\x01\x01", b"\x00\x00\x00\x01\x00"
_BYTEA_OID, _BIGINT_OID, _BOOLEAN_OID = 17, 20, 16


@frozen
class ByteaArray:
    """A parameter of type bytea[]."""

    items: Sequence[bytes | None]

    def encode(self) -> bytes:
        return _array(
            _BYTEA_OID, len(self.items), (_NULL if one is None else _LENGTH(len(one)) + one for one in self.items)
        )


@frozen
class BigintArray:
    """A parameter of type bigint[]."""

    items: Sequence[int | None]

    def encode(self) -> bytes:
        return _array(_BIGINT_OID, len(self.items), (_NULL if one is None else _BIGINT(8, one) for one in self.items))


@frozen
class BooleanArray:
    """A parameter of type boolean[]."""

    items: Sequence[bool]

    def encode(self) -> bytes:
        return _array(_BOOLEAN_OID, len(self.items), (_TRUE if one else _FALSE for one in self.items))


def _array(element_oid: int, length: int, elements: Iterable[bytes]) -> bytes:
    if length == 0:
        return _HEADER.pack(0, 0, element_oid, 0, 0)[:12]
    return _HEADER.pack(1, 1, element_oid, length, 1) + b"".join(elements)


class _ArrayDumper(Dumper):
    format = pq.Format.BINARY

    def dump(self, obj: Any) -> Buffer:
        encoded: bytes = obj.encode()
        return encoded


for _type, _oid in ((ByteaArray, 1001), (BigintArray, 1016), (BooleanArray, 1000)):
    psycopg.adapters.register_dumper(_type, type(f"{_type.__name__}Dumper", (_ArrayDumper,), {"oid": _oid}))
