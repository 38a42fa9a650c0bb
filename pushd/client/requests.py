"""The SDK's values as the messages of the registration API, and back."""

from __future__ import annotations

from typing import assert_never

from pushd.client.decisions import Settings
from pushd.client.settings import MAX_COUNT, channel_of
from pushd.client.uploads import Difference, Wanted
from pushd.client.values import NotificationConfig, RecipientState
from pushd.core.hmac_keys import key_window
from pushd.model import Channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire


def config_of(current: Settings) -> NotificationConfig:
    """The configuration of a state that has one: enabled, or failed."""
    assert current.config is not None  # stored with every enable, cleared with every disable
    return current.config


def recipient_state(answer: wire.RecipientState) -> RecipientState:
    """The backend's view; a count beyond what the local file can hold is cut."""
    return RecipientState(min(answer.topic_count, MAX_COUNT), channel_of(answer.channel), answer.expires_at_ns)


def register_request(current: Settings) -> wire.RegisterRequest:
    """Create or renew the recipient with the stored configuration."""
    assert current.identity is not None
    request = wire.RegisterRequest(
        recipient_id=current.identity.recipient_id, recipient_secret=current.identity.recipient_secret
    )
    delivery = config_of(current).delivery
    match delivery.channel:
        case Channel.APNS:
            request.apns.token = delivery.target
        case Channel.FCM:
            request.fcm.token = delivery.target
        case Channel.HTTP:
            request.http.url = delivery.target
            request.http.signing_key = delivery.signing_key or b""
        case _:
            assert_never(delivery.channel)
    return request


def unregister_request(current: Settings) -> wire.UnregisterRequest:
    """Delete the recipient."""
    assert current.identity is not None
    return wire.UnregisterRequest(
        recipient_id=current.identity.recipient_id, recipient_secret=current.identity.recipient_secret
    )


def update_request(
    current: Settings, wanted: Wanted, change: Difference, root_key: bytes
) -> wire.UpdateSubscriptionsRequest:
    """Change the stored topics. Deriving the keys of a full batch takes 20 ms, less than the request itself."""
    assert current.identity is not None
    request = wire.UpdateSubscriptionsRequest(
        recipient_id=current.identity.recipient_id,
        recipient_secret=current.identity.recipient_secret,
        removes=change.removes,
    )
    for add in change.adds:
        if add.has_keys:
            window = key_window(root_key, add.topic[1:], wanted.epoch)
            request.adds.add(
                topic=add.topic,
                hmac_epoch_base=window.epoch_base,
                hmac_keys=window.keys,
                include_commits=wanted.config.include_commits,
            )
        else:
            request.adds.add(topic=add.topic)
    return request
