"""What the receiver does with one request: a set of named traits, from a script or from the query of the URL.

status=503            answer with this status; 204 if nothing else is said
delay_ms=50           wait first
stall=1               never answer
reset=1               cut the connection instead of answering
close=1               close the connection after the answer
redirect=/elsewhere   a Location, with status 302 unless one is given
body=2000             so many bytes of body
endless=1             a body that never ends
slow_headers=9000     the answer byte by byte, so many milliseconds apart
headers=100000        so many headers
gzip_bomb=1           a gzip body of 64 KiB that unpacks to 64 MiB
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from urllib.parse import parse_qsl

_NAMES = {200: "OK", 204: "No Content", 302: "Found", 404: "Not Found", 410: "Gone", 500: "Error", 503: "Unavailable"}


@dataclass(frozen=True)
class Behaviour:
    """The traits of one answer."""

    status: int = 204
    delay_ms: float = 0.0
    stall: int = 0
    reset: int = 0
    close: int = 0
    redirect: str = ""
    body: int = 0
    endless: int = 0
    slow_headers: float = 0.0
    headers: int = 0
    gzip_bomb: int = 0

    @property
    def keeps_to_http(self) -> bool:
        """Whether there is one whole answer, sent at once."""
        return not (self.stall or self.reset or self.endless or self.slow_headers)


def behaviour(traits: Mapping[str, object]) -> Behaviour:
    """Read traits by name.

    Raises:
        ValueError: a trait that does not exist, or a value that does not fit it.
    """
    kinds = {name: type(value) for name, value in asdict(Behaviour()).items()}
    if unknown := set(traits) - set(kinds):
        raise ValueError(f"no such trait: {', '.join(sorted(unknown))}")
    given = {name: kinds[name](value) for name, value in traits.items()}
    if given.get("redirect"):
        given = {"status": 302, **given}
    return Behaviour(**given)


@lru_cache(maxsize=1_024)
def behaviour_of(query: str) -> Behaviour | None:
    """The behaviour a URL asks for; None when its query names no trait."""
    known = {item.name for item in fields(Behaviour)}
    traits = {name: value for name, value in parse_qsl(query) if name in known}
    return behaviour(traits) if traits else None


@lru_cache(maxsize=256)
def answer(told: Behaviour) -> bytes:
    """The bytes of the answer; of an endless one, its head."""
    body = _bomb() if told.gzip_bomb else b"x" * told.body
    lines = [f"HTTP/1.1 {told.status} {_NAMES.get(told.status, 'Scripted')}"]
    if told.redirect:
        lines.append(f"Location: {told.redirect}")
    if told.gzip_bomb:
        lines.append("Content-Encoding: gzip")
    if told.close:
        lines.append("Connection: close")
    if told.endless:
        lines.append("Transfer-Encoding: chunked")
    elif told.status != 204:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"X-Filler-{number}: {number}" for number in range(told.headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if told.status == 204 else body)


@lru_cache(maxsize=1)
def _bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = bytes(1 << 20)
    return b"".join(packer.compress(block) for _ in range(64)) + packer.flush()
