"""The value types of the configuration and the judgement of a single value.

A check takes a value of the right type and returns None or what it must be, worded to follow the key's name. It never
repeats the value.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from pushd.core.credentials import is_loopback_host, is_loopback_url, is_url_text
from pushd.secret import Secret

Check = Callable[[Any], str | None]


@frozen
class Key:
    """What is known about a key beside its type and default: it feeds validation, the JSON schema and the documents.

    `low` and `high` are inclusive. `example` is shown where there is no default, or none that says anything.
    """

    doc: str
    low: int | None = None
    high: int | None = None
    check: Check | None = None
    example: str | tuple[str, ...] | None = None

    def fault(self, value: Any) -> str | None:
        """None, or what the value must be."""
        if self.low is not None and not self.low <= value <= (value if self.high is None else self.high):
            return self.range_text()
        return None if self.check is None else self.check(value)

    def range_text(self) -> str:
        """The bounds in words."""
        return f"must be at least {self.low}" if self.high is None else f"must be from {self.low} to {self.high}"


@frozen
class Address:
    """A numeric socket address; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to it."""
        return is_loopback_host(self.host)

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every address of the machine."""
        return self.host in ("0.0.0.0", "::")

    def collides(self, other: Address) -> bool:
        """Whether both cannot be listened on by one process."""
        return self.port == other.port != 0 and (self.host == other.host or self.is_wildcard or other.is_wildcard)


_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})\Z")


def parse_address(text: str) -> Address | None:
    """`127.0.0.1:5050` or `[::1]:5050`; None for anything else. Names are not resolved: a listener must not move."""
    found = _ADDRESS.match(text)
    if found is None:
        return None
    v6, v4, port = found.groups()
    try:
        host = ipaddress.IPv6Address(v6) if v6 else ipaddress.IPv4Address(v4)
    except ValueError:
        return None
    return Address(str(host), int(port)) if int(port) <= 65_535 else None


def database_url(url: Secret) -> str | None:
    """A connection URL PostgreSQL's own parser takes; several hosts are allowed."""
    text = url.reveal()
    if not text.startswith(("postgres://", "postgresql://")):
        return "must be a postgres:// or postgresql:// URL"
    try:
        parts = conninfo_to_dict(text)
    except (ProgrammingError, ValueError):
        return "is not a connection URL PostgreSQL can read"
    # The parser takes any text for a port or a host and leaves it to the connection to fail.
    if not all(port == "" or port.isdecimal() for port in str(parts.get("port", "")).split(",")):
        return "has a port that is not a number"
    hosts = str(parts.get("host", "")).split(",")
    return None if all(host[:1] in ("/", "@") or _is_name(host) for host in hosts) else "has a host that is no name"


def _is_name(host: str) -> bool:
    """Whether Python looks `host` up; an empty or overlong label is a UnicodeError, for which nobody is ready."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def jwks_url(url: Secret) -> str | None:
    """https, or plain http on this machine."""
    text = url.reveal()
    if not is_url_text(text):
        return "must be at most 2048 visible ASCII characters, without a line break at the end"
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if host and _is_name(host) and "@" not in parts.netloc and (parts.scheme == "https" or is_loopback_url(text)):
        return None
    return "must be an https:// URL, or http:// on a loopback address"


def loopback_endpoint(url: str) -> str | None:
    """The origin of a fake provider on this machine. Anything else could be handed real device tokens."""
    if is_loopback_url(url) and urlsplit(url).path in ("", "/") and not urlsplit(url).query:
        return None
    return "is for a fake provider on this machine and must be http(s)://127.0.0.1:PORT or another loopback address"


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN_ENTRY = re.compile(rf"(?:\*\.)?(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\Z")


def domain_entries(entries: tuple[str, ...]) -> str | None:
    """Host names, each optionally with a leading `*.` (PUSH-071)."""
    if all(map(_DOMAIN_ENTRY.match, entries)):
        return None
    return "must hold host names like hooks.example.com or *.example.org, without scheme, port, path or another star"


_BUNDLE_ID = re.compile(r"[A-Za-z0-9._-]+\Z")


def bundle_id(text: str) -> str | None:
    """One topic, fit to be sent as the apns-topic header."""
    if _BUNDLE_ID.match(text):
        return None
    if re.search(r"[,;\s*]", text):
        return "must be one bundle id; lists and wildcards are not possible"
    return "must be a bundle id like org.example.app"


def key_id(text: str) -> str | None:
    """The kid of a signing key: at most 256 bytes, the longest a token may ask for."""
    return None if len(text.encode()) <= 256 else "must be at most 256 bytes"


def not_empty(values: tuple[Any, ...]) -> str | None:
    """A list that, if present, says something."""
    return None if values else "must not be empty"
