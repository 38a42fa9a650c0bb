"""What must hold between keys, and of the credentials, before a start is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from attrs import frozen

from pushd.config.keys import Auth, Config
from pushd.config.positions import KeyPath
from pushd.config.values import Address
from pushd.core.credentials import (
    APNS_KEY_ERROR,
    SERVICE_ACCOUNT_ERROR,
    Fault,
    inspect_apns_key,
    inspect_public_key,
    inspect_service_account,
)
from pushd.core.outbound import CONTROL_BYTES, TARGET_BYTES

FIRST_STRICT_H2 = (4, 3)
ENVELOPE_OVERHEAD_BYTES = 256
"""Metadata an envelope gains on its way out; kept free in a response."""
MAX_EMBEDDED_LOCKS = 2_000_000
"""A slot of PostgreSQL's lock table takes about 270 bytes of shared memory, so this is half a gigabyte."""


@frozen
class Broken:
    """A rule that does not hold: the keys it is about (the first is named), what is wrong, and the way out."""

    keys: tuple[str, ...]
    what: str
    mend: str

    @property
    def paths(self) -> tuple[KeyPath, ...]:
        """The keys as paths."""
        return tuple(tuple(int(part) if part.isdecimal() else part for part in key.split(".")) for key in self.keys)


def broken_rules(config: Config, h2_version: str) -> Iterator[Broken]:
    """Every rule `config` breaks."""
    yield from _server(config, h2_version)
    yield from _database(config)
    yield from _limits(config)
    if config.auth is not None:
        yield from _auth(config.auth)
    yield from _push(config)


def exposure_fault(
    listen: Address, *, tls: bool, allow_cleartext: bool, allow_old_h2: bool, h2_version: str
) -> tuple[str, str] | None:
    """Why `listen` must not be served, as the key at fault and a text, or None.

    A loopback address may always be served. Elsewhere requests carry bearer tokens and recipient secrets, and h2
    before 4.3 does not refuse the header tricks that request smuggling is made of.
    """
    if listen.is_loopback:
        return None
    if not tls and not allow_cleartext:
        return "server.allow_cleartext", "must be true to serve on a non-loopback address without TLS"
    if not h2_is_strict(h2_version) and not allow_old_h2:
        return "server.allow_old_h2", "must be true to serve on a non-loopback address with an h2 library before 4.3"
    return None


