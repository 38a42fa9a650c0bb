"""Fills a database with recipients, subscriptions and envelopes, by plain SQL and without the rest of the program."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psycopg
import trio

from pushd.model import HMAC_EPOCH_NS, Channel

SECRET_HASH = bytes([9]) * 32
SIGNING_KEY = bytes([7]) * 32
NEVER_EXPIRED_NS = 4_000_000_000_000_000_000


def recipient_id(number: int) -> bytes:
    return bytes(24) + number.to_bytes(8, "big")


def topic(number: int) -> bytes:
    """A group topic."""
    return b"\x00" + number.to_bytes(16, "big")


def target(number: int, channel: Channel) -> str:
    return f"https://host{number % 64}.example/{number}" if channel is Channel.HTTP else f"{number:064x}"


def client_envelope(data: bytes) -> bytes:
    """Protobuf bytes of a ClientEnvelope that holds a group message with this data."""
    message = _field(1, data) + b"\x18\x01"  # should_push
    return _field(1, message)


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait, on the real clock, for something that PostgreSQL or another process brings about."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Seed:
    """One autocommit connection and the few inserts every dispatcher test needs."""

    def __init__(self, url: str) -> None:
        self.conn = psycopg.connect(url, autocommit=True)

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, *_: object) -> None:
        self.conn.close()

    def recipients(
        self, numbers: Iterable[int], channel: Channel = Channel.APNS, renewed_ns: int = NEVER_EXPIRED_NS
    ) -> None:
        self._copy(
            "push_recipient (recipient_id, secret_hash, channel, delivery, signing_key, topic_count, renewed_ns)",
            (
                (
                    recipient_id(n),
                    SECRET_HASH,
                    int(channel),
                    target(n, channel),
                    SIGNING_KEY if channel is Channel.HTTP else None,
                    0,
                    renewed_ns,
                )
                for n in numbers
            ),
            ["bytea", "bytea", "int2", "text", "bytea", "int4", "int8"],
        )

    def subscribe(
        self,
        numbers: Iterable[int],
        topic: bytes,
        *,
        since: int = 0,
        commits: bool = False,
        epoch_base: int | None = None,
        keys: Sequence[bytes | None] = (),
    ) -> None:
        slots = (*keys, None, None, None)[:3]
        self._copy(
            "push_subscription (recipient_id, topic, since_sequence_id, hmac_epoch_base, hmac_key_0, hmac_key_1,"
            " hmac_key_2, include_commits)",
            ((recipient_id(n), topic, since, epoch_base, *slots, commits) for n in numbers),
            ["bytea", "bytea", "int8", "int8", "bytea", "bytea", "bytea", "bool"],
        )

    def envelopes(
        self,
        rows: Iterable[tuple[int, bytes]],
        *,
        epoch: int = 10,
        commit: bool = False,
        eligible: bool = True,
        sender_hmac: bytes | None = None,
        payload: bytes = b"payload",
    ) -> None:
        self._copy(
            "envelopes (sequence_id, topic, server_ns, message_hash, is_commit_or_proposal, push_eligible, sender_hmac,"
            " payload)",
            (
                (
                    number,
                    topic,
                    epoch * HMAC_EPOCH_NS,
                    hashlib.sha256(struct.pack(">q", number)).digest(),
                    commit,
                    eligible,
                    sender_hmac,
                    payload,
                )
                for number, topic in rows
            ),
            ["int8", "bytea", "int8", "bytea", "bool", "bool", "bytea", "bytea"],
        )

    def settle(self, boundary: int) -> None:
        """Close the boundary at `boundary`."""
        self.conn.execute("UPDATE allocation_boundary SET closed_sequence_id = %s", (boundary,))

    def cursor(self) -> int:
        return self._one("SELECT sequence_id FROM push_cursor")

    def recipient_count(self) -> int:
        return self._one("SELECT count(*) FROM push_recipient")

    def subscription_count(self) -> int:
        return self._one("SELECT count(*) FROM push_subscription")

    def lock_holders(self) -> list[tuple[int, str]]:
        """Pid and application name of the sessions that hold the dispatcher lock in this database."""
        return self.conn.execute(
            "SELECT a.pid, a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND l.classid = 0 AND l.objid = 3 AND l.objsubid = 2 AND l.granted"
            " AND a.datname = current_database()"
        ).fetchall()

    def _one(self, statement: str) -> int:
        row = self.conn.execute(statement).fetchone()  # type: ignore[call-overload]
        assert row is not None
        return int(row[0])

    def _copy(self, columns: str, rows: Iterable[tuple[Any, ...]], types: list[str]) -> None:
        with self.conn.cursor().copy(f"COPY {columns} FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)
