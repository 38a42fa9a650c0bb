"""Numbered schema changes from `sql/migrations`, applied once each under an advisory lock.

Migrations are additive files once they have landed: the checksum of an applied file is compared at every start.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

from attrs import frozen

from pushd.errors import MigrationError
from pushd.store.database import Connection
from pushd.store.queries import SQL_ROOT

_FILE = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
# Key (0, 4): the domain 0 holds all global locks; 1 to 3 belong to identity, allocation barrier and dispatcher.
_LOCK = "SELECT pg_advisory_xact_lock(0, 4)"
# A replica is waited for up to what is flushed, which the end of a migration has to be. Whoever chose more keeps it.
_FLUSH = """
SELECT set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') = 'off'
"""
_LEDGER = """
CREATE TABLE IF NOT EXISTS pushd_migration (
    number integer PRIMARY KEY,
    name text NOT NULL,
    sha256 bytea NOT NULL CHECK (octet_length(sha256) = 32),
    applied_at timestamptz NOT NULL DEFAULT now()
)
"""


@frozen
class Migration:
    """One file of `sql/migrations`."""

    number: int
    name: str
    text: str
    sha256: bytes


def load_migrations(folder: Path = SQL_ROOT / "migrations") -> list[Migration]:
    """All migrations in order.

    Raises:
        MigrationError: numbers are not 1, 2, 3, … or a file name does not fit.
    """
    migrations = []
    for path in sorted(folder.glob("*.sql")):
        matched = _FILE.fullmatch(path.name)
        if matched is None:
            raise MigrationError(f"migration file {path.name} is not named NNNN_name.sql")
        data = path.read_bytes()
        migrations.append(Migration(int(matched[1]), path.stem, data.decode(), hashlib.sha256(data).digest()))
    if [migration.number for migration in migrations] != list(range(1, len(migrations) + 1)):
        raise MigrationError("migration files are not numbered 0001, 0002, … without gaps")
    return migrations


def pending(migrations: list[Migration], applied: dict[int, bytes]) -> list[Migration]:
    """The migrations still to run on a database that has `applied` (number → SHA-256).

    Raises:
        MigrationError: the database is newer than this program, or an applied file was changed afterwards.
    """
    newest = max(applied, default=0)
    if newest > len(migrations):
        raise MigrationError(
            f"the database schema is newer than this program (database {newest}, program {len(migrations)}): "
            "start a newer pushd"
        )
    for migration in migrations:
        if migration.number in applied and applied[migration.number] != migration.sha256:
            raise MigrationError(f"migration {migration.name} was changed after it had been applied")
    return [migration for migration in migrations if migration.number not in applied]


async def check_schema(connection: Connection) -> None:
    """Change nothing, and raise MigrationError unless the database has exactly this program's schema."""
    if await connection.fetch_one("SELECT to_regclass('pushd_migration') IS NULL") == (True,):
        raise MigrationError("the database has no pushd schema yet: run `pushd migrate`")
    rows = await connection.fetch("SELECT number, sha256 FROM pushd_migration")
    if pending(load_migrations(), {number: bytes(sha256) for number, sha256 in rows}):
        raise MigrationError("the database's schema is older than this program: run `pushd migrate`")


async def apply_migrations(connection: Connection) -> list[str]:
    """Bring the database up to date and return the names of what was applied now.

    One transaction: a failure leaves the schema as it was. Two starting instances wait for each other. From here on the
    session waits for statements as long as the server does.

    Raises:
        MigrationError: see `pending`.
        StoreError: the database refused.
    """
    migrations = load_migrations()
    async with connection.transaction():
        connection.raw.patience_s = math.inf
        await connection.execute("SET LOCAL statement_timeout = 0")
        await connection.execute(_FLUSH)
        await connection.execute(_LOCK)
        await connection.execute(_LEDGER)
        rows = await connection.fetch("SELECT number, sha256 FROM pushd_migration")
        todo = pending(migrations, {number: bytes(sha256) for number, sha256 in rows})
        for migration in todo:
            await connection.execute(migration.text)
            await connection.execute(
                "INSERT INTO pushd_migration (number, name, sha256) VALUES (%s, %s, %s)",
                (migration.number, migration.name, migration.sha256),
            )
    return [migration.name for migration in todo]
