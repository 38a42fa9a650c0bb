"""`check-config --online` against a real database and fake providers: what is right, and what is wrong and why."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from attrs import evolve
from joserfc.jwk import ECKey
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fakes.launch import RunningFake, launch
from pushd.config import Apns, Auth, Config, Database, Fcm, Finding, Http, Limits, Push, Severity
from pushd.model import Channel, Delivered, Gone, Mismatch, Outcome, Rejected, Terminal, Transient
from pushd.ops.online import ServerFacts, check_online, judge_answer, judge_primary, judge_replica
from pushd.secret import Secret

GOOD = ServerFacts(18, False, 7, 200_000, 100, 0.0, True, True, True, "UTF8", 1_800_000_000 * 10**9)


def _key_set(algorithm: str) -> bytes:
    key = ECKey.generate_key("P-256").as_dict(private=False)
    return json.dumps({"keys": [{**key, "alg": algorithm, "kid": "a"}]}).encode()


def texts(findings: list[Finding], *severities: Severity) -> list[str]:
    return [f"{found.key} {found.what}" for found in findings if found.severity in (severities or tuple(Severity))]


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        ({"version": 15}, Severity.ERROR, "is PostgreSQL 15"),
        ({"encoding": "LATIN1"}, Severity.ERROR, "encoding is LATIN1"),
        ({"may_write": False}, Severity.ERROR, "without the rights"),
        ({"may_create": False, "has_schema": False}, Severity.ERROR, "without the rights"),
        ({"may_create": False}, Severity.WARNING, "cannot migrate"),
        ({"skew_s": 1.5}, Severity.WARNING, "clock +1.5 s"),
        ({"skew_s": -90.0}, Severity.WARNING, "clock -90.0 s"),
        ({"lock_slots": 19_999}, Severity.ERROR, "room for 19999"),
        ({"sessions": 23}, Severity.WARNING, "the 23 sessions"),
    ],
)
def test_primary(change: dict[str, Any], severity: Severity, text: str) -> None:
    (finding,) = judge_primary(evolve(GOOD, **change), Config())
    assert finding.severity is severity
    assert text in f"{finding.key} {finding.what}"


def test_primary_that_fits_is_not_mentioned() -> None:
    assert judge_primary(GOOD, Config()) == []
    assert judge_primary(evolve(GOOD, lock_slots=20_000, sessions=24, skew_s=1.0), Config()) == []


def test_lifetime_beyond_the_database_clock_is_found() -> None:
    (finding,) = judge_primary(GOOD, Config(push=Push(recipient_ttl_seconds=9_223_372_036)))
    assert (finding.severity, finding.key) == (Severity.ERROR, "push.recipient_ttl_seconds")


def test_replica_must_belong_to_the_primary() -> None:
    replica = evolve(GOOD, is_replica=True)
    assert judge_replica(replica, GOOD) == []
    assert judge_replica(evolve(replica, system_identifier=8), GOOD)[0].severity is Severity.ERROR
    assert judge_replica(GOOD, GOOD)[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("channel", "outcome", "severity", "mend"),
    [
        (Channel.APNS, Mismatch("BadDeviceToken"), Severity.NOTE, ""),
        (Channel.APNS, Rejected("InvalidProviderToken"), Severity.ERROR, "push.apns.key_id"),
        (Channel.APNS, Mismatch("DeviceTokenNotForTopic"), Severity.ERROR, "push.apns.bundle_id"),
        (Channel.APNS, Transient("connect", 1.0), Severity.WARNING, "reach the provider"),
        (Channel.FCM, Rejected("INVALID_ARGUMENT"), Severity.NOTE, ""),
        (Channel.FCM, Terminal("UNREGISTERED"), Severity.NOTE, ""),
        (Channel.FCM, Rejected("http_403"), Severity.ERROR, "role"),
        (Channel.FCM, Rejected("http_404"), Severity.ERROR, "project_id"),
        (Channel.FCM, Transient("credentials", 10.0), Severity.ERROR, "new key"),
        (Channel.FCM, Delivered(), Severity.NOTE, ""),
        (Channel.FCM, Gone(410), Severity.ERROR, ""),
    ],
)
def test_provider_answer(channel: Channel, outcome: Outcome, severity: Severity, mend: str) -> None:
    finding = judge_answer(channel, outcome)
    assert finding.severity is severity
    assert mend in finding.mend


def _push(apns: RunningFake, fcm: RunningFake) -> Push:
    return Push(
        apns=Apns(
            key=Secret(Path(apns.facts["key"]).read_text()),
            key_id=apns.facts["key_id"],
            team_id=apns.facts["team_id"],
            bundle_id="org.example.app",
            environment="production",
            endpoint=apns.endpoint,
            ca_file=apns.ca,
        ),
        fcm=Fcm(
            service_account=Secret(Path(fcm.facts["service_account"]).read_text()),
            endpoint=fcm.endpoint,
            ca_file=fcm.ca,
        ),
        http=Http(allowed_domains=("localhost", "nowhere.invalid", "*.example.org")),
    )


async def test_everything_is_asked(database_url: str) -> None:
    with launch("apns") as apns, launch("fcm") as fcm, trio.fail_after(60):
        apns.script("0" * 64, {"status": 400, "reason": "BadDeviceToken"})
        fcm.script("no-device", {"status": 403})
        config = Config(database=Database(url=Secret(database_url)), push=_push(apns, fcm))
        findings = await check_online(config)
    assert texts(findings, Severity.ERROR) == ["push.fcm.service_account was refused by the provider: http_403"]
    assert texts(findings, Severity.WARNING) == [
        "push.http.allowed_domains holds a host with a private address, which no webhook may reach",
        "push.http.allowed_domains holds a host that does not resolve here",
    ]
    assert texts(findings, Severity.NOTE) == ["push.apns was accepted: the provider only refused the made-up token"]


async def test_database_without_schema_or_rights_or_at_all(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute("CREATE DATABASE bare")
        conn.execute("CREATE ROLE weak LOGIN")
    bare = make_conninfo(postgres, dbname="bare")
    findings = await check_online(
        Config(database=Database(url=Secret(bare)), limits=Limits(max_publish_topics=100_000))
    )
    assert any("locks, the server has room for" in text for text in texts(findings, Severity.ERROR))
    assert any("no pushd schema yet" in text for text in texts(findings, Severity.NOTE))
    weak = make_conninfo(postgres, dbname="bare", user="weak")
    findings = await check_online(Config(database=Database(url=Secret(weak))))
    assert any("without the rights" in text for text in texts(findings, Severity.ERROR))
    nowhere = Secret("postgresql://127.0.0.1:1/none")
    findings = await check_online(Config(database=Database(url=nowhere)))
    assert texts(findings, Severity.ERROR) == ["database.url cannot be reached, or does not let pushd in"]
    stranger = Secret(make_conninfo(postgres, user="nobody"))
    findings = await check_online(Config(database=Database(url=stranger)))
    assert texts(findings, Severity.ERROR) == ["database.url cannot be reached, or does not let pushd in"]
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute("ALTER DATABASE bare SET default_transaction_read_only = on")
    findings = await check_online(Config(database=Database(url=Secret(bare))))
    assert texts(findings, Severity.ERROR) == ["database.url accepts no writes"]


async def test_database_in_another_encoding_is_found(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as conn:
        conn.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    findings = await check_online(Config(database=Database(url=Secret(make_conninfo(postgres, dbname="latin")))))
    assert texts(findings, Severity.ERROR) == ["database.url leads to a database whose encoding is LATIN1"]


@pytest.mark.parametrize(
    ("status", "body", "what"),
    [
        (200, _key_set("ES256"), None),
        (200, _key_set("HS256"), "brought no key that pushd can use"),
        (200, b"<html>", "brought no key that pushd can use"),
        (404, _key_set("ES256"), "brought no key set"),
    ],
)
async def test_key_set_of_the_issuer_is_fetched_and_read(status: int, body: bytes, what: str | None) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        await stream.send_all(head.encode() + body)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/private-keys"
        findings = await check_online(Config(auth=Auth(jwks_url=Secret(url))))
        nursery.cancel_scope.cancel()
    assert texts(findings, Severity.ERROR) == ([] if what is None else [f"auth.jwks_url {what}"])
    assert "private-keys" not in "".join(map(repr, findings))


async def test_replica_that_is_none_is_said_to_be(database_url: str) -> None:
    url = Secret(database_url)
    findings = await check_online(Config(database=Database(url=url, replica_url=url)))
    assert texts(findings, Severity.WARNING) == ["database.replica_url is a primary: reads are not spread"]


def _wait_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    pytest.fail("PgBouncer does not listen")


@contextmanager
def pooler(database_url: str, mode: str) -> Iterator[str]:
    """PgBouncer in front of the database."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    if not os.path.exists(program):
        pytest.skip("PgBouncer is not installed here (Debian: pgbouncer)")
    target = conninfo_to_dict(database_url)
    folder = Path(tempfile.mkdtemp(prefix="pushd-bouncer-"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "users").write_text('"pushd" ""\n')
    (folder / "ini").write_text(
        f"[databases]\npooled = host={target['host']} dbname={target['dbname']} user=pushd\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\npool_mode = {mode}\n"
        f"unix_socket_dir =\nlogfile = {folder}/log\nignore_startup_parameters = extra_float_digits\n"
    )
    # Like PostgreSQL it refuses to run as root; it may as an ordinary user of a namespace of its own.
    prefix = ["unshare", "-U", "--map-user=1000", "--map-group=1000", "--"] if os.geteuid() == 0 else []
    with subprocess.Popen([*prefix, program, str(folder / "ini")], stderr=subprocess.DEVNULL) as process:
        try:
            _wait_listening(port, process)
            yield f"postgresql://pushd@127.0.0.1:{port}/pooled"
        finally:
            process.terminate()
            process.wait(10)
            shutil.rmtree(folder)


@pytest.mark.parametrize(("mode", "refused"), [("transaction", True), ("session", False)])
async def test_pooler_that_shares_sessions_between_transactions_is_found(
    database_url: str, mode: str, refused: bool
) -> None:
    with pooler(database_url, mode) as url:
        findings = await check_online(Config(database=Database(url=Secret(url))))
    assert any("goes through a pooler" in text for text in texts(findings, Severity.ERROR)) is refused
