"""A strict reader of webhook URLs (PUSH-004, PUSH-066).

The URL a client registers is judged as raw text, before any library sees it. `urllib.parse.urlsplit` drops tabs and
line breaks, accepts text after a closing bracket and tells nothing of an empty user name; `getaddrinfo` takes `0x7f.1`
for an address. Each of these makes the host that was checked another one than the host that is reached. So one reader
decides, what it returns is all that checks and sender ever use, and anything unusual is refused instead of repaired.
"""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from attrs import field, frozen

HTTPS_PORT = 443
MAX_HOST_CHARACTERS = 253  # RFC 1035 section 2.3.4, without the dot of the root

_SCHEME = "https://"
_VISIBLE = re.compile(r"[\x21-\x7e]+")  # no blank, control or non-ASCII character anywhere: nothing to inject or fold
_AUTHORITY_END = re.compile(r"[/?#]")
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[1-9][0-9]{0,4}))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_V6 = re.compile(r"[0-9a-f:.]+")  # leaves out zones and IPvFuture, which the library would read
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")  # last label of what C libraries take for an IPv4 address


@frozen
class WebhookUrl:
    """Where a webhook goes, in the only form the rest of the program uses.

    `host` is a lower-case name or the canonical text of `address`, without brackets. `target` is what the request line
    carries: path and query, never a fragment.
    """

    host: str = field(repr=False)
    port: int = field(repr=False)
    target: str = field(repr=False)
    address: IPv4Address | IPv6Address | None = field(repr=False)
    """The address when the host is one, else None: a name, which has to be resolved."""

    @property
    def host_header(self) -> str:
        """Value of the Host field: the port only where it is not the scheme's own (RFC 9110 section 7.2)."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return host if self.port == HTTPS_PORT else f"{host}:{self.port}"


def parse_webhook_url(text: str) -> WebhookUrl | None:
    """The parts of `text`, or None when it is not an https URL of the plainest kind.

    Refused on purpose, beside what no grammar allows: user names and passwords, even empty ones; ports that are empty,
    0 or padded; host names with a trailing dot, with percent signs or with letters outside of ASCII (their A-label
    form is accepted); numbers that are not an address in dotted decimal form; IPv6 zones.

    This says nothing about the domain list and the addresses: see `domains.host_allowed` and `addresses.is_blocked`.
    """
    if text[: len(_SCHEME)].lower() != _SCHEME or not _VISIBLE.fullmatch(text):
        return None
    rest = text[len(_SCHEME) :]
    end = _AUTHORITY_END.search(rest)
    authority, tail = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        return None
    address: IPv4Address | IPv6Address | None
    if parts["v6"] is not None:
        address = _read_v6(parts["v6"].lower())
        host = str(address)
    else:
        host = parts["name"].lower()
        address = _read_v4(host)
    if address is None and (parts["v6"] is not None or not _is_host_name(host)):
        return None
    port = int(parts["port"]) if parts["port"] else HTTPS_PORT
    if port > 0xFFFF:
        return None
    target = tail.partition("#")[0]
    return WebhookUrl(host, port, target if target.startswith("/") else f"/{target}", address)


def _is_host_name(text: str) -> bool:
    labels = text.split(".")
    return (
        len(text) <= MAX_HOST_CHARACTERS
        and all(_LABEL.fullmatch(label) for label in labels)
        and not _NUMERIC_LABEL.fullmatch(labels[-1])
    )


def _read_v4(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)  # four decimal parts without leading zeros, nothing else
    except AddressValueError:
        return None


def _read_v6(text: str) -> IPv6Address | None:
    if not _V6.fullmatch(text):
        return None
    try:
        return IPv6Address(text)
    except AddressValueError:
        return None
