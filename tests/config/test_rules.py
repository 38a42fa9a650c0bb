"""What must hold between keys."""

from __future__ import annotations

import pytest

from pushd.config import Config
from pushd.config.rules import broken_rules, exposure_fault
from pushd.config.values import parse_address
from tests.config.support import OPEN_H2, load, mistakes, public_pem, wrong_keys

FEW_ADDS = "limits.max_update_adds = 1_000\n"
JWKS = 'jwks_url = "https://issuer.example/keys"\n'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[server]\ntls_cert = "a"\n', "server.tls_key"),
        ('[server]\ntls_key = "a"\n', "server.tls_cert"),
        (f'[server]\n{OPEN_H2}listen = "0.0.0.0:1"\n', "server.allow_cleartext"),
        (f'[server]\n{OPEN_H2}listen = "[::]:1"\n', "server.allow_cleartext"),
        ('[server]\nlisten = "127.0.0.1:9464"\n', "telemetry.metrics_listen"),
        ('telemetry.metrics_listen = "0.0.0.0:5050"\n', "telemetry.metrics_listen"),
        ('server.listen = "[::1]:1"\ntelemetry.metrics_listen = "[::]:1"\n', "telemetry.metrics_listen"),
        ("server.max_receive_bytes = 67_108_863\n", "server.max_connection_receive_bytes"),
        ("server.max_connection_receive_bytes = 26_214_399\n", "limits.max_request_bytes"),
        ('[database]\nreplica_url = "postgresql://h/d"\n', "database.replica_url"),
        ("database.max_connections = 2_001\n", "database.max_connections"),
        ("publishing.max_publish_duration_ms = 5_000\n", "publishing.max_publish_duration_ms"),
        ("streams.max_pong_wait_ms = 30_000\n", "streams.max_pong_wait_ms"),
        ("limits.default_query_limit = 1_001\n", "limits.default_query_limit"),
        ("limits.max_update_adds = 100_001\n", "limits.max_update_adds"),
        (f"{FEW_ADDS}limits.max_response_bytes = 1_048_831\n", "limits.max_envelope_bytes"),
        ("limits.max_response_bytes = 6_400_031\n", "limits.max_update_adds"),
        ("limits.max_static_topics = 409_600\n", "limits.max_static_topics"),
        ("limits.max_query_limit = 102_400\n", "limits.max_query_limit"),
        ("limits.max_envelope_bytes = 2_096_897\n", "limits.max_envelope_bytes"),
        ("limits.max_request_bytes = 26_214_401\n", "limits.max_request_bytes"),
        ("limits.max_response_bytes = 26_214_401\n", "limits.max_response_bytes"),
        ("[auth]\n", "auth"),
        (f"[auth]\n{JWKS}[[auth.keys]]\nkid = 'a'\nalg = 'ES256'\npublic_key = 'env:P'\n", "auth"),
        ("[auth]\nkeys = []\n", "auth.keys"),
        (f"[auth]\n{JWKS}audiences = []\n", "auth.audiences"),
        (f"[auth]\n{JWKS}issuers = []\n", "auth.issuers"),
        (f"[auth]\n{JWKS}leeway_seconds = 301\n", "auth.leeway_seconds"),
        (f"[auth]\n{JWKS}jwks_max_stale_seconds = 339\n", "auth.jwks_max_stale_seconds"),
        (f"[auth]\n{JWKS}jwks_refresh_seconds = 1\njwks_max_stale_seconds = 11\n", "auth.jwks_max_stale_seconds"),
        ('[auth]\njwks_url = "http://issuer.example/keys"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://u:p@issuer.example/keys"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://[::1/keys"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://issuer.example/keys\\n"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://issuer.example/\\tkeys"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://issuer.example/ keys"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://issuer.\\u00e9xample/"\n', "auth.jwks_url"),
        (f'[auth]\njwks_url = "https://issuer.example/{2_026 * "k"}"\n', "auth.jwks_url"),
        ('[auth]\njwks_url = "https://issuer..example/keys"\n', "auth.jwks_url"),
        (f'[auth]\njwks_url = "https://{64 * "i"}.example/keys"\n', "auth.jwks_url"),
        ("[[auth.keys]]\nkid = 'a'\nalg = 'ES384'\npublic_key = 'env:P'\n", "auth.keys.0.public_key"),
        (f"[[auth.keys]]\nkid = '{'k' * 257}'\nalg = 'ES256'\npublic_key = 'env:P'\n", "auth.keys.0.kid"),
        (2 * "[[auth.keys]]\nkid = 'a'\nalg = 'ES256'\npublic_key = 'env:P'\n", "auth.keys.1.kid"),
    ],
)
def test_broken_rule_is_reported_once_under_its_key(tmp_path, text, key):
    assert wrong_keys(tmp_path, text, {"P": public_pem()}) == [key]


