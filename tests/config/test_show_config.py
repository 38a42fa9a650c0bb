"""`pushd config`: every key, where its value comes from, and nothing private."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pushd.config import InvalidConfig, shape
from pushd.ops.show_config import run_show_config, settings
from tests.config.support import apns_block, environ, pem, public_pem, service_account, write

EVERYTHING = f"""\
[server]
listen = "env:LISTEN"
log_level = "debug"
tls_cert = "cert.pem"
tls_key = "env:KEY_FILE"
[telemetry]
metrics_listen = ""
[database]
url = "postgresql://sesame@host/db"
replica_url = "env:REPLICA"
max_connections = 7
[auth]
audiences = ["https://audience.example", "env:AUDIENCE"]
[[auth.keys]]
kid = "private-kid"
alg = "ES256"
public_key = "env:PUBLIC"
[[auth.keys]]
kid = "another-kid"
alg = "ES256"
public_key = "env:PUBLIC"
{apns_block(endpoint='"https://127.0.0.1:2197"')}
[push.fcm]
service_account = "env:FCM_ACCOUNT"
[push.http]
allowed_domains = []
"""
VARIABLES = {
    "LISTEN": "127.0.0.1:7070",
    "KEY_FILE": "sesame.pem",
    "REPLICA": "postgresql://sesame@replica/db",
    "AUDIENCE": "https://other.example",
    "PUBLIC": public_pem(),
    "APNS_KEY": pem(),
    "FCM_ACCOUNT": service_account(),
}


def line_of(text: str) -> int:
    return EVERYTHING.splitlines().index(text) + 1


def test_values_come_with_their_place(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING)
    found = {setting.key: (setting.value, setting.source) for setting in settings(path, VARIABLES)}
    kid = line_of('kid = "another-kid"')
    bundle, environment = line_of('bundle_id = "org.example.app"'), line_of('environment = "production"')
    for key, value, source in (
        ("server.listen", '"127.0.0.1:7070"', f"{path}:2, env:LISTEN"),
        ("server.log_level", '"debug"', f"{path}:3"),
        ("server.log_format", '"text"', "default"),
        ("server.tls_cert", '"cert.pem"', f"{path}:4"),
        ("server.tls_key", "<redacted>", f"{path}:5, env:KEY_FILE"),
        ("telemetry.metrics_listen", '""', f"{path}:7"),
        ("database.url", "<redacted>", f"{path}:9"),
        ("database.replica_url", "<redacted>", f"{path}:10, env:REPLICA"),
        ("database.max_connections", "7", f"{path}:11"),
        ("auth.jwks_url", "(absent)", "default"),
        ("auth.audiences", "<redacted>", f"{path}:13, env:AUDIENCE"),
        ("auth.keys.1.kid", "<redacted>", f"{path}:{kid}"),
        ("auth.keys.1.public_key", "<redacted>", f"{path}:{kid + 2}, env:PUBLIC"),
        ("auth.required_scopes", "[]", "default"),
        ("push.apns.bundle_id", "<redacted>", f"{path}:{bundle}"),
        ("push.apns.environment", '"production"', f"{path}:{environment}"),
        ("push.http.ca_file", "(absent)", "default"),
    ):
        assert found[key] == (value, source), key


def test_every_key_is_there_once(tmp_path: Path) -> None:
    found = [setting.key for setting in settings(write(tmp_path, EVERYTHING), VARIABLES)]
    assert len(found) == len(set(found))
    assert {re.sub(r"\.\d+\.", ".", key) for key in found} == shape.KEYS.keys()


def test_nothing_private_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING)
    text = "\n".join(f"{setting.value} {setting.source}" for setting in settings(path, VARIABLES))
    text = text.replace(str(path), "")
    for private in ("sesame", "-kid", ".example", "ABC123DEFG", "TEAM123456", "2197", "BEGIN"):
        assert private not in text, private


def test_without_a_file_all_are_defaults_and_blocks_are_absent() -> None:
    found = {setting.key: (setting.value, setting.source) for setting in settings(None, {})}
    assert {source for _, source in found.values()} == {"default"}
    assert found["auth"] == found["push.http"] == ("(absent)", "default")


def test_mistakes_are_told_instead(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"push\.max_attempts"):
        settings(write(tmp_path, "push.max_attempts = 0"), environ())


def test_one_line_or_object_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "database.max_connections = 7\n")
    run_show_config(path)
    assert f"database.max_connections = 7  # {path}:1" in capsys.readouterr().out.splitlines()
    run_show_config(path, json=True)
    wanted = {"key": "database.max_connections", "value": "7", "source": f"{path}:1"}
    assert wanted in json.loads(capsys.readouterr().out)
