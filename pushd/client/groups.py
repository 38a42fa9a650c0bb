"""The groups of the installation: membership, consent, override; and the inbox's root key.

Every function here is one committed transaction and nothing else. No record about notifications is written: what has
to be sent follows from these rows and from the uploaded set on the next run (PUSH-083, PUSH-105).
"""

from __future__ import annotations

import os
import sqlite3

from attrs import field, frozen

from pushd.client.database import WELCOME_KIND, transaction
from pushd.client.errors import UnknownConversation
from pushd.client.values import Consent, GroupKind, Override
from pushd.core.hmac_keys import ROOT_KEY_BYTES
from pushd.core.topics import GROUP_ID_BYTES, topic_of
from pushd.model import TopicKind


@frozen
class Group:
    """One group as the local file knows it."""

    group_id: bytes = field(repr=False)
    kind: GroupKind
    member: bool
    consent: Consent
    override: Override


def group_topic(group_id: bytes) -> bytes:
    """The topic of a group's messages.

    Raises:
        ValueError: a group id has 16 bytes.
    """
    topic = topic_of(TopicKind.GROUP_MESSAGE, group_id)
    if topic is None:
        raise ValueError(f"a group id has {GROUP_ID_BYTES} bytes")
    return topic


def put_group(db: sqlite3.Connection, group_id: bytes, kind: GroupKind, consent: Consent | None) -> None:
    """Record an active membership; `consent` None keeps what is recorded, which starts as UNKNOWN."""
    with transaction(db):
        db.execute(
            """INSERT INTO topic (topic, kind, member, consent) VALUES (:topic, :kind, 1, coalesce(:consent, 1))
               ON CONFLICT (topic) DO UPDATE SET kind = :kind, member = 1, consent = coalesce(:consent, consent)""",
            {"topic": group_topic(group_id), "kind": kind, "consent": consent},
        )


def end_membership(db: sqlite3.Connection, group_id: bytes) -> None:
    """Record that the installation is no longer an active member. Consent and override stay for a return."""
    with transaction(db):
        db.execute("UPDATE topic SET member = 0 WHERE topic = ?", (group_topic(group_id),))


def put_consent(db: sqlite3.Connection, group_id: bytes, consent: Consent) -> None:
    """Record consent. It may come before the group: the user's other devices are not waited for."""
    with transaction(db):
        db.execute(
            """INSERT INTO topic (topic, kind, member, consent) VALUES (:topic, :kind, 0, :consent)
               ON CONFLICT (topic) DO UPDATE SET consent = :consent""",
            {"topic": group_topic(group_id), "kind": GroupKind.GROUP, "consent": consent},
        )


def put_override(db: sqlite3.Connection, group_id: bytes, override: Override) -> None:
    """Record the user's word about one conversation.

    Raises:
        UnknownConversation: there is no such group.
    """
    with transaction(db):
        changed = db.execute(
            "UPDATE topic SET override = ? WHERE topic = ?", (override.value, group_topic(group_id))
        ).rowcount
        if not changed:
            raise UnknownConversation


def get_group(db: sqlite3.Connection, group_id: bytes) -> Group | None:
    """The group, or None when nothing is recorded of it."""
    row = db.execute(
        "SELECT kind, member, consent, override FROM topic WHERE topic = ? AND kind <> ?",
        (group_topic(group_id), WELCOME_KIND),
    ).fetchone()
    if row is None:
        return None
    kind, member, consent, override = row
    return Group(group_id, GroupKind(kind), bool(member), Consent(consent), Override(override))


def root_key(db: sqlite3.Connection) -> bytes:
    """The inbox's root key. An installation that needs one before device sync brought it makes its own."""
    (key,) = db.execute("SELECT root_key FROM settings").fetchone()
    if key is None:
        key = os.urandom(ROOT_KEY_BYTES)
        put_root_key(db, key)
    return bytes(key)


def put_root_key(db: sqlite3.Connection, key: bytes) -> None:
    """Replace the root key.

    Raises:
        ValueError: a root key has 42 bytes.
    """
    if len(key) != ROOT_KEY_BYTES:
        raise ValueError(f"a root key has {ROOT_KEY_BYTES} bytes")
    with transaction(db):
        db.execute("UPDATE settings SET root_key = ?", (key,))
