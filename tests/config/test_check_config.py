"""`pushd check-config`: findings, their order, and how they are printed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from pushd.config import Finding, Severity, shape
from pushd.ops.check_config import (
    as_json,
    as_text,
    check_config,
    is_public_suffix_pattern,
    print_schema,
    run_check_config,
)
from tests.config.support import FCM_BLOCK, OPEN_H2, apns_block, environ, pem, public_pem, service_account, write

OPEN = f'[server]\n{OPEN_H2}listen = "0.0.0.0:5050"\nallow_cleartext = true\n'
AUTH = '[auth]\njwks_url = "https://issuer.example/keys"\n'


def findings(folder: Path, text: str, variables: dict[str, str] | None = None) -> list[Finding]:
    return check_config(write(folder, text), environ() if variables is None else variables)


def keys(found: list[Finding], severity: Severity) -> list[str]:
    return [finding.key for finding in found if finding.severity is severity]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("server.max_drain_duration_ms = 10_999\n", "server.max_drain_duration_ms"),
        (OPEN, "server.listen"),
        (OPEN + AUTH + "[push.http]\nallow_private_addresses = true\n", "push.http.allow_private_addresses"),
        ('telemetry.metrics_listen = "0.0.0.0:9464"\n', "telemetry.metrics_listen"),
        ("database.max_connections = 3\n", "database.max_connections"),
        ("push.recipient_ttl_seconds = 345_599\n", "push.recipient_ttl_seconds"),
        (apns_block(key_id='"ABC123DEF"'), "push.apns.key_id"),
        (apns_block(key_id='"AuthKey_AB"'), "push.apns.key_id"),
        (apns_block(team_id='"ABC 123 DE"'), "push.apns.team_id"),
        (apns_block(team_id='"ABC123DEFG"'), "push.apns.team_id"),
        (apns_block(endpoint='"https://127.0.0.1:2197"'), "push.apns.endpoint"),
        (FCM_BLOCK + 'endpoint = "https://127.0.0.1:2198"\n', "push.fcm.endpoint"),
        ('[push.http]\nallowed_domains = ["*.com"]\n', "push.http.allowed_domains"),
    ],
)
def test_doubtful_setting_is_one_warning(tmp_path, text, key):
    found = findings(tmp_path, text)
    assert keys(found, Severity.ERROR) == []
    assert keys(found, Severity.WARNING) == [key]


@pytest.mark.parametrize(
    "text",
    [
        "server.max_drain_duration_ms = 11_000\n[push.http]\n",
        OPEN + AUTH + "[push.http]\n",
        'telemetry.metrics_listen = "[::1]:9464"\n[push.http]\n',
        'telemetry.metrics_listen = ""\n[push.http]\n',
        "push.http.allow_private_addresses = true\n",
        "database.max_connections = 4\n[push.http]\n",
        "push.recipient_ttl_seconds = 345_600\n[push.http]\n",
        apns_block() + FCM_BLOCK + '[push.http]\nallowed_domains = ["*.example.com", "hooks.example.org"]\n',
    ],
)
def test_sound_setting_is_no_finding(tmp_path, text):
    assert findings(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (apns_block(key=json.dumps(pem().replace("\n", "\\n"))), "push.apns.key", "two characters"),
        (apns_block(key=json.dumps(pem("RSA"))), "push.apns.key", "RSA"),
        (apns_block(key=json.dumps("-----BEGIN CERTIFICATE-----\n")), "push.apns.key", "certificate"),
        (apns_block(bundle_id='"org.a, org.b"'), "push.apns.bundle_id", ""),
        (apns_block(bundle_id='"org.*"'), "push.apns.bundle_id", ""),
        ("[push.fcm]\nservice_account = '{\"project_info\": {}}'\n", "push.fcm.service_account", "google-services"),
        ("[push.fcm]\nservice_account = 'AIzaSyA'\n", "push.fcm.service_account", "web API key"),
        ("server.listen = '127.0.0.1:9464'\n", "telemetry.metrics_listen", ""),
        (f"[server]\n{OPEN_H2}listen = '0.0.0.0:5050'\n", "server.allow_cleartext", "tls_cert"),
        ("[push.apns]\nkeyid = 'x'\n", "push.apns.keyid", "push.apns.key_id"),
    ],
)
def test_mistake_that_stops_the_start_comes_with_a_way_out(tmp_path, text, key, words):
    (tmp_path / "pushd.toml").touch(0o600)
    (found,) = (finding for finding in findings(tmp_path, text) if finding.key == key)
    assert found.severity is Severity.ERROR
    assert words in found.mend


@pytest.mark.parametrize(
    ("text", "key", "mend"),
    [
        ("[push]\nmax_attempts = 0\n", "push.max_attempts", "leave the key out for its default"),
        ("[server]\nrequest_logger = 1\n", "server.request_logger", "leave the key out for its default"),
        ("[server]\nlog_level = 'loud'\n", "server.log_level", "leave the key out for its default"),
        (
            "[database]\nurl = 'postgresql://h:port/d'\n",
            "database.url",
            'correct it, for instance url = "env:PUSHD_DATABASE_URL"',
        ),
        (
            "[push.http]\nallowed_domains = ['https://hooks.example.com']\n",
            "push.http.allowed_domains",
            'correct it, for instance allowed_domains = ["hooks.example.com", "*.example.org"]',
        ),
        (
            f"{AUTH}audiences = 'mine'\n",
            "auth.audiences",
            'correct it, for instance audiences = ["https://push.example.com"]',
        ),
        (
            f"{AUTH}audiences = []\n",
            "auth.audiences",
            'correct it, for instance audiences = ["https://push.example.com"]',
        ),
        (
            "[auth]\njwks_url = 'http://issuer.example'\n",
            "auth.jwks_url",
            'correct it, for instance jwks_url = "https://issuer.example.com/.well-known/jwks.json"',
        ),
        ("[server]\ntls_cert = ''\n", "server.tls_cert", 'correct it, for instance tls_cert = "/etc/pushd/cert.pem"'),
        (apns_block(environment='"dev"'), "push.apns.environment", 'for instance environment = "production"'),
    ],
)
def test_leaving_a_key_out_is_advised_only_where_its_default_is_harmless(tmp_path, text, key, mend):
    (tmp_path / "pushd.toml").touch(0o600)
    assert [(found.key, found.mend) for found in findings(tmp_path, text)] == [(key, mend)]


def test_every_other_key_has_an_example_that_it_takes(tmp_path):
    for key in shape.KEYS.values():
        if key.path.startswith("auth.keys."):
            continue  # in a list of tables
        assert key.may_be_left_out or key.example_toml not in ("", "[]"), key.path
        wrong = findings(tmp_path, f"{key.path} = {key.example_toml}\n", {})
        assert [found.what for found in wrong if found.key == key.path and "must " in found.what] == []


def test_credential_is_judged_beside_other_mistakes_of_its_block(tmp_path):
    text = apns_block(key_id=None, team_id='""') + (
        "[[auth.keys]]\nalg = 'ES256'\npublic_key = 'env:P'\n"
        "[[auth.keys]]\nkid = '2026-01'\nalg = 'none'\npublic_key = 'env:P'\n"
        "[[auth.keys]]\nkid = 'a'\nalg = 'ES256'\npublic_key = 'env:P'\nuse = 'sig'\n"
    )
    found = findings(tmp_path, text, {"APNS_KEY": pem("P-384"), "P": public_pem("RSA")})
    assert keys(found, Severity.ERROR) == [
        "push.apns.key_id",
        "push.apns.key",
        "push.apns.team_id",
        "auth.keys.0.kid",
        "auth.keys.0.public_key",
        "auth.keys.1.alg",
        "auth.keys.2.public_key",
        "auth.keys.2.use",
    ]


def test_list_with_something_else_than_tables_is_judged_to_its_end(tmp_path):
    found = findings(tmp_path, "[auth]\nkeys = [3, {kid = ''}, {use = 1}]\n")
    assert {finding.key.rpartition(".")[0] for finding in found} == {"auth.keys", "auth.keys.1", "auth.keys.2"}


def test_locks_a_foreign_database_needs_are_noted(tmp_path):
    text = '[database]\nurl = "postgresql://h/d"\nmax_connections = 30\n[push.http]\n'
    (tmp_path / "pushd.toml").touch(0o600)
    (found,) = findings(tmp_path, text)
    assert (found.severity, found.key) == (Severity.NOTE, "database.max_connections")
    assert "max_locks_per_transaction = 300 " in found.mend
    assert found.where.endswith("pushd.toml:3")


def test_server_without_channels_is_noted(tmp_path):
    assert [(finding.severity, finding.key) for finding in findings(tmp_path, "")] == [(Severity.NOTE, "push")]


@pytest.mark.parametrize(
    ("entry", "wide"),
    [
        ("*.com", True),
        ("*.ORG", True),
        ("*.co.uk", True),
        ("*.com.au", True),
        ("*.example.com", False),
        ("*.example.co.uk", False),
        ("co.uk", False),
        ("com", False),
        ("*.co.example", False),
    ],
)
def test_wildcard_under_a_public_suffix_is_recognized(entry, wide):
    assert is_public_suffix_pattern(entry) is wide


class TestFiles:
    @pytest.fixture
    def pair(self, tmp_path):
        """A certificate and its key in two files, the key readable by its owner alone."""
        issued = trustme.CA().issue_cert("localhost")
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.touch(0o600)
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key

    def server(self, cert: Path, key: Path) -> str:
        return f'[server]\ntls_cert = "{cert}"\ntls_key = "{key}"\n[push.http]\n'

    def test_certificate_and_its_key_are_taken(self, tmp_path, pair):
        assert findings(tmp_path, self.server(*pair)) == []

    @pytest.mark.parametrize(
        ("begins_days", "ends_days", "severity", "word"),
        [
            (-400, -35, Severity.ERROR, "ended on"),
            (2, 92, Severity.ERROR, "begins on"),
            (-80, 10, Severity.WARNING, "ends on"),
        ],
    )
    def test_certificate_out_of_its_time_is_told_with_the_date(
        self, tmp_path, pair, begins_days, ends_days, severity, word
    ):
        now = datetime.now(UTC)
        begins, ends = (now + timedelta(days) for days in (begins_days, ends_days))
        issued = trustme.CA().issue_cert("localhost", not_before=begins, not_after=ends)
        pair[0].write_bytes(issued.cert_chain_pems[0].bytes())
        pair[1].write_bytes(issued.private_key_pem.bytes())
        (found,) = findings(tmp_path, self.server(*pair))
        assert (found.severity, found.key) == (severity, "server.tls_cert")
        assert f"{word} {begins if begins > now else ends:%Y-%m-%d}" in found.what
        assert "restart" in found.mend

    def test_missing_file_is_an_error_of_its_key(self, tmp_path, pair):
        (found,) = findings(tmp_path, self.server(pair[0], tmp_path / "none.pem"))
        assert (found.severity, found.key) == (Severity.ERROR, "server.tls_key")
        assert "No such file" in found.what

    def test_key_of_another_certificate_is_an_error(self, tmp_path, pair):
        pair[1].write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
        assert keys(findings(tmp_path, self.server(*pair)), Severity.ERROR) == ["server.tls_key"]

    def test_swapped_files_are_an_error(self, tmp_path, pair):
        assert keys(findings(tmp_path, self.server(pair[1], pair[0])), Severity.ERROR) == ["server.tls_key"]

    def test_key_other_users_may_read_is_a_warning(self, tmp_path, pair):
        pair[1].chmod(0o640)
        assert keys(findings(tmp_path, self.server(*pair)), Severity.WARNING) == ["server.tls_key"]

    @pytest.mark.parametrize("content", [None, "no certificate"])
    def test_authority_that_cannot_be_used_is_an_error(self, tmp_path, content):
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        (found,) = findings(tmp_path, f'[push.http]\nca_file = "{file}"\n')
        assert (found.severity, found.key) == (Severity.ERROR, "push.http.ca_file")

    def test_authority_is_taken(self, tmp_path):
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        assert findings(tmp_path, f'[push.http]\nca_file = "{tmp_path}/ca.pem"\n') == []

    @pytest.mark.parametrize(("mode", "expected"), [(0o600, []), (0o640, ["database.url"])])
    def test_secret_in_a_file_others_may_read_is_a_warning(self, tmp_path, mode, expected):
        path = write(tmp_path, f'{AUTH}[database]\nurl = "postgresql://h/d"\nreplica_url = "env:R"\n')
        path.chmod(mode)
        assert keys(check_config(path, {"R": "postgresql://h/r"}), Severity.WARNING) == expected


TWO = "[push]\nmax_attempts = 0\n[server]\nlisten = 'x'\n"


def test_text_has_one_line_a_finding(tmp_path):
    path = write(tmp_path, TWO)
    lines = as_text(check_config(path, {})).splitlines()
    assert lines == [
        f"error: {path}:2: push.max_attempts must be from 1 to 10 (to mend: leave the key out for its default)",
        f"error: {path}:4: server.listen must be a numeric address with a port, like 127.0.0.1:5050 or [::1]:5050 "
        '(to mend: correct it, for instance listen = "127.0.0.1:5050")',
    ]


def test_json_has_one_object_a_finding(tmp_path):
    path = write(tmp_path, TWO)
    assert json.loads(as_json(check_config(path, {})))[0] == {
        "severity": "error",
        "key": "push.max_attempts",
        "where": f"{path}:2",
        "what": "must be from 1 to 10",
        "mend": "leave the key out for its default",
    }
    assert json.loads(as_json([])) == []


def test_errors_come_first(tmp_path):
    cert = tmp_path / "none.pem"
    found = findings(tmp_path, f'database.max_connections = 1\n[server]\ntls_cert = "{cert}"\ntls_key = "{cert}"\n')
    assert [finding.severity.value for finding in found] == ["error", "error", "warning", "note"]


@pytest.mark.parametrize(
    ("text", "code"), [("", 0), ("database.max_connections = 1", 0), ("push.max_attempts = 0", 1), ("[", 1)]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_code_is_1_exactly_for_errors(tmp_path, capsys, text, code, as_json):
    assert run_check_config(write(tmp_path, text), json=as_json) == code
    assert capsys.readouterr().out.strip()


def test_default_file_is_the_one_the_variable_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PUSHD_CONFIG", str(write(tmp_path, "push.max_attempts = 0")))
    assert run_check_config(None) == 1
    assert "pushd.toml:1" in capsys.readouterr().out


def test_nothing_to_say_is_said(tmp_path, capsys):
    assert run_check_config(write(tmp_path, "[push.http]")) == 0
    assert capsys.readouterr().out == "nothing to mend\n"


def test_schema_is_printed(capsys):
    print_schema()
    assert json.loads(capsys.readouterr().out)["title"] == "pushd configuration"


def test_credential_findings_hold_no_value(tmp_path):
    text = apns_block() + FCM_BLOCK + "[[auth.keys]]\nkid='a'\nalg='RS256'\npublic_key='env:P'\n"
    variables = {"APNS_KEY": pem("P-384"), "FCM_ACCOUNT": service_account(project_id="a/b"), "P": public_pem()}
    found = findings(tmp_path, text, variables)
    assert len(keys(found, Severity.ERROR)) == 3
    for line in (*as_text(found).splitlines(), as_json(found)):
        assert not any(part in line for value in variables.values() for part in value.split("\n") if len(part) > 20)
