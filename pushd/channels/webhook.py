"""Webhooks over HTTPS: one signed POST per attempt, to an address that was checked for that attempt (PUSH-064 to 066).

The host is resolved before every attempt, every answer is judged, and the socket goes to one of the judged addresses;
so a name that turns to an inside address after it was registered reaches nothing. A kept connection is used again only
while its host still resolves to the address it is connected to, and only for that host name.
"""

from __future__ import annotations

import math
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache

import h11
import trio
from attrs import field, frozen

from pushd.channels.https1 import HttpsConnection, connect
from pushd.channels.resolver import Resolver
from pushd.channels.tls_client import TlsError, handshake_turns
from pushd.core import webhook_answers
from pushd.core.addresses import Address, in_connect_order, is_blocked
from pushd.core.payloads import webhook_body
from pushd.core.signing import signature, webhook_id
from pushd.core.webhook_answers import judge_status
from pushd.core.webhook_url import WebhookUrl, parse_webhook_url
from pushd.model import ATTEMPT_S, IN_FLIGHT_PER_CHANNEL, Delivery, Outcome, Transient

# Kept connections exist for throughput: under load they are used again within milliseconds. Node closes idle ones
# after 5 s; a request that crosses such a close is an attempt lost.
IDLE_S = 4.0
MAX_IDLE = IN_FLIGHT_PER_CHANNEL  # of all hosts together, so that a burst to one host keeps every connection it opened
# After the outcome is known: to read a short body and close or keep the connection. The permit is held meanwhile.
GIVE_BACK_S = 0.25
# To one address while others are left to try. Three dead ones in front of a good one still leave it 2.5 s of ten.
CONNECT_S = 2.5
MAX_ADDRESSES = 4

parse_target = lru_cache(maxsize=1_024)(parse_webhook_url)  # one URL is parsed again for each of its deliveries


@frozen
class WebhookRequest:
    """One attempt's POST, before timestamp and signature, which are made when it is sent."""

    url: WebhookUrl
    signing_key: bytes = field(repr=False)
    webhook_id: str = field(repr=False)
    body: bytes = field(repr=False)


