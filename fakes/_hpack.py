"""Reads HPACK header blocks (RFC 7541), fast enough that a fake does not slow the client it measures.

Huffman codes are followed a byte at a time: each state and byte is worked out once and remembered.
"""

from __future__ import annotations

from collections import deque

from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable

_STATIC = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in HeaderTable.STATIC_TABLE]
_TABLE_BYTES = 4_096
_FIELD_OVERHEAD = 32  # RFC 7541 §4.1

# Nodes of the code tree: children of an inner node by bit; a leaf is -1 - symbol.
_tree: list[list[int]] = [[0, 0]]
for _symbol, (_code, _length) in enumerate(zip(REQUEST_CODES, REQUEST_CODES_LENGTH, strict=True)):
    _node = 0
    for _shift in range(_length - 1, 0, -1):
        _bit = _code >> _shift & 1
        if not _tree[_node][_bit]:
            _tree[_node][_bit] = len(_tree)
            _tree.append([0, 0])
        _node = _tree[_node][_bit]
    _tree[_node][_code & 1] = -1 - _symbol
_steps: dict[tuple[int, int], tuple[str, int]] = {}


def _step(node: int, byte: int) -> tuple[str, int]:
    text, start = "", node
    for shift in range(7, -1, -1):
        node = _tree[node][byte >> shift & 1]
        if node < 0:
            text += chr(-1 - node)
            node = 0
    _steps[start, byte] = text, node
    return text, node


def read_huffman(data: bytes) -> str:
    """The text behind Huffman code; what pads the last byte is dropped."""
    parts, node = [], 0
    for byte in data:
        known = _steps.get((node, byte))
        text, node = known if known is not None else _step(node, byte)
        if text:
            parts.append(text)
    return "".join(parts)


class Decoder:
    """The decoding side of one connection."""

    def __init__(self) -> None:
        self._table: deque[tuple[str, str]] = deque()
        self._size = 0
        self._limit = _TABLE_BYTES

    def decode(self, block: bytes) -> dict[str, str]:
        """The fields of a block; of a repeated name the last counts.

        Raises:
            IndexError: the block is cut short or names a field that is not there.
        """
        fields: dict[str, str] = {}
        position, end = 0, len(block)
        while position < end:
            first = block[position]
            if first & 0x80:
                index, position = _integer(block, position, 0x7F)
                name, value = self._field(index)
            elif first & 0xE0 == 0x20:
                self._limit, position = _integer(block, position, 0x1F)
                self._evict()
                continue
            else:
                index, position = _integer(block, position, 0x3F if first & 0x40 else 0x0F)
                if index:
                    name = self._field(index)[0]
                else:
                    name, position = _string(block, position)
                value, position = _string(block, position)
                if first & 0x40:
                    self._table.appendleft((name, value))
                    self._size += len(name) + len(value) + _FIELD_OVERHEAD
                    self._evict()
            fields[name] = value
        return fields

    def _field(self, index: int) -> tuple[str, str]:
        return _STATIC[index - 1] if index <= len(_STATIC) else self._table[index - 1 - len(_STATIC)]

    def _evict(self) -> None:
        while self._size > self._limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _FIELD_OVERHEAD


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        number += (byte & 127) << shift
        shift += 7
        if not byte & 128:
            return number, position


def _string(block: bytes, position: int) -> tuple[str, int]:
    coded = block[position] & 0x80
    length, position = _integer(block, position, 0x7F)
    end = position + length
    data = block[position:end]
    return (read_huffman(data) if coded else data.decode("latin-1")), end
