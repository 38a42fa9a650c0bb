"""Which addresses a webhook may reach: a prefix table of our own (PUSH-066).

`ipaddress` is used to read and print addresses, never to judge them. Its `is_private` and `is_global` change between
Python releases (CVE-2024-4032) and call `64:ff9b::127.0.0.1`, `2002:7f00:1::` and multicast global, each of which can
end at a machine inside.

IPv4 is a list of what is refused. IPv6 is the reverse: only 2000::/3, the space the registries hand out, can be
reached at all, and exceptions inside it are listed; whatever is defined outside of it later stays refused. Forms that
carry an IPv4 address are judged by that address.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import zip_longest

Address = IPv4Address | IPv6Address

_BLOCKED_V4 = [
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # "this network"; Linux delivers 0.0.0.0 to loopback
        "10.0.0.0/8",  # RFC 1918
        "100.64.0.0/10",  # shared address space behind carrier NAT, RFC 6598
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local and the metadata services of clouds, RFC 3927
        "172.16.0.0/12",  # RFC 1918
        "192.0.0.0/24",  # IETF protocol assignments, RFC 6890
        "192.0.2.0/24",  # documentation, RFC 5737
        "192.88.99.0/24",  # 6to4 relays, withdrawn by RFC 7526
        "192.168.0.0/16",  # RFC 1918
        "198.18.0.0/15",  # benchmarks, RFC 2544
        "198.51.100.0/24",  # documentation, RFC 5737
        "203.0.113.0/24",  # documentation, RFC 5737
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and the broadcast address
    )
]
_GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")  # RFC 4291 and the IANA registry
_BLOCKED_V6 = [
    IPv6Network(text)
    for text in (
        "2001::/23",  # IETF protocol assignments: Teredo 2001::/32, benchmarks 2001:2::/48, ORCHID 2001:20::/28
        "2001:db8::/32",  # documentation, RFC 3849
        "3fff::/20",  # documentation, RFC 9637
    )
]

# Prefix, and how far right the IPv4 address inside sits. 64:ff9b:1::/48 (RFC 8215) is not here: where its IPv4 bits
# are is up to the operator of that network, so it stays outside of 2000::/3 and refused.
_CARRYING_V4 = [
    (IPv6Network("::ffff:0:0/96"), 0),  # mapped, RFC 4291
    (IPv6Network("::/96"), 0),  # compatible, RFC 4291; holds :: and ::1, which read as 0.0.0.0 and 0.0.0.1: refused
    (IPv6Network("::ffff:0:0:0/96"), 0),  # translated, RFC 2765
    (IPv6Network("64:ff9b::/96"), 0),  # NAT64, RFC 6052
    (IPv6Network("2002::/16"), 80),  # 6to4, RFC 3056
]


@lru_cache(maxsize=4_096)  # asked at every attempt, nearly always about the same addresses
def is_blocked(address: Address) -> bool:
    """Whether `address` lies where no webhook may go: private, loopback, link-local, special use, or in disguise."""
    if isinstance(address, IPv6Address):
        carried = _carried_v4(address)
        if carried is None:
            return address not in _GLOBAL_UNICAST_V6 or any(address in network for network in _BLOCKED_V6)
        address = carried
    return any(address in network for network in _BLOCKED_V4)


def in_connect_order(addresses: Iterable[Address]) -> list[Address]:
    """The same addresses with the families alternating, starting with the family of the first one.

    A host whose IPv6 route is dead is then still reached at the second address, however many IPv6 addresses it
    publishes (RFC 8305 section 4).
    """
    unique = list(dict.fromkeys(addresses))
    if not unique:
        return []
    first = [address for address in unique if address.version == unique[0].version]
    other = [address for address in unique if address.version != unique[0].version]
    return [address for pair in zip_longest(first, other) for address in pair if address is not None]


def _carried_v4(address: IPv6Address) -> IPv4Address | None:
    for network, shift in _CARRYING_V4:
        if address in network:
            return IPv4Address((int(address) >> shift) & 0xFFFF_FFFF)
    return None
