"""The installation's local file: one SQLite database in WAL mode, written and read synchronously.

The calls block the event loop on purpose. A commit takes 0.3 ms with `synchronous=FULL` on the machine this was
measured on, a keyed read 5 µs; handing them to a thread costs more than most of them take, and would put an await, and
with it a cancellation, between a change and its commit. The one slow statement, the difference of 100,000 groups, is
discussed in `uploads`.

One process opens a file at a time: SQLite would allow more, the task runner does not.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pushd.client.errors import UnusableFile
from pushd.core.topics import KEY_BYTES, topic_of
from pushd.model import TopicKind

_VERSION = 1

# `topic` holds the groups and, as one more row, the installation's welcome topic: whatever can be subscribed is then
# one table, and the difference to `uploaded` needs no special case. Keyed by topic, not by group id, because both sides
# of an anti-join want the same key and SQLite's `||` turns blobs into text.
_SCHEMA = """
CREATE TABLE settings (
  singleton INTEGER PRIMARY KEY CHECK (singleton = 1),
  installation_key BLOB NOT NULL CHECK (length(installation_key) = 32),
  root_key BLOB CHECK (length(root_key) = 42),
  recipient_id BLOB CHECK (length(recipient_id) = 32),
  recipient_secret BLOB CHECK (length(recipient_secret) = 32),
  state INTEGER NOT NULL DEFAULT 0 CHECK (state IN (0, 1, 2)),
  failure INTEGER,
  config TEXT,
  generation INTEGER NOT NULL DEFAULT 0,
  registration_owed INTEGER NOT NULL DEFAULT 0,
  renewal_ns INTEGER,
  topic_count INTEGER,
  channel INTEGER,
  expires_at_ns INTEGER,
  repairing INTEGER NOT NULL DEFAULT 0,
  known_excess INTEGER DEFAULT 0,
  withheld INTEGER NOT NULL DEFAULT 0 CHECK (withheld IN (0, 1, 2)),
  withheld_set BLOB
);
CREATE TABLE topic (
  topic BLOB PRIMARY KEY,
  kind INTEGER NOT NULL CHECK (kind IN (1, 2, 3, 4)),
  member INTEGER NOT NULL,
  consent INTEGER NOT NULL DEFAULT 1 CHECK (consent IN (1, 2, 3)),
  override INTEGER CHECK (override IN (0, 1))
) WITHOUT ROWID;
CREATE TABLE uploaded (
  topic BLOB PRIMARY KEY,
  hmac_epoch_base INTEGER,
  root_key_fingerprint BLOB,
  include_commits INTEGER NOT NULL,
  stale INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX uploaded_stale ON uploaded (topic) WHERE stale;
CREATE TABLE task (
  id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  payload BLOB NOT NULL,
  due_ns INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  expires_ns INTEGER,
  revision INTEGER NOT NULL DEFAULT 0,
  UNIQUE (kind, payload)
);
CREATE INDEX task_due ON task (due_ns, id);
"""

WELCOME_KIND = 4  # `topic.kind` of the one row that is not a group; groups have the numbers of GroupKind


@contextlib.contextmanager
def open_database(path: Path, installation_key: bytes) -> Iterator[sqlite3.Connection]:
    """Open the file, making it readable by its owner alone when it is new.

    Args:
        path: where the file is or shall be; SQLite keeps two companions beside it.
        installation_key: the installation's public key, 32 bytes; names the welcome topic.

    Raises:
        UnusableFile: it belongs to another installation or to a newer version of this program.
    """
    welcome = topic_of(TopicKind.WELCOME, installation_key)
    if welcome is None:
        raise UnusableFile(f"an installation key has {KEY_BYTES} bytes")
    # SQLite gives the companions the mode of the file, so the secret is never readable by others.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        # A consent change that was confirmed to the user has to survive a power cut, too.
        db.execute("PRAGMA synchronous = FULL")
        with transaction(db):
            _prepare(db, installation_key, welcome)
        yield db


def _prepare(db: sqlite3.Connection, installation_key: bytes, welcome: bytes) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > _VERSION:
        raise UnusableFile("the local file was written by a newer version")
    if version == 0:
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute("INSERT INTO settings (singleton, installation_key) VALUES (1, ?)", (installation_key,))
        db.execute("INSERT INTO topic (topic, kind, member) VALUES (?, ?, 1)", (welcome, WELCOME_KIND))
        db.execute(f"PRAGMA user_version = {_VERSION}")
    (stored,) = db.execute("SELECT installation_key FROM settings").fetchone()
    if stored != installation_key:
        raise UnusableFile("the local file belongs to another installation")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: committed at the end of the block, undone when it raises. Blocks do not nest."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # on a full disk SQLite has undone it already
            db.execute("ROLLBACK")
        raise
