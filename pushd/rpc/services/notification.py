"""NotificationService: who is to be woken, and for which topics (spec §4.2).

Each method goes through the check table in its order and raises the first refusal. What a check needs from outside is
brought here: the stored hash, the outcome of a name resolution.

A call is two statements, each on a session borrowed for that statement alone: one reads the stored hash, one writes
and compares the hash again. So no transaction, and no session, is held while a webhook's name is resolved: a slow name
server may hold up the call that named it, never the database.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from pushd.core import checks
from pushd.core.checks import Claim, Refusal
from pushd.core.expiry import expires_at_ns
from pushd.errors import StatusError
from pushd.model import Channel, DeliveryConfig, RecipientState
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.notification_grpc import NotificationServiceServicer
from pushd.store import recipients
from pushd.store.database import Database
from pushd.telemetry import Metrics
from pushd.turns import in_turns

_T = TypeVar("_T")


class NotificationService(NotificationServiceServicer):
    """Register, Unregister and UpdateSubscriptions. Every instance serves them; none keeps anything in memory.

    Args:
        channels: those with a config block.
        check_webhook_url: resolves and judges the URL of a webhook (check 6) in bounded time.
        recipient_ttl_seconds: how long a recipient lives without renewal.
        max_push_topics: the most topics a recipient may grow to.
    """

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        *,
        channels: Collection[Channel],
        check_webhook_url: Callable[[str], Awaitable[Refusal | None]],
        recipient_ttl_seconds: int,
        max_push_topics: int,
    ) -> None:
        super().__init__()
        self._database = database
        self._channels = frozenset(channels)
        self._check_webhook_url = check_webhook_url
        self._recipient_ttl_seconds = recipient_ttl_seconds
        self._max_push_topics = max_push_topics
        self._registered = metrics.push_recipients.labels("registered")
        self._unregistered = metrics.push_recipients.labels("unregistered")
        self._added = metrics.push_subscriptions.labels("added")
        self._removed = metrics.push_subscriptions.labels("removed")

    async def Register(self, input_message: wire.RegisterRequest) -> wire.RecipientState:
        """Create a recipient, or replace the delivery of one's own; renews it (PUSH-001, PUSH-002, PUSH-005)."""
        claim = _unless_refused(checks.check_identity(input_message.recipient_id, input_message.recipient_secret))
        refusal = await self._ownership(claim)
        if refusal is not Refusal.NOT_REGISTERED:  # which to Register means a new recipient
            _unless_refused(refusal)
        config = await self._checked_delivery(input_message)
        state = _unless_refused(await recipients.save_recipient(self._database, claim, config))
        self._registered.inc()
        return self._answer(state)

    async def Unregister(self, input_message: wire.UnregisterRequest) -> wire.UnregisterResponse:
        """Delete one's recipient and all its subscriptions (PUSH-006), whatever channels are configured by now."""
        claim = _unless_refused(checks.check_identity(input_message.recipient_id, input_message.recipient_secret))
        _unless_refused(await self._ownership(claim))
        removed = _unless_refused(await recipients.delete_recipient(self._database, claim))
        self._unregistered.inc()
        self._removed.inc(removed)
        return wire.UnregisterResponse()

    async def UpdateSubscriptions(self, input_message: wire.UpdateSubscriptionsRequest) -> wire.RecipientState:
        """Apply every add and remove, or none; renews the recipient (PUSH-020, PUSH-021, PUSH-022)."""
        claim = _unless_refused(checks.check_identity(input_message.recipient_id, input_message.recipient_secret))
        _unless_refused(await self._ownership(claim))
        check = checks.UpdateCheck()
        adds = await in_turns(_unless_refused(check.add(add)) for add in input_message.adds)
        removes = await in_turns(_unless_refused(check.remove(topic)) for topic in input_message.removes)
        updated = _unless_refused(
            await recipients.update_subscriptions(
                self._database, claim, adds, removes, max_topics=self._max_push_topics
            )
        )
        self._added.inc(updated.added)
        self._removed.inc(updated.removed)
        return self._answer(updated.state)

    async def _ownership(self, claim: Claim) -> Refusal | None:
        return checks.check_ownership(claim, await recipients.find_secret_hash(self._database, claim.recipient_id))

    async def _checked_delivery(self, request: wire.RegisterRequest) -> DeliveryConfig:
        """Checks 5 to 7 and the storable shape of the target."""
        config = _unless_refused(checks.check_channel(_delivery(request), self._channels))
        if config.channel is Channel.HTTP:
            _unless_refused(await self._check_webhook_url(config.target))
        _unless_refused(checks.check_delivery(config))
        return config

    def _answer(self, state: RecipientState) -> wire.RecipientState:
        return wire.RecipientState(
            topic_count=state.topic_count,
            channel=wire.Channel.Name(state.channel.value),
            expires_at_ns=expires_at_ns(state.renewed_ns, self._recipient_ttl_seconds),
        )


def _delivery(request: wire.RegisterRequest) -> DeliveryConfig | None:
    match request.WhichOneof("delivery"):
        case "apns":
            return DeliveryConfig(Channel.APNS, request.apns.token)
        case "fcm":
            return DeliveryConfig(Channel.FCM, request.fcm.token)
        case "http":
            return DeliveryConfig(Channel.HTTP, request.http.url, request.http.signing_key)
        case _:
            return None


def _unless_refused(checked: _T | Refusal) -> _T:
    if isinstance(checked, Refusal):
        raise StatusError(checked.code, checked.text)
    return checked