def h2_is_strict(version: str) -> bool:
    """Whether this version of h2 is 4.3 or newer."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= FIRST_STRICT_H2


def _server(config: Config, h2_version: str) -> Iterator[Broken]:
    server, metrics = config.server, config.telemetry.metrics_listen
    if (server.tls_cert is None) != (server.tls_key is None):
        missing, given = ("tls_key", "tls_cert") if server.tls_key is None else ("tls_cert", "tls_key")
        yield Broken((f"server.{missing}", f"server.{given}"), f"is required with server.{given}", "give both or none")
    fault = exposure_fault(
        server.listen,
        tls=server.tls_cert is not None,
        allow_cleartext=server.allow_cleartext,
        allow_old_h2=server.allow_old_h2,
        h2_version=h2_version,
    )
    if fault is not None:
        key, what = fault
        mend = {
            "server.allow_cleartext": "set server.tls_cert and server.tls_key, or listen on 127.0.0.1",
            "server.allow_old_h2": "install h2 4.3 or newer, or listen on 127.0.0.1",
        }[key]
        yield Broken((key, "server.listen", "server.tls_cert", "server.tls_key"), what, mend)
    if metrics is not None and metrics.collides(server.listen):
        yield Broken(
            ("telemetry.metrics_listen", "server.listen"), "takes the port of server.listen", "choose another port"
        )
    if server.max_connection_receive_bytes > server.max_receive_bytes:
        yield _at_most("server.max_connection_receive_bytes", "server.max_receive_bytes")
    if config.limits.max_request_bytes > server.max_connection_receive_bytes:
        yield _at_most("limits.max_request_bytes", "server.max_connection_receive_bytes")


def _database(config: Config) -> Iterator[Broken]:
    database = config.database
    if database.replica_url is not None and database.url is None:
        yield Broken(
            ("database.replica_url", "database.url"), "needs database.url", "name the primary of this replica too"
        )
    if database.url is None and database.max_connections * config.limits.max_publish_topics > MAX_EMBEDDED_LOCKS:
        yield Broken(
            ("database.max_connections", "limits.max_publish_topics", "database.url"),
            f"times limits.max_publish_topics is more than {MAX_EMBEDDED_LOCKS}, the locks an embedded database holds",
            "lower one of them, or use a PostgreSQL of your own with database.url",
        )
    if config.publishing.max_publish_duration_ms <= database.max_statement_timeout_ms:
        yield _more_than("publishing.max_publish_duration_ms", "database.max_statement_timeout_ms")
    if config.streams.max_pong_wait_ms <= config.streams.keepalive_interval_ms:
        yield _more_than("streams.max_pong_wait_ms", "streams.keepalive_interval_ms")


def _limits(config: Config) -> Iterator[Broken]:
    limits = config.limits
    if limits.default_query_limit > limits.max_query_limit:
        yield _at_most("limits.default_query_limit", "limits.max_query_limit")
    if limits.max_update_adds > limits.max_stream_topics:
        yield _at_most("limits.max_update_adds", "limits.max_stream_topics")
    if limits.max_envelope_bytes + ENVELOPE_OVERHEAD_BYTES > limits.max_response_bytes:
        yield Broken(
            ("limits.max_envelope_bytes", "limits.max_response_bytes"),
            f"plus {ENVELOPE_OVERHEAD_BYTES} must be at most limits.max_response_bytes",
            "raise limits.max_response_bytes or lower limits.max_envelope_bytes",
        )
    # What has a limit of its own must fit into one response, or a caller within that limit is refused every time. Pages
    # of a query are cut to fit, but metadata that takes all the room would leave one envelope on each.
    for key, most, each, more in (
        ("limits.max_update_adds", limits.max_update_adds, TARGET_BYTES, CONTROL_BYTES),
        ("limits.max_static_topics", limits.max_static_topics, TARGET_BYTES, CONTROL_BYTES),
        ("limits.max_query_limit", limits.max_query_limit, ENVELOPE_OVERHEAD_BYTES, ENVELOPE_OVERHEAD_BYTES),
    ):
        if most * each + more > limits.max_response_bytes:
            yield Broken(
                (key, "limits.max_response_bytes"),
                f"times {each}, plus {more}, must be at most limits.max_response_bytes",
                f"raise limits.max_response_bytes or lower {key}",
            )


def _auth(auth: Auth) -> Iterator[Broken]:
    if (auth.jwks_url is None) == (auth.keys is None):
        yield Broken(
            ("auth", "auth.jwks_url", "auth.keys"),
            "needs exactly one of auth.jwks_url and auth.keys",
            "say where the keys of tokens come from, or remove [auth] to serve without authentication",
        )
    refresh = auth.jwks_refresh_seconds
    shortest = refresh + math.ceil(refresh / 10) + 10  # the pause with its jitter, and the 10 s of one fetch
    if auth.jwks_max_stale_seconds < shortest:
        yield Broken(
            ("auth.jwks_max_stale_seconds", "auth.jwks_refresh_seconds"),
            "must leave room for a refresh: auth.jwks_refresh_seconds, a tenth of it, and 10",
            f"at least {shortest}",
        )
    kids = [key.kid for key in auth.keys or ()]
    for index, key in enumerate(auth.keys or ()):
        if key.kid in kids[:index]:
            both = (f"auth.keys.{index}.kid", f"auth.keys.{kids.index(key.kid)}.kid")
            yield Broken(both, "repeats the kid of another key", "give each key its own kid")
        judged = inspect_public_key(key.public_key, key.alg)
        if isinstance(judged, Fault):
            yield Broken((f"auth.keys.{index}.public_key", f"auth.keys.{index}.alg"), judged.what, judged.mend)


def _push(config: Config) -> Iterator[Broken]:
    apns, fcm = config.push.apns, config.push.fcm
    if apns is not None and isinstance(judged := inspect_apns_key(apns.key.reveal()), Fault):
        yield _credential(APNS_KEY_ERROR, judged)
    if fcm is not None:
        account = inspect_service_account(
            fcm.service_account.reveal(), allow_loopback_token_uri=fcm.endpoint is not None
        )
        if isinstance(account, Fault):
            yield _credential(SERVICE_ACCOUNT_ERROR, account)


def _credential(text: str, fault: Fault) -> Broken:
    key, _, what = text.partition(" ")
    return Broken((key,), what, f"the value {fault.what}; {fault.mend}")


def _at_most(key: str, other: str) -> Broken:
    return Broken((key, other), f"must be at most {other}", f"lower {key} or raise {other}")


def _more_than(key: str, other: str) -> Broken:
    return Broken((key, other), f"must be more than {other}", f"raise {key} or lower {other}")
