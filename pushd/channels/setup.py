"""Builds the channels an operator configured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import trio

from pushd.channels.apns import make_apns_channel
from pushd.channels.fcm import make_fcm_channel
from pushd.channels.http2.client import open_http2_client
from pushd.channels.https1 import client_context
from pushd.channels.resolver import Resolver
from pushd.channels.webhook import WebhookChannel, open_webhook_sender
from pushd.config import Push
from pushd.errors import StartError
from pushd.model import Channel, Delivery, Outcome
from pushd.telemetry import Metrics


class Sender(Protocol):
    """What every channel offers: one attempt at a delivery, within 10 s."""

    async def attempt(self, delivery: Delivery) -> Outcome: ...


@runtime_checkable
class HasCredential(Protocol):
    """A sender that shows its provider a token of limited life."""

    def credential_age_s(self) -> float:
        """Seconds since the token in use was made; NaN while there is none."""
        ...


def watch_credentials(senders: Mapping[Channel, Sender], metrics: Metrics) -> None:
    """Let `metrics` tell the ages of the credentials, read when somebody asks."""
    for channel, sender in senders.items():
        if isinstance(sender, HasCredential):
            metrics.push_credential_age_seconds.labels(channel.label).set_function(sender.credential_age_s)


def configured_channels(push: Push) -> frozenset[Channel]:
    """The channels whose block is present (PUSH-070)."""
    blocks = {Channel.APNS: push.apns, Channel.FCM: push.fcm, Channel.HTTP: push.http}
    return frozenset(channel for channel, block in blocks.items() if block is not None)


@asynccontextmanager
async def open_channels(push: Push, resolver: Resolver) -> AsyncIterator[Mapping[Channel, Sender]]:
    """A sender for each configured channel; connections and token exchanges end with the block.

    Raises:
        ConfigError: a credential is unusable.
        StartError: a file with an authority cannot be used.
    """
    channels: dict[Channel, Sender] = {}
    async with AsyncExitStack() as stack:
        if push.apns is not None:
            _check_authority(push.apns.ca_file, "push.apns.ca_file")
            client = await stack.enter_async_context(open_http2_client())
            channels[Channel.APNS] = make_apns_channel(
                client,
                key_pem=push.apns.key.reveal(),
                key_id=push.apns.key_id,
                team_id=push.apns.team_id,
                bundle_id=push.apns.bundle_id,
                environment=push.apns.environment,
                endpoint=push.apns.endpoint,
                ca_file=push.apns.ca_file,
            )
        if push.fcm is not None:
            _check_authority(push.fcm.ca_file, "push.fcm.ca_file")
            client = await stack.enter_async_context(open_http2_client())
            exchanging = await stack.enter_async_context(_exchanging())
            channels[Channel.FCM] = make_fcm_channel(
                client,
                exchanging,
                service_account=push.fcm.service_account.reveal(),
                endpoint=push.fcm.endpoint,
                ca_file=push.fcm.ca_file,
            )
        if push.http is not None:
            _check_authority(push.http.ca_file, "push.http.ca_file")
            sender = await stack.enter_async_context(
                open_webhook_sender(
                    resolver=resolver,
                    tls=client_context(str(push.http.ca_file) if push.http.ca_file else None),
                    allow_private_addresses=push.http.allow_private_addresses,
                )
            )
            channels[Channel.HTTP] = WebhookChannel(sender)
        yield channels


@asynccontextmanager
async def _exchanging() -> AsyncIterator[trio.Nursery]:
    """Where token exchanges run; one still under way at the end is of no use to anybody."""
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        finally:
            nursery.cancel_scope.cancel(reason="channels closed")


def _check_authority(file: Path | None, key: str) -> None:
    try:
        if file is not None and "-----BEGIN CERTIFICATE-----" not in file.read_text():
            raise StartError(f"{key}: holds no PEM certificate")
    except (OSError, ValueError) as exc:
        raise StartError(f"{key}: cannot be read") from exc
