"""`pushd check-config`: what is wrong or doubtful in a configuration, without a connection to anything (see `online`).

Errors are what stops `pushd serve`, found by the same code, and files that cannot be used. Warnings are settings that
start and then disappoint; each is a mistake operators of push servers have really made. Notes say what else the
environment must provide.
"""

from __future__ import annotations

import json as json_text
import math
import os
import ssl
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from attrs import asdict, frozen

from pushd.config.finding import Finding, Severity
from pushd.config.keys import Apns, Config
from pushd.config.load import Examined, examine, load_config
from pushd.config.printed import schema_text
from pushd.core.certificate import Trouble, server_validity
from pushd.model import ATTEMPT_S

# A phone that is at home gives an app background time about once a day, and a client renews when a quarter of the
# lifetime is over: with less than four days a device in daily use can lose its registration.
SHORTEST_CALM_TTL_S = 4 * 86_400
# One connection each for the boundary task, the stream tailer and the dispatcher's loader; calls need one too.
SMALLEST_CALM_POOL = 4
DEFAULT_SERVER_CONNECTIONS = 100  # max_connections of an untouched PostgreSQL
DEFAULT_LOCKS_PER_TRANSACTION = 64
APPLE_ID_CHARACTERS = 10
# Second-level names under which strangers register, where the first level is a country.
_REGISTRIES = frozenset({"ac", "co", "com", "edu", "gov", "net", "or", "org"})


@frozen
class _Advice:
    severity: Severity
    key: str
    what: str
    mend: str


def run_check_config(
    path: Path | None, *, json: bool = False, online: Callable[[Config], list[Finding]] | None = None
) -> int:
    """Print the findings on `path` (else PUSHD_CONFIG, else the defaults); the exit code is 1 if one is an error.

    `online` finds out more once the configuration itself is right.
    """
    findings = check_config(path, os.environ)
    if online is not None and not any(finding.severity is Severity.ERROR for finding in findings):
        findings += online(load_config(path, os.environ))
    print(as_json(findings) if json else as_text(findings))
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def print_schema() -> None:
    """Print the JSON schema of the configuration file."""
    sys.stdout.write(schema_text())


def as_text(findings: list[Finding]) -> str:
    """One line for each finding: severity, where, key, what, how to mend."""
    lines = (f"{finding.severity}: {finding} (to mend: {finding.mend})" for finding in findings)
    return "\n".join(lines) or "nothing to mend"


def as_json(findings: list[Finding]) -> str:
    """A JSON array with one object for each finding."""
    return json_text.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)


def check_config(path: Path | None, environ: Mapping[str, str]) -> list[Finding]:
    """Everything to be said about the configuration, the worst first. Reads the files it names, connects to nothing."""
    examined = examine(path, environ)
    findings = list(examined.findings)
    if examined.config is not None:
        advices = [*_unusable_files(examined.config), *_open_files(examined), *advice(examined.config)]
        findings += (
            Finding(item.severity, item.key, examined.where(item.key), item.what, item.mend) for item in advices
        )
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def advice(config: Config) -> Iterator[_Advice]:
    """What is doubtful in a configuration that would start."""
    yield from _server_advice(config)
    yield from _database_advice(config)
    yield from _push_advice(config)


def _server_advice(config: Config) -> Iterator[_Advice]:
    server, push = config.server, config.push
    shortest_ms = int(ATTEMPT_S * 1_000) + 1_000
    if server.max_drain_duration_ms < shortest_ms:
        yield _warning(
            "server.max_drain_duration_ms",
            f"is shorter than one attempt at a provider ({ATTEMPT_S:.0f} s) and a second: a stop repeats pushes",
            f"at least {shortest_ms}, and a longer grace period in what supervises pushd",
        )
    metrics = config.telemetry.metrics_listen
    if metrics is not None and not metrics.is_loopback:
        yield _warning(
            "telemetry.metrics_listen",
            "is open to other machines, and has neither TLS nor authentication",
            "let only Prometheus and operators reach it, by a firewall or network policy, or listen on 127.0.0.1",
        )
    if server.listen.is_loopback:
        return
    if config.auth is None:
        yield _warning(
            "server.listen", "is open to other machines while there is no [auth]: anyone may publish", "add [auth]"
        )
    if push.http is not None and push.http.allow_private_addresses:
        yield _warning(
            "push.http.allow_private_addresses",
            "lets clients from other machines direct requests into this network",
            "set it to false, or listen on 127.0.0.1",
        )


def _database_advice(config: Config) -> Iterator[_Advice]:
    database = config.database
    if database.max_connections < SMALLEST_CALM_POOL:
        yield _warning(
            "database.max_connections",
            "leaves calls waiting behind the boundary task, the streams and the dispatcher",
            f"at least {SMALLEST_CALM_POOL}",
        )
    locks = database.max_connections * config.limits.max_publish_topics
    needed = math.ceil(locks / DEFAULT_SERVER_CONNECTIONS)
    if database.url is not None and needed > DEFAULT_LOCKS_PER_TRANSACTION:
        yield _Advice(
            Severity.NOTE,
            "database.max_connections",
            f"lets one instance hold {locks} locks at once, a topic of a publish being one",
            f"give PostgreSQL max_locks_per_transaction = {needed} if its max_connections is "
            f"{DEFAULT_SERVER_CONNECTIONS}, and as much again for every further instance",
        )


