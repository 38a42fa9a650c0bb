"""`pushd check-config --online`: ask database, issuer and providers what the file alone cannot tell.

Nothing is changed anywhere: no migration is run, and the providers are asked about tokens that belong to no device.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import assert_never

import trio
from attrs import frozen

from pushd.backend.key_set import http_fetch
from pushd.channels.resolver import Resolver, ThreadResolver
from pushd.channels.setup import Sender, open_channels
from pushd.config import Config, Finding, InvalidConfig, Severity, check_clock
from pushd.core.addresses import is_blocked
from pushd.core.providers import apns, fcm
from pushd.core.tokens import read_key_set
from pushd.errors import ConfigError, MigrationError, StartError, StoreError
from pushd.model import (
    Channel,
    Delivered,
    Delivery,
    DeliveryConfig,
    Gone,
    Mismatch,
    Outcome,
    Rejected,
    Terminal,
    Transient,
)
from pushd.store.database import Connection, Database, DatabaseSettings, Refusal, open_database
from pushd.store.migrations import check_schema
from pushd.store.queries import query
from pushd.store.startup import ENCODING, MINIMUM_VERSION
from pushd.telemetry import Metrics

CLOCK_SKEW_S = 1.0
SESSIONS_BESIDE_POOL = 4  # dispatcher lock, pages, tailer, one for a person
NO_DEVICE = {Channel.APNS: "0" * 64, Channel.FCM: "no-device"}


@frozen
class ServerFacts:
    """What one PostgreSQL says about itself."""

    version: int
    is_replica: bool
    system_identifier: int
    lock_slots: int
    sessions: int
    skew_s: float
    may_create: bool
    has_schema: bool
    may_write: bool
    encoding: str
    now_ns: int


async def check_online(config: Config) -> list[Finding]:
    """Findings about what the configuration points at, the worst first."""
    findings = [
        *await _check_database(config),
        *await _check_key_set(config),
        *await _check_providers(config),
        *await _check_names(config),
    ]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _finding(severity: Severity, key: str, what: str, mend: str) -> Finding:
    return Finding(severity, key, "online", what, mend)


async def _check_database(config: Config) -> list[Finding]:
    if config.database.url is None:
        return [
            _finding(
                Severity.NOTE,
                "database.url",
                "is not set: serve starts its own PostgreSQL",
                "nothing, if that is meant",
            )
        ]
    replica = config.database.replica_url
    settings = DatabaseSettings(
        config.database.url.reveal(), replica.reveal() if replica else None, max_connections=2, acquire_s=10
    )
    findings: list[Finding] = []
    async with open_database(settings, Metrics()) as database:
        primary = None
        async with _asked(database, "database.url", findings):
            async with database.dedicated("check") as connection:
                primary = await _server_facts(connection)
                findings += judge_primary(primary, config)
                findings += await _check_migrations(connection, primary)
            if await _shares_sessions(database):
                findings.append(
                    _finding(
                        Severity.ERROR,
                        "database.url",
                        "goes through a pooler that gives each transaction another session: the dispatcher lock is "
                        "lost at once",
                        "use session pooling, or connect to PostgreSQL itself",
                    )
                )
        if replica is not None and primary is not None:
            async with _asked(database, "database.replica_url", findings, read=True):
                async with database.dedicated("check", read=True) as connection:
                    findings += judge_replica(await _server_facts(connection), primary)
    return findings


@asynccontextmanager
async def _asked(database: Database, key: str, findings: list[Finding], *, read: bool = False) -> AsyncIterator[None]:
    try:
        yield
    except StoreError as error:
        refusal = Refusal(
            "can be reached, but refuses a simple question", "check the user's rights and the server's log"
        )
        if error.kind == "connection":
            refusal = await database.diagnose(read=read)
        findings.append(_finding(Severity.ERROR, key, refusal.what, refusal.mend))


async def _server_facts(connection: Connection) -> ServerFacts:
    before = time.time_ns()
    row = await connection.fetch_one(query("load_server_facts"))
    assert row is not None
    between = (before + time.time_ns()) / 2
    version, is_replica, system, locks, sessions, now_ns, may_create, has_schema, may_write, encoding = row
    skew_s = (now_ns - between) / 1e9
    return ServerFacts(
        version, is_replica, system, locks, sessions, skew_s, may_create, has_schema, may_write, encoding, now_ns
    )


def judge_primary(facts: ServerFacts, config: Config) -> list[Finding]:
    """What is wrong with the primary for this configuration."""
    findings: list[Finding] = []

    def add(severity: Severity, key: str, what: str, mend: str) -> None:
        findings.append(_finding(severity, key, what, mend))

    if facts.version < MINIMUM_VERSION:
        add(Severity.ERROR, "database.url", f"is PostgreSQL {facts.version}", f"use {MINIMUM_VERSION} or newer")
    if facts.encoding != ENCODING:
        what = f"leads to a database whose encoding is {facts.encoding}"
        add(Severity.ERROR, "database.url", what, f"make a new one with ENCODING '{ENCODING}'")
    if not (facts.may_write if facts.has_schema else facts.may_create):
        add(
            Severity.ERROR,
            "database.url",
            "names a user without the rights pushd needs",
            "let the user own the schema pushd's tables are in",
        )
    elif not facts.may_create:
        add(Severity.WARNING, "database.url", "names a user who cannot migrate", "run pushd migrate as the owner")
    if abs(facts.skew_s) > CLOCK_SKEW_S:
        add(
            Severity.WARNING,
            "database.url",
            f"has a clock {facts.skew_s:+.1f} s away from this machine's",
            "keep both in time by NTP",
        )
    try:
        check_clock(config, facts.now_ns)
    except InvalidConfig as error:
        findings += error.findings
    wanted = config.database.max_connections * config.limits.max_publish_topics
    if facts.lock_slots < wanted:
        add(
            Severity.ERROR,
            "limits.max_publish_topics",
            f"times database.max_connections is {wanted} locks, the server has room for {facts.lock_slots}: large "
            "publishes will fail",
            "raise the server's max_locks_per_transaction, or lower one of the two",
        )
    if facts.sessions < config.database.max_connections + SESSIONS_BESIDE_POOL:
        add(
            Severity.WARNING,
            "database.max_connections",
            f"and {SESSIONS_BESIDE_POOL} more are about all of the {facts.sessions} sessions the server allows",
            "raise the server's max_connections, or lower the pool",
        )
    return findings


def judge_replica(replica: ServerFacts, primary: ServerFacts) -> list[Finding]:
    """Whether the replica is the primary's."""
    key = "database.replica_url"
    if replica.system_identifier != primary.system_identifier:
        what = "is another database cluster than database.url"
        return [_finding(Severity.ERROR, key, what, "name a streaming replica of that primary")]
    if not replica.is_replica:
        return [_finding(Severity.WARNING, key, "is a primary: reads are not spread", "name a replica, or remove it")]
    return []


