"""`pushd send-test`: one push through the channel's own code, and what the dispatcher would make of the answer."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import assert_never

import attrs
import trio
from rich.console import Console
from rich.table import Table

from pushd.channels.resolver import ThreadResolver
from pushd.channels.setup import open_channels
from pushd.config import Config
from pushd.errors import StartError, UsageError
from pushd.model import (
    RECIPIENT_ID_BYTES,
    Channel,
    Delivered,
    Delivery,
    DeliveryConfig,
    Gone,
    Mismatch,
    Outcome,
    Rejected,
    Terminal,
    TopicKind,
    Transient,
)
from pushd.store.operations import load_test_delivery
from pushd.store.startup import open_running_database


@attrs.frozen
class Result:
    """What one test push came to."""

    channel: str
    outcome: str
    reason: str
    latency_ms: float
    dispatcher: str
    """What the dispatcher would do."""


def _test_topic() -> bytes:
    """A group topic nobody has: a receiver that looks it up finds nothing."""
    return bytes([TopicKind.GROUP_MESSAGE]) + secrets.token_bytes(16)


def test_delivery(channel: Channel, target: str, signing_key: str | None) -> Delivery:
    """A delivery of sequence id 0 to a target that need not be registered.

    Raises:
        UsageError: the signing key is missing for a webhook, or is not 16 to 64 bytes in hex.
    """
    key: bytes | None = None
    if channel is Channel.HTTP:
        try:
            key = bytes.fromhex(signing_key or "")
        except ValueError:
            key = b""
        if not 16 <= len(key) <= 64:
            raise UsageError("--signing-key must be the webhook's key, 16 to 64 bytes in hex digits")
    return Delivery(0, _test_topic(), bytes(RECIPIENT_ID_BYTES), DeliveryConfig(channel, target, key), b"")


async def stored_delivery(config: Config, data_dir: Path, recipient: str) -> Delivery:
    """A delivery of sequence id 0 to a stored recipient.

    Raises:
        UsageError: the id is not 64 hex digits.
        StartError: nobody is registered under it, or there is no database to ask.
    """
    try:
        recipient_id = bytes.fromhex(recipient)
    except ValueError:
        recipient_id = b""
    if len(recipient_id) != RECIPIENT_ID_BYTES:
        raise UsageError(f"--recipient must be the recipient's id, {2 * RECIPIENT_ID_BYTES} hex digits")
    async with open_running_database(config, data_dir, "send-test") as connection:
        delivery = await load_test_delivery(connection, recipient_id, _test_topic())
    if delivery is None:
        raise StartError("no recipient is registered under this id")
    return delivery


async def run_send_test(config: Config, delivery: Delivery, *, as_json: bool) -> int:
    """Make one attempt and print what it came to; 0 when it was delivered, else 1. Nothing is stored or deleted.

    Raises:
        StartError: the delivery's channel has no block in the configuration.
    """
    channel = delivery.config.channel
    async with open_channels(config.push, ThreadResolver()) as senders:
        if channel not in senders:
            raise StartError(f"push.{channel.label}: this block is missing in the configuration")
        begun = trio.current_time()
        outcome = await senders[channel].attempt(delivery)
        latency_ms = round((trio.current_time() - begun) * 1_000, 1)
    result = Result(channel.label, latency_ms=latency_ms, **describe(outcome, config.push.max_attempts))
    if as_json:
        print(json.dumps(attrs.asdict(result)))
    else:
        table = Table(show_header=False, box=None)
        for name, value in attrs.asdict(result).items():
            table.add_row(name.replace("_", " "), str(value))
        Console(highlight=False).print(table)
    return 0 if isinstance(outcome, Delivered) else 1


def describe(outcome: Outcome, max_attempts: int) -> dict[str, str]:
    """The class of an outcome, its reason, and what the dispatcher would do next."""
    match outcome:
        case Delivered():
            return _described("delivered", "", "count it as delivered")
        case Rejected(reason):
            return _described("rejected", reason, "not try again, and keep the recipient")
        case Mismatch(reason):
            return _described("mismatch", reason, "not try again, and keep the recipient: look at the configuration")
        case Terminal(reason):
            return _described("terminal", reason, "delete the recipient if its configuration is still this one")
        case Gone(status):
            text = f"try {max_attempts} times in all, and delete the recipient if every answer is 404 or 410"
            return _described("gone", f"status_{status}", text)
        case Transient(reason, delay_s):
            return _described("transient", reason, f"try {max_attempts} times in all, next after {delay_s:g} s")
        case _:
            assert_never(outcome)


def _described(outcome: str, reason: str, dispatcher: str) -> dict[str, str]:
    return {"outcome": outcome, "reason": reason, "dispatcher": dispatcher}
