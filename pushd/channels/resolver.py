"""Name lookups for webhooks, and the check of a webhook URL that needs one (PUSH-066).

The operating system's resolver is used, because it alone knows /etc/hosts, search domains and whatever else the
operator set up; it blocks, so it runs in threads. The hard part is a name whose servers never answer: the thread sits
in the C library for as long as that likes, nobody can stop it, and it must not take the others' threads along.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Protocol

import trio

from pushd.core.addresses import Address, is_blocked
from pushd.core.checks import Refusal
from pushd.core.domains import host_allowed
from pushd.core.webhook_url import parse_webhook_url
from pushd.model import ATTEMPT_S

# As many as a channel has permits, so that no attempt waits for a thread while names answer. Trio's default limiter
# (40 threads) is left to everybody else.
MAX_LOOKUPS = 256
# Threads for hosts that are not known to answer. The rest is out of reach for names that hang.
MAX_UNPROVEN_LOOKUPS = 192
# Of Register, which has threads of its own: who registers names that hang takes none from the sending of pushes, where
# after a failover no host at all is proven yet.
MAX_REGISTER_LOOKUPS = 64
MAX_UNPROVEN_REGISTER_LOOKUPS = 48
# Hosts remembered as answering: as many as there are retained deliveries.
MAX_PROVEN_HOSTS = 10_000
# The failures that say something of the name: unknown, or without an address. All others are of name servers, the
# network or this machine. Some C libraries lack the newer two.
_NO_ADDRESS = {getattr(socket, name, socket.EAI_NONAME) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")}


class Resolver(Protocol):
    """Where senders and the Register check get addresses from."""

    async def resolve(self, host: str) -> tuple[Address, ...] | None:
        """Every address of `host`, in the order to try them; empty when there is none, None when nobody knows now."""
        ...


async def check_webhook_url(
    text: str, *, allowed_domains: Collection[str], allow_private_addresses: bool, resolver: Resolver
) -> Refusal | None:
    """Check 6: why a client may not register this webhook URL, or None (PUSH-066, PUSH-068).

    The domain list comes before any lookup, so that a host outside of it causes no DNS query. A host without an
    address is refused as WEBHOOK_URL; one that nobody can tell about within the time of an attempt, because name
    servers fail or every thread is taken, as WEBHOOK_UNRESOLVED.
    """
    url = parse_webhook_url(text)
    if url is None or not host_allowed(url.host, allowed_domains):
        return Refusal.WEBHOOK_URL
    addresses: tuple[Address, ...] | None = None
    if url.address is not None:
        addresses = (url.address,)
    else:
        with trio.move_on_after(ATTEMPT_S):
            addresses = await resolver.resolve(url.host)
    if addresses is None:
        return Refusal.WEBHOOK_UNRESOLVED
    if not addresses or (not allow_private_addresses and any(map(is_blocked, addresses))):
        return Refusal.WEBHOOK_URL
    return None


class ThreadResolver:
    """`getaddrinfo` in threads of its own: at most `max_lookups` at once, and one for each host.

    Callers that ask for a host while its lookup runs get that lookup's answer: it is newer than their question, and
    nothing is kept for the next one. A caller that gives up leaves the lookup behind; it holds its slot, and its
    host's, until the thread ends. A host that answers is proven until a lookup of it is left behind. Hosts that are
    not proven share a smaller number of threads, so names that hang take slots from each other and from newcomers
    only.

    Args:
        look_up: blocking, called in a thread; raises `socket.gaierror`, or another OSError when nobody could be asked.
        max_lookups: threads.
        max_unproven: threads of them for hosts that are not proven.
    """

    def __init__(
        self,
        look_up: Callable[[str], tuple[Address, ...]] | None = None,
        *,
        max_lookups: int = MAX_LOOKUPS,
        max_unproven: int = MAX_UNPROVEN_LOOKUPS,
    ) -> None:
        self._look_up = look_up or _ask_the_system
        self._max_lookups = max_lookups
        self._lookups: dict[str, _Lookup] = {}
        self._proven: OrderedDict[str, None] = OrderedDict()
        self._proven_lane = _Lane(max_lookups)
        self._unproven_lane = _Lane(max_unproven)

    def __repr__(self) -> str:
        waiting = len(self._proven_lane.waiting) + len(self._unproven_lane.waiting)
        return f"ThreadResolver(threads={self._threads}, unproven={self._unproven_lane.running}, waiting={waiting})"

    async def resolve(self, host: str) -> tuple[Address, ...] | None:
        """See `Resolver`. Waits for a free slot where there is none; the caller's deadline covers that too."""
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = _Lookup(host, self._proven_lane if host in self._proven else self._unproven_lane)
            self._lookups[host] = lookup
            lookup.lane.waiting[host] = lookup
            self._start_waiting()
        lookup.callers += 1
        try:
            await lookup.done.wait()
        finally:
            lookup.callers -= 1
            if not lookup.callers and lookup.lane.waiting.get(host) is lookup:
                del lookup.lane.waiting[host]
                del self._lookups[host]  # given up before it had a thread
        return lookup.addresses

    @property
    def _threads(self) -> int:
        return self._proven_lane.running + self._unproven_lane.running

    def _start_waiting(self) -> None:
        for lane in (self._proven_lane, self._unproven_lane):
            while lane.waiting and lane.running < lane.limit and self._threads < self._max_lookups:
                self._start(lane.waiting.pop(next(iter(lane.waiting))))

    def _start(self, lookup: _Lookup) -> None:
        token = trio.lowlevel.current_trio_token()

        def work() -> None:
            try:
                lookup.addresses = self._look_up(lookup.host)
            except OSError as failure:
                if isinstance(failure, socket.gaierror) and failure.errno in _NO_ADDRESS:
                    lookup.addresses = ()
            finally:
                with suppress(trio.RunFinishedError):  # the program may end before the name servers answer
                    token.run_sync_soon(self._finish, lookup)

        try:
            trio.lowlevel.start_thread_soon(work, lambda result: result.unwrap(), "webhook lookup")
        except RuntimeError:  # the system has no thread left; whoever asks again may be luckier
            del self._lookups[lookup.host]
            lookup.done.set()
        else:
            lookup.lane.running += 1

    def _finish(self, lookup: _Lookup) -> None:
        lookup.lane.running -= 1
        del self._lookups[lookup.host]
        self._proven.pop(lookup.host, None)
        if lookup.callers:
            self._proven[lookup.host] = None
            if len(self._proven) > MAX_PROVEN_HOSTS:
                self._proven.popitem(last=False)
        lookup.done.set()
        self._start_waiting()


class _Lane:
    """Lookups that share a number of threads; `waiting` keeps the order of arrival."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.waiting: dict[str, _Lookup] = {}


class _Lookup:
    def __init__(self, host: str, lane: _Lane) -> None:
        self.host = host
        self.lane = lane
        self.callers = 0
        self.addresses: tuple[Address, ...] | None = None
        self.done = trio.Event()


def _ask_the_system(host: str) -> tuple[Address, ...]:
    # Bytes, because text goes through Python's IDNA codec, which raises UnicodeError for some names and changes others.
    answers = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM)
    return tuple(_without_zone(str(sockaddr[0])) for *_, sockaddr in answers)


def _without_zone(text: str) -> Address:
    address = ip_address(text)
    return IPv6Address(int(address)) if isinstance(address, IPv6Address) else address