async def _check_migrations(connection: Connection, facts: ServerFacts) -> list[Finding]:
    try:
        await check_schema(connection)
    except MigrationError as error:
        severity = Severity.ERROR if "newer" in str(error) or "changed" in str(error) else Severity.NOTE
        mend = "start a newer pushd" if severity is Severity.ERROR else "pushd serve does it at its start, if it may"
        return [_finding(severity, "database.url", f"leads to a schema that does not fit: {error}", mend)]
    return []


async def _shares_sessions(database: Database) -> bool:
    """Whether one connection meets different servers in two transactions, as it does behind a transaction pooler.

    Between the two, a second connection opens a transaction and keeps it, which takes the session the first one has
    just given back.
    """
    async with database.dedicated("check") as first, database.dedicated("check") as second:
        before = await _backend(first)
        async with second.transaction():
            await _backend(second)
            return await _backend(first) != before


async def _backend(connection: Connection) -> object:
    async def ask() -> object:
        return await connection.fetch_one("SELECT pg_backend_pid()")

    if connection.in_transaction:
        return await ask()
    async with connection.transaction():
        return await ask()


async def _check_key_set(config: Config) -> list[Finding]:
    """Whether the issuer's key set can be had; `serve` tries more than once."""
    if config.auth is None or config.auth.jwks_url is None:
        return []
    body = await http_fetch(config.auth.jwks_url.reveal())()
    if body is None:
        what, mend = "brought no key set", "check it in full; the answer must have status 200 and come within 10 s"
    elif not read_key_set(body):
        what, mend = "brought no key that pushd can use", "see the algorithms that auth.keys.alg takes"
    else:
        return []
    return [_finding(Severity.ERROR, "auth.jwks_url", what, mend)]