def _push_advice(config: Config) -> Iterator[_Advice]:
    push = config.push
    if push.recipient_ttl_seconds < SHORTEST_CALM_TTL_S:
        yield _warning(
            "push.recipient_ttl_seconds",
            "is under four days: a device renews about daily at best and would lose its registration",
            f"at least {SHORTEST_CALM_TTL_S}",
        )
    if push.apns is not None:
        yield from _apns_advice(push.apns)
    for name, channel in (("apns", push.apns), ("fcm", push.fcm)):
        if channel is not None and channel.endpoint is not None:
            yield _warning(f"push.{name}.endpoint", "sends to a fake provider: no device is reached", "remove it")
    for entry in push.http.allowed_domains if push.http is not None else ():
        if is_public_suffix_pattern(entry):
            yield _warning(
                "push.http.allowed_domains",
                "holds a wildcard right under a public suffix, which is nearly every host there",
                "name the domains that are yours, like *.example.com",
            )
    if push.apns is None and push.fcm is None and push.http is None:
        yield _Advice(
            Severity.NOTE,
            "push",
            "has no channel: every registration is refused",
            "add [push.apns], [push.fcm] or [push.http] to send",
        )


def _apns_advice(apns: Apns) -> Iterator[_Advice]:
    for name, value in (("key_id", apns.key_id), ("team_id", apns.team_id)):
        if len(value) != APPLE_ID_CHARACTERS or not value.isalnum():
            yield _warning(
                f"push.apns.{name}",
                f"is not {APPLE_ID_CHARACTERS} letters and digits, as Apple's are",
                "copy it from Apple's developer site; key_id is the … of AuthKey_….p8",
            )
    if apns.key_id == apns.team_id:
        yield _warning("push.apns.team_id", "is the same as push.apns.key_id", "copy it from Apple's membership page")


def is_public_suffix_pattern(entry: str) -> bool:
    """Whether an allowed_domains entry is `*.com`, `*.co.uk` or the like. Judged by shape, without the full list."""
    if not entry.startswith("*."):
        return False
    labels = entry[2:].lower().split(".")
    return len(labels) == 1 or (len(labels) == 2 and labels[0] in _REGISTRIES and len(labels[1]) == 2)


def _unusable_files(config: Config) -> Iterator[_Advice]:
    server, push = config.server, config.push
    if server.tls_cert is not None and server.tls_key is not None:
        yield from _unusable_pair(server.tls_cert, server.tls_key)
    for name, channel in (("apns", push.apns), ("fcm", push.fcm), ("http", push.http)):
        file = None if channel is None else channel.ca_file
        if file is None:
            continue
        trouble = _unreadable(file)
        if trouble is None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
            except (ssl.SSLError, OSError):
                trouble = "names a file without a PEM certificate"
        if trouble is not None:
            yield _error(f"push.{name}.ca_file", trouble, "give a PEM file that pushd may read")


def _unusable_pair(cert: Path, key: Path) -> Iterator[_Advice]:
    troubles = {name: _unreadable(file) for name, file in (("server.tls_cert", cert), ("server.tls_key", key))}
    for name, trouble in troubles.items():
        if trouble is not None:
            yield _error(name, trouble, "give a PEM file that pushd may read")
    if any(troubles.values()):
        return
    try:
        # The empty password keeps OpenSSL from asking for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError):
        yield _error(
            "server.tls_key",
            "and server.tls_cert are no certificate and its unencrypted key",
            "give the PEM chain, the server's own certificate first, and the key it was made for",
        )
        return
    yield from _certificate_advice(cert)


def _certificate_advice(cert: Path) -> Iterator[_Advice]:
    validity = server_validity(cert.read_bytes())
    trouble = None if validity is None else validity.trouble(datetime.now(UTC))
    if validity is None or trouble is None:
        return
    what, severity = {
        Trouble.EXPIRED: (f"names a certificate that ended on {validity.ends:%Y-%m-%d}", Severity.ERROR),
        Trouble.NOT_YET_VALID: (f"names a certificate that begins on {validity.begins:%Y-%m-%d}", Severity.ERROR),
        Trouble.EXPIRES_SOON: (f"names a certificate that ends on {validity.ends:%Y-%m-%d}", Severity.WARNING),
    }[trouble]
    mend = "put a valid one in its place, or set the clock right; pushd reads it only at a restart"
    yield _Advice(severity, "server.tls_cert", what, mend)


def _unreadable(file: Path) -> str | None:
    try:
        file.read_bytes()
    except OSError as exc:
        return f"names a file that cannot be read: {exc.strerror}"
    return None


def _open_files(examined: Examined) -> Iterator[_Advice]:
    """Files with secrets in them that other users of the machine may read."""
    assert examined.config is not None
    key = examined.config.server.tls_key
    if key is not None and _others_may_read(key):
        yield _warning("server.tls_key", "names a file other users may read", "chmod 600, owned by pushd's user")
    if examined.file is not None and examined.literal and _others_may_read(examined.file):
        # Where a key set is fetched is kept out of logs, but knowing it opens nothing.
        for secret in sorted(examined.literal - {"auth.jwks_url"}):
            yield _warning(
                secret,
                "stands in a file other users may read",
                "write env:NAME and keep the value in the environment, or chmod 600 the file",
            )


def _others_may_read(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def _error(key: str, what: str, mend: str) -> _Advice:
    return _Advice(Severity.ERROR, key, what, mend)


def _warning(key: str, what: str, mend: str) -> _Advice:
    return _Advice(Severity.WARNING, key, what, mend)
