"""From text to a configuration, or to all of its mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pushd.config import Address, Config, InvalidConfig, check_clock, load_config
from pushd.secret import REDACTED
from tests.config.support import (
    APNS,
    FCM_BLOCK,
    apns_block,
    environ,
    load,
    mistakes,
    pem,
    public_pem,
    write,
    wrong_keys,
)

NOW_NS = 1_800_000_000_000_000_000


def test_T060_defaults_serve_no_channel():
    config = load_config(None, {})
    assert config == Config()
    assert (config.push.recipient_ttl_seconds, config.push.max_attempts) == (2_592_000, 3)
    assert config.limits.max_push_topics == 100_000
    assert config.push.apns is config.push.fcm is config.push.http is None
    assert (config.server.listen, config.telemetry.metrics_listen) == (
        Address("127.0.0.1", 5050),
        Address("127.0.0.1", 9464),
    )
    assert config.server.max_drain_duration_ms == 20_000
    assert config.auth is None


def test_T061_empty_http_block_is_the_channel(tmp_path):
    http = load(tmp_path, "[push.http]\n").push.http
    assert http is not None
    assert (http.allowed_domains, http.allow_private_addresses) == ((), False)


def test_T062_T063_secrets_come_from_variables_and_are_not_shown(tmp_path):
    config = load(tmp_path, apns_block() + FCM_BLOCK)
    assert config.push.apns is not None
    assert config.push.fcm is not None
    assert config.push.apns.key.reveal() == environ()["APNS_KEY"]
    assert config.push.fcm.service_account.reveal() == environ()["FCM_ACCOUNT"]
    for text in (repr(config), str(config), f"{config.push.apns.key}", f"{config.push.apns.key:>20}"):
        assert REDACTED in text
        assert "PRIVATE KEY" not in text
        assert "example-project" not in text


def test_any_whole_string_may_come_from_a_variable(tmp_path):
    text = """
        [server]
        log_level = "env:LEVEL"
        listen = "env:LISTEN"
        [push.http]
        allowed_domains = ["env:HOST", "b.example"]
    """
    config = load(tmp_path, text, {"LEVEL": "debug", "LISTEN": "[::1]:1", "HOST": "a.example"})
    assert (config.server.log_level, config.server.listen) == ("debug", Address("::1", 1))
    assert config.push.http is not None
    assert config.push.http.allowed_domains == ("a.example", "b.example")


def test_variables_are_replaced_once_and_only_whole(tmp_path):
    text = '[auth]\njwks_url = "https://a.example"\naudiences = ["env:ONE", "a env:ONE", "ENV:ONE"]\n'
    auth = load(tmp_path, text, {"ONE": "env:TWO", "TWO": "x"}).auth
    assert auth is not None
    assert auth.audiences == ("env:TWO", "a env:ONE", "ENV:ONE")


@pytest.mark.parametrize(
    ("reference", "variables", "words"),
    [
        ("env:", {"": "x"}, "must name a variable"),
        ("env:not a name", {"not a name": "x"}, "must name a variable"),
        ("env:NOT_THERE", {}, "NOT_THERE, which is not set"),
        ("env:BLANK", {"BLANK": ""}, "BLANK, which is empty"),
    ],
    ids=["T072-no-name", "no-name-at-all", "T072-unset", "empty"],
)
def test_unresolved_variable_is_one_mistake_that_names_it(tmp_path, reference, variables, words):
    found = mistakes(tmp_path, apns_block(key=f'"{reference}"'), variables)
    assert [(finding.key, finding.where) for finding in found] == [("push.apns.key", f"{tmp_path}/pushd.toml:2")]
    assert words in found[0].what


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *(
            pytest.param(f"[push]\n{key} = {value}\n", f"push.{key}", id=f"{row}-{key}-{value}")
            for row, key, values in [
                ("T064", "recipient_ttl_seconds", (-1, 86_399, 9_223_372_037)),
                ("T065", "max_attempts", (-1, 0, 11, 4_294_967_296)),
            ]
            for value in values
        ),
        *(pytest.param(apns_block(**{key: None}), f"push.apns.{key}", id=f"T066-no-{key}") for key in APNS),
        *(pytest.param(apns_block(**{key: '" "'}), f"push.apns.{key}", id=f"T066-blank-{key}") for key in APNS),
        pytest.param(apns_block(environment='"invalid"'), "push.apns.environment", id="T066-environment"),
        pytest.param(apns_block(environment='["production"]'), "push.apns.environment", id="environment-list"),
        pytest.param("[push.fcm]\n", "push.fcm.service_account", id="T067-missing"),
        pytest.param('[push.fcm]\nservice_account = ""\n', "push.fcm.service_account", id="T067-empty"),
        pytest.param("[limits]\nmax_push_topics = 0\n", "limits.max_push_topics", id="T068"),
        *(
            pytest.param(
                f'[push.http]\nallowed_domains = ["{entry}"]\n', "push.http.allowed_domains", id=f"T069-{entry}"
            )
            for entry in (
                *("*", "a.*.org", "a*.org", "example..org", ".example.org", "example.org.", "https://example.org"),
                *("example.org:443", "example.org/path", "-example.org", "example-.org", "*.", "a_b.org", "[::1]"),
                *("exämple.org", "a" * 64 + ".org", ".".join(["a" * 60] * 5), "*.*.org", "a b.org"),
            )
        ),
        pytest.param('[push.http]\nallowed_domains = "example.org"\n', "push.http.allowed_domains", id="no-list"),
        pytest.param("[push]\nmax_attempts = 3.0\n", "push.max_attempts", id="float"),
        pytest.param("[push]\nmax_attempts = true\n", "push.max_attempts", id="bool-for-number"),
        pytest.param('[push]\nmax_attempts = "3"\n', "push.max_attempts", id="text-for-number"),
        pytest.param(
            "[push.http]\nallow_private_addresses = 1\n", "push.http.allow_private_addresses", id="1-for-bool"
        ),
        pytest.param("push = 3\n", "push", id="no-table"),
        pytest.param("[[push]]\n", "push", id="list-for-table"),
        pytest.param("[auth]\nkeys = {}\n", "auth.keys", id="table-for-list"),
        pytest.param('[server]\nlisten = "localhost:5050"\n', "server.listen", id="name-for-address"),
        pytest.param('[server]\nlisten = "127.0.0.1:65536"\n', "server.listen", id="port"),
        pytest.param('[server]\nlisten = "127.0.0.256:1"\n', "server.listen", id="address"),
        pytest.param('[server]\nlisten = "::1:5050"\n', "server.listen", id="no-brackets"),
        pytest.param('[server]\nlisten = ""\n', "server.listen", id="listen-off"),
        pytest.param('[server]\ntls_cert = ""\n', "server.tls_cert", id="empty-file-name"),
        pytest.param('[server]\ntls_cert = "a\\u0000b"\n', "server.tls_cert", id="nul"),
        pytest.param('[database]\nurl = "mysql://h/d"\n', "database.url", id="database-scheme"),
        pytest.param('[database]\nurl = "postgresql://h:port/d"\n', "database.url", id="database-port"),
        pytest.param('[database]\nurl = "postgresql://h/d?no_such=1"\n', "database.url", id="database-option"),
        pytest.param('[database]\nurl = "postgresql://a,b..c/d"\n', "database.url", id="database-host"),
        pytest.param(f'[database]\nurl = "postgresql://{64 * "h"}.b/d"\n', "database.url", id="database-host-label"),
        pytest.param(apns_block(endpoint='"https://api.push.apple.com"'), "push.apns.endpoint", id="apns-endpoint"),
        pytest.param(apns_block(endpoint='"https://127.0.0.1:1/x"'), "push.apns.endpoint", id="endpoint-path"),
        pytest.param(FCM_BLOCK + 'endpoint = "https://192.0.2.1:1"\n', "push.fcm.endpoint", id="fcm-endpoint"),
        pytest.param(apns_block(bundle_id='"org.a,org.b"'), "push.apns.bundle_id", id="two-topics"),
        pytest.param(apns_block(bundle_id='"org.a\\r\\nx: y"'), "push.apns.bundle_id", id="header-injection"),
        pytest.param(apns_block(key=f"'''{pem('P-384')}'''"), "push.apns.key", id="T074"),
        pytest.param("[push.fcm]\nservice_account = '{}'\n", "push.fcm.service_account", id="T073"),
        pytest.param('[push.http]\nextra = "x"\n', "push.http.extra", id="T075"),
        pytest.param("extra = 1\n", "extra", id="T075-top"),
        pytest.param('"a\\nb" = 1\n', '"a\\nb"', id="T075-line-break"),
    ],
)
def test_mistake_is_reported_once_under_its_key(tmp_path, text, key):
    assert wrong_keys(tmp_path, text) == [key]


def test_T064_T065_bounds_belong_to_the_range(tmp_path):
    for ttl in (86_400, 9_223_372_036):
        assert load(tmp_path, f"push.recipient_ttl_seconds = {ttl}").push.recipient_ttl_seconds == ttl
    for attempts in (1, 10):
        assert load(tmp_path, f"push.max_attempts = {attempts}").push.max_attempts == attempts


@pytest.mark.parametrize("entry", ["hooks.example.com", "*.EXAMPLE.org", "localhost", "xn--exmple-cua.org", "10.0.0.1"])
def test_T070_host_names_are_taken(tmp_path, entry):
    http = load(tmp_path, f'[push.http]\nallowed_domains = ["{entry}"]').push.http
    assert http is not None
    assert http.allowed_domains == (entry,)


def test_empty_domain_entry_is_refused(tmp_path):
    (found,) = mistakes(tmp_path, '[push.http]\nallowed_domains = [""]')
    assert found.key.startswith("push.http.allowed_domains")


def test_fcm_endpoint_on_this_machine_allows_a_local_token_uri(tmp_path):
    variables = environ() | {
        "FCM_ACCOUNT": environ()["FCM_ACCOUNT"].replace("https://oauth2.googleapis.com", "http://[::1]:1")
    }
    assert wrong_keys(tmp_path, FCM_BLOCK, variables) == ["push.fcm.service_account"]
    assert wrong_keys(tmp_path, FCM_BLOCK + 'endpoint = "https://127.0.0.1:2198"\n', variables) == []


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:p@a.example,b.example:5433/d?target_session_attrs=read-write",
        "postgresql:///d?host=/run/postgresql",
    ],
)
def test_database_urls_of_postgresql_are_taken(tmp_path, url):
    config = load(tmp_path, f'[database]\nurl = "{url}"')
    assert config.database.url is not None
    assert config.database.url.reveal() == url


def test_metrics_are_switched_off_by_an_empty_address(tmp_path):
    assert load(tmp_path, 'telemetry.metrics_listen = ""').telemetry.metrics_listen is None


def test_all_mistakes_are_reported_together_with_their_lines(tmp_path):
    text = """\