@pytest.mark.parametrize(
    "text",
    [
        f'[server]\n{OPEN_H2}listen = "0.0.0.0:1"\nallow_cleartext = true\n',
        f'[server]\n{OPEN_H2}listen = "192.0.2.1:1"\ntls_cert = "a"\ntls_key = "b"\n',
        'server.listen = "127.0.0.1:0"\ntelemetry.metrics_listen = "127.0.0.1:0"\n',
        'server.listen = "127.0.0.1:1"\ntelemetry.metrics_listen = "[::1]:1"\n',
        'server.listen = "127.0.0.1:9464"\ntelemetry.metrics_listen = ""\n',
        "server.max_receive_bytes = 67_108_864\n",
        "server.max_connection_receive_bytes = 26_214_400\n",
        "database.max_connections = 2_000\n",
        'database.max_connections = 2_001\ndatabase.url = "postgresql://h/d"\n',
        "publishing.max_publish_duration_ms = 5_001\n",
        "streams.max_pong_wait_ms = 30_001\n",
        "limits.default_query_limit = 1_000\n",
        f"{FEW_ADDS}limits.max_response_bytes = 1_048_832\n",
        "limits.max_response_bytes = 6_400_032\n",
        "limits.max_static_topics = 409_599\n",
        "limits.max_query_limit = 102_399\n",
        "limits.max_envelope_bytes = 2_096_896\n",
        f"[auth]\n{JWKS}jwks_max_stale_seconds = 340\n",
        f"[auth]\n{JWKS}jwks_refresh_seconds = 1\njwks_max_stale_seconds = 12\n",
        f"[auth]\n{JWKS}leeway_seconds = 0\n",
        '[auth]\njwks_url = "http://127.0.0.1:1/keys"\n',
        '[auth]\njwks_url = "https://[::1]:1/keys"\n',
        f'[auth]\njwks_url = "https://{63 * "i"}.example./keys"\n',
        f'[auth]\njwks_url = "https://issuer.example/{2_025 * "k"}"\n',
    ],
)
def test_values_at_the_edge_of_a_rule_are_taken(tmp_path, text):
    assert mistakes(tmp_path, text) == []


@pytest.mark.parametrize(
    ("listen", "tls", "cleartext", "old_h2", "h2", "key"),
    [
        ("127.0.0.1:1", False, False, False, "3.2.0", None),
        ("[::1]:1", False, False, False, "3.2.0", None),
        ("0.0.0.0:1", False, False, False, "4.4.1", "server.allow_cleartext"),
        ("0.0.0.0:1", False, True, False, "4.4.1", None),
        ("0.0.0.0:1", True, False, False, "4.3.0", None),
        ("0.0.0.0:1", True, False, False, "4.2.9", "server.allow_old_h2"),
        ("0.0.0.0:1", True, True, False, "3.2.0", "server.allow_old_h2"),
        ("0.0.0.0:1", True, False, True, "3.2.0", None),
        ("0.0.0.0:1", False, False, True, "3.2.0", "server.allow_cleartext"),
        ("0.0.0.0:1", True, False, False, "10.0", None),
        ("10.0.0.1:1", True, False, False, "5.0.0rc1", None),
    ],
)
def test_serving_other_machines_needs_tls_and_a_strict_h2_or_a_word(listen, tls, cleartext, old_h2, h2, key):
    address = parse_address(listen)
    assert address is not None
    fault = exposure_fault(address, tls=tls, allow_cleartext=cleartext, allow_old_h2=old_h2, h2_version=h2)
    assert (fault and fault[0]) == key


def test_defaults_break_no_rule():
    assert list(broken_rules(Config(), "3.2.0")) == []


def test_rule_is_silent_about_a_key_already_reported(tmp_path):
    text = '[server]\nlisten = "0.0.0.0"\n[streams]\nmax_pong_wait_ms = 1\nkeepalive_interval_ms = "x"\n'
    assert wrong_keys(tmp_path, text) == ["server.listen", "streams.keepalive_interval_ms"]


def test_embedded_fault_does_not_hide_the_rest(tmp_path):
    text = "[[auth.keys]]\nkid = 'a'\nalg = 'none'\npublic_key = 'x'\n[streams]\nmax_pong_wait_ms = 1\n"
    assert wrong_keys(tmp_path, text) == ["auth.keys.0.alg", "streams.max_pong_wait_ms"]


def test_unresolved_replica_does_not_blame_the_primary(tmp_path):
    text = '[database]\nurl = "env:NOT_THERE"\nreplica_url = "postgresql://h/d"\n'
    assert wrong_keys(tmp_path, text) == ["database.url"]


def test_loaded_configuration_keeps_its_numbers(tmp_path):
    assert load(tmp_path, "streams.max_pong_wait_ms = 30_001").streams.max_pong_wait_ms == 30_001
