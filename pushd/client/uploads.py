"""The uploaded set, and its difference to the wanted topics (PUSH-082, PUSH-084, PUSH-085, PUSH-086).

The difference is two anti-joins in SQL, each a walk over one table with a keyed look-up in the other: 90 ms in all for
100,000 groups and nothing to do, 0.1 ms for a hundred. Loading both tables and subtracting in Python takes 230 ms and
holds 100,000 rows twice, on every wake.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable

from attrs import field, frozen

from pushd.client.database import WELCOME_KIND
from pushd.client.decisions import BATCH_TOPICS, Limit
from pushd.client.values import GroupKind, NotificationConfig
from pushd.core.hmac_keys import epoch_at, root_key_fingerprint

# An override beats the rules, sync groups know none, and whoever left a group wants nothing of it (PUSH-084).
_WANTED = f"""t.member AND CASE t.kind
    WHEN {WELCOME_KIND:d} THEN :welcomes
    WHEN {GroupKind.SYNC:d} THEN :sync_groups
    ELSE coalesce(t.override, (:consents >> t.consent) & 1) END"""

# A welcome topic has no keys and no commits; only a repair pass uploads it again.
_OUTDATED = f"""u.stale OR t.kind <> {WELCOME_KIND:d} AND (
    u.include_commits <> :commits
    OR u.root_key_fingerprint IS NOT :fingerprint
    OR u.hmac_epoch_base IS NULL
    OR u.hmac_epoch_base NOT BETWEEN :epoch - 1 AND :epoch + 1)"""

# New topics come first: a repair pass must not keep a conversation waiting (PUSH-092). The sort holds one batch.
ADDS = f"""
SELECT t.topic, t.kind, u.topic IS NULL AS missing
FROM topic t LEFT JOIN uploaded u ON u.topic = t.topic
WHERE {_WANTED}
  AND CASE WHEN u.topic IS NULL THEN :withheld = {Limit.NONE:d}
           ELSE :withheld < {Limit.ALL:d} AND ({_OUTDATED}) END
ORDER BY missing DESC
LIMIT {BATCH_TOPICS}
"""

REMOVES = f"""
SELECT u.topic FROM uploaded u
WHERE NOT EXISTS (SELECT 1 FROM topic t WHERE t.topic = u.topic AND {_WANTED})
LIMIT {BATCH_TOPICS}
"""


@frozen
class Wanted:
    """What the present rules, time and root key ask for."""

    config: NotificationConfig = field(repr=False)
    epoch: int
    fingerprint: bytes = field(repr=False)

    @classmethod
    def at(cls, now_ns: int, config: NotificationConfig, root_key: bytes) -> Wanted:
        return cls(config, epoch_at(now_ns), root_key_fingerprint(root_key))

    def parameters(self, withheld: Limit = Limit.NONE) -> dict[str, object]:
        """The named parameters of the statements above."""
        return {
            **rule_parameters(self.config),
            "commits": self.config.include_commits,
            "fingerprint": self.fingerprint,
            "epoch": self.epoch,
            "withheld": withheld,
        }


@frozen
class Add:
    """One topic to upload; `has_keys` is false for the welcome topic alone."""

    topic: bytes = field(repr=False)
    has_keys: bool
    missing: bool


@frozen
class Difference:
    """One request's worth of changes."""

    adds: tuple[Add, ...] = field(repr=False)
    removes: tuple[bytes, ...] = field(repr=False)

    def __bool__(self) -> bool:
        return bool(self.adds or self.removes)


def rule_parameters(config: NotificationConfig) -> dict[str, object]:
    """The parameters of the wanted-predicate."""
    return {
        "consents": sum(1 << state for state in config.consent_states),
        "welcomes": config.include_welcomes,
        "sync_groups": config.include_sync_groups,
    }


def difference(db: sqlite3.Connection, wanted: Wanted, withheld: Limit) -> Difference:
    """At most 1,000 adds and 1,000 removes, from local tables alone."""
    parameters = wanted.parameters(withheld)
    adds = tuple(
        Add(topic, kind != WELCOME_KIND, bool(missing)) for topic, kind, missing in db.execute(ADDS, parameters)
    )
    return Difference(adds, tuple(topic for (topic,) in db.execute(REMOVES, parameters)))


def confirm(db: sqlite3.Connection, wanted: Wanted, change: Difference) -> None:
    """Record what a successful request has stored: with the epoch, key and flag it was built from, not today's."""
    db.executemany(
        """INSERT INTO uploaded (topic, hmac_epoch_base, root_key_fingerprint, include_commits, stale)
           VALUES (?, ?, ?, ?, 0)
           ON CONFLICT (topic) DO UPDATE SET hmac_epoch_base = excluded.hmac_epoch_base,
             root_key_fingerprint = excluded.root_key_fingerprint,
             include_commits = excluded.include_commits, stale = 0""",
        (
            (add.topic, wanted.epoch - 1, wanted.fingerprint, wanted.config.include_commits)
            if add.has_keys
            else (add.topic, None, None, False)
            for add in change.adds
        ),
    )
    forget(db, change.removes)


def forget(db: sqlite3.Connection, topics: Iterable[bytes]) -> None:
    """Drop topics that the backend no longer holds."""
    db.executemany("DELETE FROM uploaded WHERE topic = ?", ((topic,) for topic in topics))


def clear(db: sqlite3.Connection) -> None:
    """The backend holds nothing of this recipient."""
    db.execute("DELETE FROM uploaded")


def mark_all_stale(db: sqlite3.Connection) -> bool:
    """Begin a repair pass: every row is to be uploaded again, none is forgotten (PUSH-088). False without any row."""
    return db.execute("UPDATE uploaded SET stale = 1").rowcount > 0


def any_stale(db: sqlite3.Connection) -> bool:
    """Whether a repair pass still has rows to upload."""
    return db.execute("SELECT 1 FROM uploaded WHERE stale LIMIT 1").fetchone() is not None


def count(db: sqlite3.Connection) -> int:
    """How many topics the backend should hold."""
    (rows,) = db.execute("SELECT count(*) FROM uploaded").fetchone()
    return int(rows)


def is_wanted(db: sqlite3.Connection, topic: bytes, config: NotificationConfig) -> bool:
    """Whether the rules, or the override, want this topic."""
    statement = f"SELECT 1 FROM topic t WHERE t.topic = :topic AND {_WANTED}"
    return db.execute(statement, {"topic": topic, **rule_parameters(config)}).fetchone() is not None


def wanted_set_fingerprint(db: sqlite3.Connection, config: NotificationConfig) -> bytes:
    """SHA-256 over the wanted topics in order: whether the set has changed since a limit was reached (PUSH-089)."""
    digest = hashlib.sha256()
    for (topic,) in db.execute(
        f"SELECT t.topic FROM topic t WHERE {_WANTED} ORDER BY t.topic", rule_parameters(config)
    ):
        digest.update(topic)
    return digest.digest()
