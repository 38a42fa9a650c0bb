"""The offline judgement of provider credentials and of the keys of tokens."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
from jwt.algorithms import RSAAlgorithm

from pushd.core.credentials import (
    APNS_KEY_ERROR,
    GOOGLE_TOKEN_URI,
    SERVICE_ACCOUNT_ERROR,
    Fault,
    inspect_apns_key,
    inspect_public_key,
    inspect_service_account,
    is_loopback_url,
    parse_apns_key,
    parse_service_account,
)
from pushd.core.tokens import read_key_set
from pushd.errors import ConfigError
from tests.config.support import pem, public_pem, service_account

APNS_FAULTS = {
    "literal-line-breaks": (lambda: pem().replace("\n", "\\n"), "two characters"),
    "T074-other-curve": (lambda: pem("P-384"), "another curve"),
    "ed25519": (lambda: pem("Ed25519"), "another curve"),
    "rsa": (lambda: pem("RSA"), "RSA"),
    "rsa-pkcs1": (lambda: pem("RSA", PrivateFormat.TraditionalOpenSSL), "RSA"),
    "sec1": (lambda: pem("P-256", PrivateFormat.TraditionalOpenSSL), "SEC 1"),
    "certificate": (lambda: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "certificate"),
    "public": (lambda: public_pem(), "public"),
    "encrypted": (lambda: "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END…", "encrypted"),
    "file-name": (lambda: "/etc/keys/AuthKey_ABC123DEFG.p8", "file name"),
    "noise": (lambda: "hunter2", "not PEM"),
    "damaged": (lambda: pem()[:60] + "!" + pem()[70:], "damaged"),
    "cut": (lambda: pem()[:80], "damaged"),
    "surrogate": (lambda: pem() + "\udc80", "damaged"),
}


@pytest.mark.parametrize("name", APNS_FAULTS)
def test_unusable_apns_key_is_refused_with_one_constant_and_explained(name):
    make, words = APNS_FAULTS[name]
    text = make()
    with pytest.raises(ConfigError) as caught:
        parse_apns_key(text)
    assert str(caught.value) == APNS_KEY_ERROR
    assert "push.apns.key" in APNS_KEY_ERROR
    assert caught.value.__cause__ is caught.value.__context__ is None
    fault = inspect_apns_key(text)
    assert isinstance(fault, Fault)
    assert words in fault.what


def test_apns_key_of_apple_is_taken():
    assert isinstance(parse_apns_key(pem()), EllipticCurvePrivateKey)
    assert isinstance(parse_apns_key(f"\n{pem()}\n\n"), EllipticCurvePrivateKey)


ACCOUNT_FAULTS = {
    "T073-empty-project": (lambda: service_account(project_id=""), "lacks project_id"),
    "T073-slash-in-project": (lambda: service_account(project_id="project/other"), "project_id"),
    "T073-unusable-key": (lambda: service_account(private_key="unusable"), "damaged private_key"),
    "T073-local-token-uri": (lambda: service_account(token_uri="https://127.0.0.1:8080/token"), "token_uri"),
    "T073-empty-email": (lambda: service_account(client_email=""), "lacks client_email"),
    "project-with-query": (lambda: service_account(project_id="a?b"), "project_id"),
    "project-with-line-break": (lambda: service_account(project_id="a\n"), "project_id"),
    "no-key": (lambda: service_account(private_key=None), "lacks private_key"),
    "number-for-email": (lambda: service_account(client_email=5), "lacks client_email"),
    "ec-key": (lambda: service_account(private_key=pem()), "not RSA"),
    "token-uri-slash": (lambda: service_account(token_uri=GOOGLE_TOKEN_URI + "/"), "token_uri"),
    "google-services": (lambda: json.dumps({"project_info": {"project_id": "x"}, "client": []}), "google-services"),
    "web-api-key": (lambda: "AIzaSyA-very-secret", "web API key"),
    "file-name": (lambda: "/etc/pushd/account.json", "file name"),
    "list": (lambda: "[]", "not a JSON object"),
    "noise": (lambda: "{hunter2", "not a JSON object"),
    "deep": (lambda: "[" * 100_000, "not a JSON object"),
}


@pytest.mark.parametrize("name", ACCOUNT_FAULTS)
def test_unusable_service_account_is_refused_with_one_constant_and_explained(name):
    make, words = ACCOUNT_FAULTS[name]
    text = make()
    with pytest.raises(ConfigError) as caught:
        parse_service_account(text)
    assert str(caught.value) == SERVICE_ACCOUNT_ERROR
    assert "push.fcm.service_account" in SERVICE_ACCOUNT_ERROR
    assert caught.value.__cause__ is caught.value.__context__ is None
    fault = inspect_service_account(text)
    assert isinstance(fault, Fault)
    assert words in fault.what


def test_service_account_of_google_is_taken_and_prints_nothing():
    account = parse_service_account(service_account())
    assert (account.project_id, account.token_uri) == ("example-project", GOOGLE_TOKEN_URI)
    assert account.client_email.startswith("push@")
    assert repr(account) == "ServiceAccount()"


@pytest.mark.parametrize(
    ("uri", "taken"),
    [("http://127.0.0.1:9/token", True), ("https://localhost/t", True), ("https://192.0.2.1/token", False)],
)
def test_local_token_uri_is_for_a_fake_provider_alone(uri, taken):
    text = service_account(token_uri=uri)
    assert isinstance(inspect_service_account(text, allow_loopback_token_uri=True), Fault) is not taken
    assert isinstance(inspect_service_account(text), Fault)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:2197", True),
        ("https://127.9.9.9", True),
        ("https://[::1]:443/", True),
        ("https://localhost:1", True),
        ("https://api.push.apple.com", False),
        ("https://localhost.example.org", False),
        ("https://127.0.0.1.example.org", False),
        ("https://user@127.0.0.1", False),
        ("https://127.0.0.1@example.org", False),
        ("https://[::ffff:127.0.0.1]", False),
        ("https://0.0.0.0", False),
        ("https://2130706433", False),
        ("https://127.0.0.1:99999", False),
        ("https://[::1", False),
        ("ftp://127.0.0.1", False),
        ("127.0.0.1:80", False),
        ("https://127.0.0.1:2197\n", False),
        ("https://127.0.0.1:\t2197", False),
        (" https://127.0.0.1", False),
        ("https://127.0.0.1/\u00e9", False),
        ("https://127.0.0.1/\x7f", False),
        ("https://127.0.0.1/" + "p" * 2_030, True),
        ("https://127.0.0.1/" + "p" * 2_031, False),
        ("", False),
    ],
)
def test_only_this_machine_is_loopback(url, loopback):
    assert is_loopback_url(url) is loopback


FITTING = {("RS256", "RSA"), ("RS384", "RSA"), ("RS512", "RSA"), ("ES256", "P-256"), ("ES384", "P-384")}


@pytest.mark.parametrize("kind", ["RSA", "P-256", "P-384", "Ed25519"])
@pytest.mark.parametrize("alg", ["RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"])
def test_public_key_must_fit_its_algorithm(alg, kind):
    fits = (alg, kind) in FITTING | {("EdDSA", "Ed25519")}
    assert isinstance(inspect_public_key(public_pem(kind), alg), Fault) is not fits


@pytest.mark.parametrize(("bits", "trusted"), [(1_024, False), (2_040, False), (2_048, True)])
def test_rsa_key_must_be_long_enough_in_the_file_and_in_a_key_set(bits, trusted):
    key = rsa.generate_private_key(public_exponent=65_537, key_size=bits).public_key()
    text = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    assert isinstance(inspect_public_key(text, "RS256"), Fault) is not trusted
    jwk = RSAAlgorithm.to_jwk(key, as_dict=True) | {"alg": "RS256"}
    assert bool(read_key_set(json.dumps({"keys": [jwk]}).encode())) is trusted


@pytest.mark.parametrize("text", ["", "noise", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_unreadable_public_key_is_a_fault(text):
    assert isinstance(inspect_public_key(text, "ES256"), Fault)


def test_private_key_in_the_place_of_a_public_one_is_a_fault():
    assert isinstance(inspect_public_key(pem(), "ES256"), Fault)
