"""The notification part of the settings row, as values. The caller opens the transactions."""

from __future__ import annotations

import base64
import json
import os
import sqlite3

from pushd.client.decisions import Identity, Limit, Settings, State
from pushd.client.values import Consent, NotificationConfig, RecipientState
from pushd.errors import Code
from pushd.model import RECIPIENT_ID_BYTES, RECIPIENT_SECRET_BYTES, Channel, DeliveryConfig

_COLUMNS = """state, failure, recipient_id, recipient_secret, config, generation, registration_owed, renewal_ns,
  topic_count, channel, expires_at_ns, repairing, known_excess, withheld, withheld_set"""

MAX_COUNT = 2**63 - 1  # SQLite's integers are signed; the wire's count is not


def load(db: sqlite3.Connection) -> Settings:
    """The row as it is now."""
    (
        state,
        failure,
        recipient_id,
        recipient_secret,
        config,
        generation,
        registration_owed,
        renewal_ns,
        topic_count,
        channel,
        expires_at_ns,
        repairing,
        known_excess,
        withheld,
        withheld_set,
    ) = db.execute(f"SELECT {_COLUMNS} FROM settings").fetchone()
    return Settings(
        state=State(state),
        failure=None if failure is None else Code(failure),
        identity=None if recipient_id is None else Identity(recipient_id, recipient_secret),
        config=None if config is None else decode_config(config),
        generation=generation,
        registration_owed=bool(registration_owed),
        renewal_ns=renewal_ns,
        last_state=None if topic_count is None else RecipientState(topic_count, channel_of(channel), expires_at_ns),
        repairing=bool(repairing),
        known_excess=known_excess,
        withheld=Limit(withheld),
        withheld_set=withheld_set,
    )


def enable(db: sqlite3.Connection, config: NotificationConfig) -> int:
    """Turn notifications on, with an identity made on first use; returns the new generation (PUSH-080).

    What was withheld for a topic limit is tried again, as the rules may ask for less or the limit may have been raised.
    """
    db.execute(
        """UPDATE settings SET state = :enabled, failure = NULL, config = :config, generation = generation + 1,
             recipient_id = coalesce(recipient_id, :id), recipient_secret = coalesce(recipient_secret, :secret),
             registration_owed = 1, withheld = 0, withheld_set = NULL""",
        {
            "enabled": State.ENABLED,
            "config": encode_config(config),
            "id": os.urandom(RECIPIENT_ID_BYTES),
            "secret": os.urandom(RECIPIENT_SECRET_BYTES),
        },
    )
    return load(db).generation


def disable(db: sqlite3.Connection) -> int:
    """Turn notifications off and forget everything but the identity; returns the new generation (PUSH-081)."""
    db.execute(
        """UPDATE settings SET state = :disabled, failure = NULL, config = NULL, generation = generation + 1,
             registration_owed = 0, renewal_ns = NULL, topic_count = NULL,
             channel = NULL, expires_at_ns = NULL, repairing = 0, known_excess = 0, withheld = 0,
             withheld_set = NULL""",
        {"disabled": State.DISABLED},
    )
    return load(db).generation


def fail(db: sqlite3.Connection, code: Code) -> None:
    """Stop until the next enable (PUSH-089)."""
    db.execute("UPDATE settings SET state = ?, failure = ?", (State.FAILED, code))


def owe_registration(db: sqlite3.Connection) -> None:
    """The backend does not know the recipient: register before the next difference, in a repair pass (PUSH-088).

    What was withheld for a topic limit is tried again: with every topic a new one, nothing would be uploaded at all.
    """
    db.execute("UPDATE settings SET registration_owed = 1, repairing = 1, withheld = 0, withheld_set = NULL")


def record_answer(db: sqlite3.Connection, state: RecipientState, renewal_ns: int) -> None:
    """Keep the backend's view and the next renewal; the registration is no longer owed."""
    db.execute(
        """UPDATE settings SET registration_owed = 0, renewal_ns = :renewal, topic_count = :count, channel = :channel,
             expires_at_ns = :expires""",
        {
            "renewal": renewal_ns,
            "count": state.topic_count,
            "channel": state.channel,
            "expires": state.expires_at_ns,
        },
    )


def record_agreement(db: sqlite3.Connection, *, repairing: bool, known_excess: int | None) -> None:
    """Keep what the comparison of counts has led to."""
    db.execute("UPDATE settings SET repairing = ?, known_excess = ?", (repairing, known_excess))


def withhold(db: sqlite3.Connection, limit: Limit, wanted_set: bytes | None) -> None:
    """Keep adds back for as long as the wanted set has this fingerprint (PUSH-089)."""
    db.execute("UPDATE settings SET withheld = ?, withheld_set = ?", (limit, wanted_set))


def channel_of(number: int | None) -> Channel | None:
    """The channel of a wire or column number; None for one this version does not know."""
    return Channel(number) if number in set(Channel) else None


def encode_config(config: NotificationConfig) -> str:
    """The configuration as JSON."""
    delivery = config.delivery
    return json.dumps(
        {
            "channel": delivery.channel,
            "target": delivery.target,
            "signing_key": None if delivery.signing_key is None else base64.b64encode(delivery.signing_key).decode(),
            "consent_states": sorted(config.consent_states),
            "include_welcomes": config.include_welcomes,
            "include_sync_groups": config.include_sync_groups,
            "include_commits": config.include_commits,
        }
    )


def decode_config(text: str) -> NotificationConfig:
    """The inverse of `encode_config`."""
    members = json.loads(text)
    key = members["signing_key"]
    return NotificationConfig(
        DeliveryConfig(Channel(members["channel"]), members["target"], None if key is None else base64.b64decode(key)),
        frozenset(map(Consent, members["consent_states"])),
        include_welcomes=members["include_welcomes"],
        include_sync_groups=members["include_sync_groups"],
        include_commits=members["include_commits"],
    )
