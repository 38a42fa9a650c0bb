"""What gRPC says in HTTP/2 headers: requests, time-outs, statuses (gRPC doc/PROTOCOL-HTTP2.md).

Only values in and values out. Peers' headers are judged here rather than by h2, because h2 ends the whole connection
over a header that concerns one call.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote

from attrs import field, frozen

from pushd.errors import Code

RawHeaders = list[tuple[bytes, bytes]]

CONTENT_TYPE = b"application/grpc"

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONNECTION_SPECIFIC = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
# Printable ASCII except "%" goes through as it is.
_MESSAGE_SAFE = "".join(chr(c) for c in range(0x20, 0x7F) if c != 0x25)


class MalformedRequest(Exception):
    """The header list breaks HTTP/2 itself (RFC 9113 §8.1.1): the stream is reset with PROTOCOL_ERROR."""


@frozen
class Refusal:
    """A request that is HTTP/2 but not gRPC: HTTP status, and the gRPC status for clients that read it."""

    http_status: int
    code: Code
    message: str


@frozen
class Request:
    """The headers of one call.

    `headers` has the non-pseudo headers, names in lower case, repeated ones joined by a comma (RFC 9110 §5.3); whoever
    has judged them clears them. `timeout_s` is None when the caller set none. `refusal` says why the call cannot be
    served whatever its path.
    """

    path: str
    headers: dict[str, str] = field(repr=False)
    timeout_s: float | None
    refusal: Refusal | None


_NOT_POST = Refusal(405, Code.INTERNAL, "method is not POST")
_NOT_GRPC = Refusal(415, Code.INTERNAL, "content-type is not application/grpc")
_NO_TRAILERS = Refusal(200, Code.INTERNAL, "te is not trailers")
_BAD_TIMEOUT = Refusal(200, Code.INTERNAL, "grpc-timeout is malformed")


def parse_request(raw: Iterable[tuple[bytes, bytes]]) -> Request:
    """Reads a request's header list.

    Raises:
        MalformedRequest: the list is not a legal HTTP/2 request.
    """
    pseudo: dict[bytes, bytes] = {}
    plain: dict[bytes, bytes] = {}
    for name, value in raw:
        if name.startswith(b":"):
            if name in pseudo or plain or name not in _PSEUDO:
                raise MalformedRequest
            pseudo[name] = value
        elif name in plain:
            plain[name] += b"," + value
        else:
            plain[name] = value
    if b":method" not in pseudo or b":path" not in pseudo or b":scheme" not in pseudo:
        raise MalformedRequest
    if b"" in plain or not _CONNECTION_SPECIFIC.isdisjoint(plain) or any(name != name.lower() for name in plain):
        raise MalformedRequest
    timeout, timeout_s = plain.get(b"grpc-timeout"), None
    if timeout is not None:
        timeout_s = parse_timeout(timeout)
    refusal = None
    if pseudo[b":method"] != b"POST":
        refusal = _NOT_POST
    elif not _is_grpc(plain.get(b"content-type", b"")):
        refusal = _NOT_GRPC
    elif plain.get(b"te") != b"trailers":
        refusal = _NO_TRAILERS
    elif timeout is not None and timeout_s is None:
        refusal = _BAD_TIMEOUT
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in plain.items()}
    return Request(pseudo[b":path"].decode("latin-1"), headers, timeout_s, refusal)


def _is_grpc(content_type: bytes) -> bool:
    """`application/grpc`, alone or with a parameter or the protobuf subtype; other subtypes are other codecs."""
    return content_type == CONTENT_TYPE or (
        content_type.split(b";", 1)[0].strip().lower() in (CONTENT_TYPE, CONTENT_TYPE + b"+proto")
    )


def parse_timeout(value: bytes) -> float | None:
    """Seconds of a `grpc-timeout` header, or None when it is malformed."""
    match = _TIMEOUT.fullmatch(value)
    return int(match[1]) * _UNIT_S[match[2]] if match else None


def format_timeout(timeout_s: float) -> bytes:
    """A `grpc-timeout` value of at least `timeout_s` seconds, in the finest unit that fits into eight digits."""
    timeout_s = max(timeout_s, 0.0)
    for unit in (b"u", b"m", b"S", b"M"):
        count = int(timeout_s / _UNIT_S[unit]) + 1
        if count < 100_000_000:
            return b"%d%s" % (count, unit)
    return b"%dH" % min(int(timeout_s / 3600) + 1, 99_999_999)


def encode_grpc_message(message: str) -> bytes:
    """Percent-encoded as `grpc-message` wants it."""
    return quote(message, safe=_MESSAGE_SAFE).encode("ascii")


@frozen
class Status:
    """How a call ended. `details` is an encoded google.rpc.Status, from `grpc-status-details-bin`.

    `from_peer` tells a status the peer has sent from one concluded here: only the former is the backend's judgement.
    """

    code: Code
    message: str = ""
    details: bytes | None = None
    from_peer: bool = field(default=False, eq=False)


def status_headers(status: Status) -> RawHeaders:
    """The status part of trailers."""
    headers: RawHeaders = [(b"grpc-status", b"%d" % status.code)]
    if status.message:
        headers.append((b"grpc-message", encode_grpc_message(status.message)))
    if status.details is not None:
        headers.append((b"grpc-status-details-bin", base64.b64encode(status.details).rstrip(b"=")))
    return headers


def parse_status(raw: Iterable[tuple[bytes, bytes]]) -> Status | None:
    """The status in a peer's trailers, or None when there is none."""
    headers = dict(raw)
    code = headers.get(b"grpc-status")
    if code is None:
        return None
    known = code.isdigit() and len(code) <= 2 and int(code) <= max(Code)
    message = unquote(headers.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
    details = _binary(headers.get(b"grpc-status-details-bin"))
    return Status(Code(int(code)) if known else Code.UNKNOWN, message, details, from_peer=True)


def _binary(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return None


# A peer, or a proxy between, that answers without gRPC (gRPC doc/http-grpc-status-mapping.md).
_CODE_OF_HTTP = {
    400: Code.INTERNAL,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}


def status_of_http(http_status: int) -> Status:
    """The status of an answer that has no `grpc-status`."""
    return Status(_CODE_OF_HTTP.get(http_status, Code.UNKNOWN), f"the server answered with HTTP status {http_status}")
