"""The local file: who may read it, what it refuses, and that the difference stays cheap."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.client import Consent, GroupKind, NotificationConfig, Override, UnusableFile, fcm, groups, uploads, webhook
from pushd.client import settings as settings_row
from pushd.client.database import open_database, transaction
from pushd.client.decisions import Limit
from pushd.client.uploads import Wanted
from pushd.model import HMAC_EPOCH_NS
from tests.client.rig import CONFIG, INSTALLATION, WELCOME, gid, topic


def test_file_and_its_companions_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    with open_database(tmp_path / "client.db", INSTALLATION) as db:
        groups.put_group(db, gid(1), GroupKind.GROUP, None)
        for path in tmp_path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
        assert len(list(tmp_path.iterdir())) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["client.db"]


def test_file_of_another_installation_is_refused(tmp_path: Path) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION):
        pass
    with pytest.raises(UnusableFile), open_database(tmp_path / "client.db", bytes(32)):
        pass


def test_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(UnusableFile), open_database(tmp_path / "client.db", INSTALLATION):
        pass


def test_installation_key_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableFile), open_database(tmp_path / "client.db", bytes(31)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_transaction_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION) as db:
        with pytest.raises(KeyError), transaction(db):
            db.execute("UPDATE settings SET generation = 7")
            raise KeyError
        assert settings_row.load(db).generation == 0
        assert not db.in_transaction


def test_full_disk_is_named_as_such_and_leaves_the_file_usable(tmp_path: Path) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION) as db:
        db.execute("PRAGMA max_page_count = 1")  # as many as there are already
        with pytest.raises(sqlite3.OperationalError, match="full") as caught, transaction(db):
            db.executemany(
                "INSERT INTO topic (topic, kind, member) VALUES (?, 1, 1)", ((topic(n),) for n in range(999))
            )
        assert caught.value.__context__ is None
        db.execute("PRAGMA max_page_count = 1000000")
        with transaction(db):
            db.execute("UPDATE settings SET generation = 7")
        assert settings_row.load(db).generation == 7


@given(
    st.builds(
        NotificationConfig,
        st.builds(fcm, st.text(min_size=1)) | st.builds(webhook, st.text(min_size=1), st.binary(max_size=64)),
        st.frozensets(st.sampled_from(Consent)),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )
)
def test_configuration_survives_the_file(config: NotificationConfig) -> None:
    assert settings_row.decode_config(settings_row.encode_config(config)) == config


def test_first_root_key_is_made_here_and_kept(tmp_path: Path) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION) as db:
        key = groups.root_key(db)
        assert len(key) == 42
        assert groups.root_key(db) == key
        with pytest.raises(ValueError, match="42"):
            groups.put_root_key(db, bytes(32))


@pytest.mark.parametrize("length", [0, 15, 17])
def test_group_id_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION) as db, pytest.raises(ValueError, match="16 bytes"):
        groups.put_consent(db, bytes(length), Consent.ALLOWED)


def test_leaving_and_returning_keeps_consent_and_override(tmp_path: Path) -> None:
    with open_database(tmp_path / "client.db", INSTALLATION) as db:
        groups.put_group(db, gid(1), GroupKind.DM, Consent.ALLOWED)
        groups.put_override(db, gid(1), Override.DISABLED)
        groups.end_membership(db, gid(1))
        groups.put_group(db, gid(1), GroupKind.DM, None)
        assert groups.get_group(db, gid(1)) == groups.Group(
            gid(1), GroupKind.DM, True, Consent.ALLOWED, Override.DISABLED
        )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 100,000 groups, all of them uploaded."""
    path = tmp_path_factory.mktemp("large") / "client.db"
    with open_database(path, INSTALLATION) as db, transaction(db):
        db.executemany(
            "INSERT INTO topic (topic, kind, member, consent) VALUES (?, 1, 1, 2)",
            ((topic(n),) for n in range(100_000)),
        )
        db.execute("UPDATE settings SET root_key = zeroblob(42)")
        wanted = Wanted.at(660 * HMAC_EPOCH_NS, CONFIG, bytes(42))
        change = uploads.Difference(
            (*(uploads.Add(topic(n), True, True) for n in range(100_000)), uploads.Add(WELCOME, False, True)), ()
        )
        uploads.confirm(db, wanted, change)
    return path


def plan(db: sqlite3.Connection, statement: str, wanted: Wanted) -> list[str]:
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}", wanted.parameters())]


def test_difference_of_a_large_file_is_two_indexed_anti_joins(large: Path) -> None:
    with open_database(large, INSTALLATION) as db:
        wanted = Wanted.at(660 * HMAC_EPOCH_NS, CONFIG, bytes(42))
        adds = plan(db, uploads.ADDS, wanted)
        removes = plan(db, uploads.REMOVES, wanted)
        # One walk each, every look-up by primary key; the sort of adds only ever holds one batch.
        assert [line for line in adds if line.startswith("SCAN")] == ["SCAN t"]
        assert [line for line in adds if line.startswith("SEARCH")] == [
            "SEARCH u USING PRIMARY KEY (topic=?) LEFT-JOIN"
        ]
        assert [line for line in removes if line.startswith("SCAN")] == ["SCAN u"]
        assert [line for line in removes if line.startswith("SEARCH")] == ["SEARCH t USING PRIMARY KEY (topic=?)"]

        statements: list[str] = []
        db.set_trace_callback(statements.append)
        assert not uploads.difference(db, wanted, Limit.NONE)
        assert len(statements) == 2


def test_stale_mark_is_looked_up_without_a_walk(large: Path) -> None:
    with open_database(large, INSTALLATION) as db:
        lines = [row[3] for row in db.execute("EXPLAIN QUERY PLAN SELECT 1 FROM uploaded WHERE stale LIMIT 1")]
        assert lines == ["SCAN uploaded USING INDEX uploaded_stale"]  # a partial index: it holds stale rows alone


def test_batches_of_a_large_file_hold_a_thousand(large: Path, tmp_path: Path) -> None:
    copy = tmp_path / "client.db"
    copy.write_bytes(large.read_bytes())
    with open_database(copy, INSTALLATION) as db:
        later = Wanted.at(662 * HMAC_EPOCH_NS, CONFIG, bytes(42))
        with transaction(db):
            db.execute("DELETE FROM uploaded WHERE topic < ?", (topic(10),))
            db.execute("UPDATE topic SET member = 0 WHERE topic > ?", (topic(50_000),))
        change = uploads.difference(db, later, Limit.NONE)
        assert (len(change.adds), len(change.removes)) == (1_000, 1_000)
        # New topics before those that merely need other keys.
        assert {add.topic for add in change.adds[:10]} == {topic(n) for n in range(10)}
        assert [add.missing for add in change.adds] == [True] * 10 + [False] * 990
        assert not any(add.missing for add in uploads.difference(db, later, Limit.GROWTH).adds)
        assert uploads.difference(db, later, Limit.ALL).adds == ()