class WebhookSender:
    """Sends requests and keeps connections. Made by `open_webhook_sender`.

    Any number of sends may run at once; how many is the dispatcher's to bound.
    """

    def __init__(
        self,
        *,
        resolver: Resolver,
        tls: ssl.SSLContext,
        allow_private_addresses: bool,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._resolver = resolver
        self._tls = tls
        self._allow_private_addresses = allow_private_addresses
        self._wall_clock = wall_clock
        self._idle = _IdleConnections()
        self._turns = handshake_turns()

    def __repr__(self) -> str:
        return f"WebhookSender(idle={len(self._idle)})"

    async def send(self, request: WebhookRequest) -> Outcome:
        """Make one attempt, of `ATTEMPT_S` at most, lookup, connecting and TLS included."""
        with trio.move_on_after(ATTEMPT_S):
            return await self._attempt(request)
        return webhook_answers.TIMED_OUT

    async def _attempt(self, request: WebhookRequest) -> Outcome:
        url = request.url
        addresses = (url.address,) if url.address else await self._resolver.resolve(url.host)
        if not addresses:
            return webhook_answers.NO_ADDRESS
        if not self._allow_private_addresses and any(map(is_blocked, addresses)):
            return webhook_answers.BLOCKED_ADDRESS
        connection = await self._reuse(url, addresses) or await self._connect(url, addresses)
        if isinstance(connection, Transient):
            return connection
        outcome: Outcome | None = None
        try:
            outcome = await self._exchange(connection, request)
        finally:
            # Shielded because the outcome is known: a deadline that passes now must not turn it into a timeout.
            with trio.move_on_after(GIVE_BACK_S if outcome else 0, shield=True):
                await self._give_back(url, connection)
        return outcome

    async def _exchange(self, connection: HttpsConnection, request: WebhookRequest) -> Outcome:
        timestamp_s = int(self._wall_clock())
        headers = [
            (b"Host", request.url.host_header.encode("ascii")),
            (b"User-Agent", b"pushd"),
            (b"Content-Type", b"application/json"),
            (b"Content-Length", b"%d" % len(request.body)),
            (b"webhook-id", request.webhook_id.encode("ascii")),
            (b"webhook-timestamp", b"%d" % timestamp_s),
            (
                b"webhook-signature",
                signature(request.signing_key, request.webhook_id, timestamp_s, request.body).encode("ascii"),
            ),
        ]
        try:
            return judge_status(await connection.post(request.url.target.encode("ascii"), headers, request.body))
        except trio.BrokenResourceError:
            return webhook_answers.CONNECTION_LOST
        except h11.RemoteProtocolError:
            return webhook_answers.NOT_HTTP

    async def _reuse(self, url: WebhookUrl, addresses: tuple[Address, ...]) -> HttpsConnection | None:
        while connection := self._idle.take(url):
            if connection.address in addresses and connection.is_quiet():
                return connection
            await connection.aclose()
        return None

    async def _connect(self, url: WebhookUrl, addresses: tuple[Address, ...]) -> HttpsConnection | Transient:
        candidates = in_connect_order(addresses)[:MAX_ADDRESSES]
        for left, address in zip(reversed(range(len(candidates))), candidates, strict=True):
            try:
                deadline = trio.current_time() + (CONNECT_S if left else ATTEMPT_S)
                return await connect(url, address, self._tls, tcp_deadline=deadline, turns=self._turns)
            except TlsError:
                return webhook_answers.TLS_FAILED
            except OSError:
                continue
        return webhook_answers.NOT_CONNECTED

    async def _give_back(self, url: WebhookUrl, connection: HttpsConnection) -> None:
        try:
            reusable = await connection.finish()
        except BaseException:
            connection.close()
            raise
        if not reusable:
            await connection.aclose()
            return
        self._idle.put(url, connection, trio.current_time())
        while surplus := self._idle.take_oldest(limit=MAX_IDLE, idle_since=-math.inf):
            await surplus.aclose()

    async def run_idle_closer(self) -> None:
        """Close connections that have been idle for `IDLE_S`, for ever."""
        while True:
            await trio.sleep(IDLE_S / 2)
            since = trio.current_time() - IDLE_S
            while connection := self._idle.take_oldest(limit=MAX_IDLE, idle_since=since):
                with trio.move_on_after(GIVE_BACK_S):
                    await connection.aclose()

    def close_idle(self) -> None:
        """Close every idle connection at once."""
        while connection := self._idle.take_oldest(limit=0, idle_since=math.inf):
            connection.close()


class WebhookChannel:
    """The HTTPS channel as the dispatcher sees it: deliveries in, outcomes out."""

    def __init__(self, sender: WebhookSender) -> None:
        self._sender = sender

    async def attempt(self, delivery: Delivery) -> Outcome:
        """Make one attempt. A stored configuration that could not be registered is rejected without a request."""
        url, key = parse_target(delivery.config.target), delivery.config.signing_key
        if url is None or not key:
            return webhook_answers.UNUSABLE_TARGET
        recipient_id, topic, sequence_id = delivery.recipient_id, delivery.topic, delivery.sequence_id
        message_id = webhook_id(recipient_id, topic, sequence_id)
        return await self._sender.send(
            WebhookRequest(url, key, message_id, webhook_body(topic, sequence_id, recipient_id))
        )


@asynccontextmanager
async def open_webhook_sender(
    *, resolver: Resolver, tls: ssl.SSLContext, allow_private_addresses: bool = False
) -> AsyncIterator[WebhookSender]:
    """A sender whose idle connections are closed in time, and all of them at the end.

    Args:
        resolver: asked before every attempt.
        tls: from `https1.client_context`.
        allow_private_addresses: let webhooks reach private and loopback addresses; for development and tests.
    """
    sender = WebhookSender(resolver=resolver, tls=tls, allow_private_addresses=allow_private_addresses)
    async with trio.open_nursery() as keeping:
        keeping.start_soon(sender.run_idle_closer)
        try:
            yield sender
        finally:
            keeping.cancel_scope.cancel()
            sender.close_idle()


class _IdleConnections:
    """Connections nobody uses, by host name and port; a dict is the ordered set. The newest is used again first."""

    def __init__(self) -> None:
        self._by_origin: dict[tuple[str, int], dict[HttpsConnection, None]] = {}
        self._oldest_first: OrderedDict[HttpsConnection, tuple[tuple[str, int], float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._oldest_first)

    def put(self, url: WebhookUrl, connection: HttpsConnection, now: float) -> None:
        origin = (url.host, url.port)
        self._by_origin.setdefault(origin, {})[connection] = None
        self._oldest_first[connection] = (origin, now)

    def take(self, url: WebhookUrl) -> HttpsConnection | None:
        connections = self._by_origin.get((url.host, url.port))
        if not connections:
            return None
        connection = next(reversed(connections))
        self._remove(connection)
        return connection

    def take_oldest(self, *, limit: int, idle_since: float) -> HttpsConnection | None:
        """The oldest one, if there are more than `limit` of them or it has been idle since before `idle_since`."""
        for connection, (_, since) in self._oldest_first.items():
            if len(self) > limit or since < idle_since:
                self._remove(connection)
                return connection
            break
        return None

    def _remove(self, connection: HttpsConnection) -> None:
        origin, _ = self._oldest_first.pop(connection)
        connections = self._by_origin[origin]
        del connections[connection]
        if not connections:
            del self._by_origin[origin]