[server]
listn = "127.0.0.1:1"
max_drain_duration_ms = 0

[push]
max_attempts = "many"
[push.apns]
team_id = "env:TEAM"
bundle_id = "org.example.app"
environment = "production"
key = "env:APNS_KEY"

[limits]
default_query_limit = 5000

[[auth.keys]]
kid = "a"
alg = "HS256"
public_key = "x"
"""
    found = [(finding.where.rpartition(":")[2], finding.key) for finding in mistakes(tmp_path, text)]
    assert found == [
        ("2", "server.listn"),
        ("3", "server.max_drain_duration_ms"),
        ("6", "push.max_attempts"),
        ("7", "push.apns.key_id"),
        ("8", "push.apns.team_id"),
        ("14", "limits.default_query_limit"),
        ("18", "auth.keys.0.alg"),
    ]


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("[push.apns]\nkeyid = 1", "push.apns.key_id"),
        ("[push.fcm]\nteam_id = 1", "push.apns.team_id"),
        ("max_push_topics = 1", "limits.max_push_topics"),
        ("[puhs]", "push"),
        ("[push.http]\nallowed_domain = 1", "push.http.allowed_domains"),
        ('[[auth.keys]]\nkidd = "x"', "auth.keys.kid"),
        ("[apns]", "push.apns"),
    ],
)
def test_unknown_key_comes_with_a_suggestion(tmp_path, text, guess):
    assert any(f"did you mean {guess}?" in finding.what for finding in mistakes(tmp_path, text))


def test_unknown_key_like_no_other_comes_without_one(tmp_path):
    (found,) = mistakes(tmp_path, "[zzz]")
    assert found.what == "is not a key of pushd"


def test_file_is_the_given_one_then_the_variable_then_none(tmp_path):
    (tmp_path / "a").mkdir()
    given = write(tmp_path / "a", "push.max_attempts = 4")
    other = write(tmp_path, "push.max_attempts = 5")
    assert load_config(given, {"PUSHD_CONFIG": str(other)}).push.max_attempts == 4
    assert load_config(None, {"PUSHD_CONFIG": str(other)}).push.max_attempts == 5
    assert load_config(None, {"PUSHD_CONFIG": ""}).push.max_attempts == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[push\nmax_attempts = 3", "is not valid TOML"),
        (b"[push]\nmax_attempts = 3\nmax_attempts = 4\n", "line 3"),
        (b"[push]\n[push]\n", "is not valid TOML"),
        (b"a = \xff", "is not UTF-8"),
        (b"a = " + b"9" * 5_000, "is not valid TOML"),
        (b"a = " + b"[" * 50_000, "is not valid TOML"),
    ],
)
def test_unreadable_text_is_one_mistake_of_the_file(tmp_path, content, words):
    path = tmp_path / "pushd.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match=words) as caught:
        load_config(path, {})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_file_that_cannot_be_opened_is_one_mistake(tmp_path, name):
    with pytest.raises(InvalidConfig, match="cannot be read: ") as caught:
        load_config(tmp_path / name, {})
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_of_somebody_else_is_one_mistake(tmp_path):
    path = write(tmp_path, "")
    path.chmod(0)
    with pytest.raises(InvalidConfig, match="cannot be read: Permission denied"):
        load_config(path, {})


def test_T009_lifetime_beyond_the_database_clock_is_refused(tmp_path):
    config = load(tmp_path, "push.recipient_ttl_seconds = 9_223_372_036\nretention.welcome_seconds = 9_223_372_036")
    check_clock(config, 0)
    for now_ns in (1_000_000_000, NOW_NS):
        with pytest.raises(InvalidConfig, match=r"push\.recipient_ttl_seconds") as caught:
            check_clock(config, now_ns)
        assert [finding.key for finding in caught.value.findings] == [
            "push.recipient_ttl_seconds",
            "retention.welcome_seconds",
        ]
    check_clock(Config(), NOW_NS)
    with pytest.raises(InvalidConfig):
        check_clock(Config(), -1)


def test_keys_of_tokens_are_typed(tmp_path):
    text = "[[auth.keys]]\nkid = 'a'\nalg = 'ES256'\npublic_key = 'env:PUBLIC'\n"
    auth = load(tmp_path, text, {"PUBLIC": public_pem()}).auth
    assert auth is not None
    assert auth.keys is not None
    assert (auth.keys[0].kid, auth.keys[0].alg) == ("a", "ES256")
    assert "PUBLIC KEY" not in repr(auth)
    assert (auth.leeway_seconds, auth.jwks_refresh_seconds, auth.jwks_max_stale_seconds) == (60, 300, 3_600)


def test_file_names_are_paths(tmp_path):
    server = load(tmp_path, "[server]\ntls_cert = 'a.pem'\ntls_key = 'b.pem'").server
    assert (server.tls_cert, server.tls_key) == (Path("a.pem"), Path("b.pem"))
