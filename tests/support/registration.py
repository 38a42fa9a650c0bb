"""Calls of the registration API with short arguments, and their answers as values that compare."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from attrs import frozen

from pushd.core.checks import Refusal
from pushd.errors import StatusError
from pushd.model import Channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.rpc.services.notification import NotificationService
from pushd.store.database import Database
from pushd.telemetry import Metrics

ID = b"\x11" * 32
SECRET = b"\x22" * 32
OTHER_SECRET = b"\x99" * 32
KEY = b"k" * 42

FCM = {"fcm": wire.FcmDelivery(token="token")}
APNS = {"apns": wire.ApnsDelivery(token="abcd")}


@frozen
class Refused:
    """A status other than OK."""

    code: str
    text: str


MALFORMED = Refused("INVALID_ARGUMENT", "request is malformed")
NOT_REGISTERED = Refused("NOT_FOUND", "recipient is not registered")
WRONG_SECRET = Refused("PERMISSION_DENIED", "recipient secret is not valid")
CHANNEL_NOT_CONFIGURED = Refused("FAILED_PRECONDITION", "channel is not configured")
WEBHOOK_URL = Refused("INVALID_ARGUMENT", "webhook url is not allowed")
WEBHOOK_UNRESOLVED = Refused("UNAVAILABLE", "webhook host cannot be resolved now")
SIGNING_KEY = Refused("INVALID_ARGUMENT", "webhook signing key length is not allowed")
SUBSCRIPTION = Refused("INVALID_ARGUMENT", "subscription is malformed")
TOPIC_LIMIT = Refused("RESOURCE_EXHAUSTED", "recipient topic limit reached")
DATABASE_FAILED = Refused("UNAVAILABLE", "database operation failed")


def http(url: str = "https://hooks.example.com/", key: bytes = bytes(16)) -> dict[str, Any]:
    return {"http": wire.HttpDelivery(url=url, signing_key=key)}


def group(number: int) -> bytes:
    return b"\x00" + number.to_bytes(16, "big")


def welcome(number: int) -> bytes:
    return b"\x01" + number.to_bytes(32, "big")


def add(topic: bytes, *keys: bytes, base: int = 0, commits: bool = False) -> wire.Subscription:
    return wire.Subscription(topic=topic, hmac_epoch_base=base, hmac_keys=keys, include_commits=commits)


class UrlVerdicts:
    """Stands in for the check of webhook URLs: refuses the URLs in `refused` and remembers what it was asked."""

    def __init__(self, refused: Collection[str] = ()) -> None:
        self.refused = refused
        self.asked: list[str] = []

    async def __call__(self, url: str) -> Refusal | None:
        self.asked.append(url)
        return Refusal.WEBHOOK_URL if url in self.refused else None


class Api:
    """A NotificationService on `database`, called as the connection layer calls it."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        *,
        channels: Collection[Channel] = tuple(Channel),
        check_webhook_url: Any = None,
        ttl_s: int = 2_592_000,
        max_topics: int = 100_000,
    ) -> None:
        self.service = NotificationService(
            database,
            metrics,
            channels=channels,
            check_webhook_url=check_webhook_url or UrlVerdicts(),
            recipient_ttl_seconds=ttl_s,
            max_push_topics=max_topics,
        )

    async def register(self, delivery: dict[str, Any], recipient_id: bytes = ID, secret: bytes = SECRET) -> Any:
        request = wire.RegisterRequest(recipient_id=recipient_id, recipient_secret=secret, **delivery)
        return await _answer(self.service.Register(request))

    async def unregister(self, recipient_id: bytes = ID, secret: bytes = SECRET) -> Any:
        return await _answer(
            self.service.Unregister(wire.UnregisterRequest(recipient_id=recipient_id, recipient_secret=secret))
        )

    async def update(
        self,
        adds: Iterable[wire.Subscription] = (),
        removes: Sequence[bytes] = (),
        recipient_id: bytes = ID,
        secret: bytes = SECRET,
    ) -> Any:
        request = wire.UpdateSubscriptionsRequest(
            recipient_id=recipient_id, recipient_secret=secret, adds=adds, removes=removes
        )
        return await _answer(self.service.UpdateSubscriptions(request))


async def _answer(call: Any) -> Any:
    try:
        return await call
    except StatusError as refusal:
        return Refused(refusal.code.name, refusal.message)


class Rows:
    """The stored side: everything the API is responsible for, as it is right now."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def everything(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        return await self.recipients(), await self.subscriptions()

    async def recipients(self) -> list[tuple[Any, ...]]:
        """(id, secret_hash, channel, delivery, signing_key, topic_count, renewed_ns) in order of id."""
        async with self._database.primary() as connection:
            return await connection.fetch(
                "SELECT recipient_id, secret_hash, channel, delivery, signing_key, topic_count, renewed_ns "
                "FROM push_recipient ORDER BY recipient_id",
                binary=True,
            )

    async def subscriptions(self) -> list[tuple[Any, ...]]:
        """(id, topic, since, base, key 0, key 1, key 2, include_commits) in order of id and topic."""
        async with self._database.primary() as connection:
            return await connection.fetch(
                "SELECT recipient_id, topic, since_sequence_id, hmac_epoch_base, hmac_key_0, hmac_key_1, hmac_key_2, "
                "include_commits FROM push_subscription ORDER BY recipient_id, topic",
                binary=True,
            )

    async def set_boundary(self, sequence_id: int) -> None:
        async with self._database.primary() as connection:
            await connection.execute("UPDATE allocation_boundary SET closed_sequence_id = %s", (sequence_id,))


def counts(metrics: Metrics) -> dict[str, float]:
    """The two counters of this API by action."""
    return {
        sample.labels["action"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name in ("xmtp_push_recipients_total", "xmtp_push_subscriptions_total")
    }
