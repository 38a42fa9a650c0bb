"""The HTTP/2 state machine under the provider client: h2, and the settings that make it fast enough.

The only module of `channels` that imports h2, so another engine with the same interface is a change of one file. What
costs most in h2 is avoided here by public means (docs/decisions/0004-http2-engine.md has the figures):

- Header blocks arrive ready-made. A sender encodes the parts that never change once and joins bytes per request, so
  the encoder h2 calls has nothing left to do. Every field is a literal that enters no compression table: such bytes
  mean the same on every connection at any moment, and no token or topic can be probed in a table (RFC 7541 §7.1).
- h2 counts its open streams by walking all of them for every new one. The client counts them itself.
- Outbound normalisation and validation are off, because our own code writes the headers. Inbound validation is off
  too: only `:status` and `retry-after` are ever read, and both are checked where they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from pushd.bounded_h2 import BoundedH2Connection

__all__ = [
    "DataReceived",
    "ErrorCodes",
    "Event",
    "PingAckReceived",
    "ProtocolError",
    "RemoteSettingsChanged",
    "ResponseReceived",
    "StreamEnded",
    "StreamReset",
    "WindowUpdated",
    "Wire",
    "literal",
]

MAX_HEADER_BYTES = 16_384

_LITERAL = 0x00  # RFC 7541 §6.2.2: literal without indexing, new name
_NEVER_INDEXED = 0x10  # RFC 7541 §6.2.3
_EMPTY_TABLE = b"\x20"  # RFC 7541 §6.3: dynamic table size 0
_COUNT_EVERY = 128


def literal(name: bytes, value: bytes, *, private: bool = False) -> bytes:
    """One header field as HPACK bytes that depend on no compression state.

    Args:
        name: the field name in lower case.
        value: the field value, visible ASCII.
        private: mark the field never-indexed, so that no hop on the way may put it into a table.

    Raises:
        ValueError: `value` is empty or holds a byte outside visible ASCII (a line break would end the field early in
            an HTTP/1.1 hop behind the peer).
    """
    if not value.isascii() or not value.decode("ascii").isprintable() or not value:
        raise ValueError("a header value must be visible ASCII")
    return bytes((_NEVER_INDEXED if private else _LITERAL,)) + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    """A string literal without Huffman coding (RFC 7541 §5.2); its length is an integer with a 7-bit prefix (§5.1)."""
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    prefix = bytearray((127,))
    length -= 127
    while length >= 128:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + text


class _ReadyEncoder:
    """Stands where h2 expects an HPACK encoder and passes on what is encoded already.

    The first block of a connection empties the dynamic table. That settles for good the duty to confirm a peer's
    smaller table size (RFC 7541 §4.2): no limit is below 0.
    """

    def __init__(self) -> None:
        self.header_table_size = 0
        self._opening = _EMPTY_TABLE

    def encode(self, headers: Iterable[tuple[bytes, bytes]], huffman: bool = True) -> bytes:
        block = self._opening + b"".join([field[1] for field in headers])
        self._opening = b""
        return block


class Wire(BoundedH2Connection):
    """A client connection that has sent nothing yet; `initiate_connection` queues preface and settings."""

    def __init__(self) -> None:
        super().__init__(
            H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
            )
        )
        self.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
            },
        )
        # In force at once: the announced value would only count after the peer's acknowledgement.
        self.decoder.max_header_list_size = MAX_HEADER_BYTES
        encoder: Any = _ReadyEncoder()
        self.encoder = encoder
        self._until_count = _COUNT_EVERY

    @property
    def open_outbound_streams(self) -> int:
        """Zero for h2's own check; the client has compared its count with the peer's limit before.

        The real count is still taken now and then, because counting is also how h2 lets go of closed streams.
        """
        self._until_count -= 1
        if self._until_count <= 0:
            self._until_count = _COUNT_EVERY
            super().open_outbound_streams  # noqa: B018
        return 0

    def send_request(self, stream_id: int, block: bytes) -> None:
        """Queue HEADERS with the ready-made header block; a body follows."""
        self.send_headers(stream_id, [(b"", block)])