async def _check_providers(config: Config) -> list[Finding]:
    findings: list[Finding] = []
    try:
        async with open_channels(config.push, ThreadResolver()) as senders:
            for channel, token in NO_DEVICE.items():
                if channel in senders:
                    findings.append(judge_answer(channel, await _ask_provider(senders, channel, token)))
    except (ConfigError, StartError) as error:
        key, _, what = str(error).partition(" ")
        findings.append(_finding(Severity.ERROR, key.rstrip(":"), what, "see check-config without --online"))
    return findings


async def _ask_provider(senders: Mapping[Channel, Sender], channel: Channel, token: str) -> Outcome:
    delivery = Delivery(0, bytes(17), bytes(32), DeliveryConfig(channel, token), b"")
    return await senders[channel].attempt(delivery)


_PLACES = {Channel.APNS: ("push.apns", apns.LOOK_AT), Channel.FCM: ("push.fcm.service_account", fcm.LOOK_AT)}
_ABOUT_THE_TOKEN = {"BadDeviceToken", "INVALID_ARGUMENT", "UNREGISTERED", "Unregistered"}


def judge_answer(channel: Channel, outcome: Outcome) -> Finding:
    """What a provider's answer about a token of no device says about the credentials."""
    key, look_at = _PLACES[channel]
    match outcome:
        case Delivered():
            return _finding(Severity.NOTE, key, "was accepted (the provider takes any token)", "nothing")
        case Mismatch(reason) | Terminal(reason) | Rejected(reason) if reason in _ABOUT_THE_TOKEN:
            what = "was accepted: the provider only refused the made-up token"
            return _finding(Severity.NOTE, key, what, "nothing; pushd send-test reaches a real device")
        case Mismatch(reason) | Terminal(reason) | Rejected(reason):
            mend = f"look at {look_at.get(reason, key)}"
            return _finding(Severity.ERROR, key, f"was refused by the provider: {reason}", mend)
        case Transient("credentials", _):
            what = "got no access token: the key was revoked, or this machine's clock is wrong"
            return _finding(Severity.ERROR, key, what, "make a new key, keep the clock in time, check the network")
        case Transient(reason, _):
            what = f"could not be tried: {reason}"
            return _finding(
                Severity.WARNING, key, what, "check that this machine can reach the provider, then try again"
            )
        case Gone(status):
            return _finding(Severity.ERROR, key, f"was answered with status {status}", f"look at {key}")
        case _:
            assert_never(outcome)


async def _check_names(config: Config) -> list[Finding]:
    """Whether the hosts webhooks may go to can be found, and are public."""
    http = config.push.http
    if http is None:
        return []
    names = [entry for entry in http.allowed_domains if not entry.startswith("*.")]
    resolver = ThreadResolver()
    findings = []
    for name in names:
        findings += await _check_name(resolver, name, allow_private=http.allow_private_addresses)
    return findings


async def _check_name(resolver: Resolver, name: str, *, allow_private: bool) -> list[Finding]:
    key = "push.http.allowed_domains"
    addresses: tuple[object, ...] = ()
    with trio.move_on_after(10):
        found = await resolver.resolve(name) or ()
        addresses = found
        if not allow_private and any(map(is_blocked, found)):
            what = "holds a host with a private address, which no webhook may reach"
            return [_finding(Severity.WARNING, key, what, "see push.http.allow_private_addresses")]
    if not addresses:
        return [
            _finding(Severity.WARNING, key, "holds a host that does not resolve here", "check it, and the resolver")
        ]
    return []
