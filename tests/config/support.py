"""Credentials made on the spot and short ways to judge a configuration text."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from pushd.config import Config, Finding, InvalidConfig, load_config
from pushd.config.rules import h2_is_strict
from pushd.core.credentials import GOOGLE_TOKEN_URI


@functools.cache
def private_key(kind: str) -> PrivateKeyTypes:
    """A private key: P-256, P-384, RSA or Ed25519. One a process, since RSA keys are slow to make."""
    match kind:
        case "RSA":
            return rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
        case "Ed25519":
            return ed25519.Ed25519PrivateKey.generate()
        case "P-384":
            return ec.generate_private_key(ec.SECP384R1())
        case _:
            return ec.generate_private_key(ec.SECP256R1())


def pem(kind: str = "P-256", form: PrivateFormat = PrivateFormat.PKCS8) -> str:
    return private_key(kind).private_bytes(Encoding.PEM, form, NoEncryption()).decode()


def public_pem(kind: str = "P-256") -> str:
    return private_key(kind).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def service_account(**changes: Any) -> str:
    """A service account's JSON; a field changed to None is left out."""
    fields = {
        "type": "service_account",
        "project_id": "example-project",
        "client_email": "push@example-project.iam.gserviceaccount.com",
        "private_key": pem("RSA"),
        "token_uri": GOOGLE_TOKEN_URI,
    } | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None})


APNS = {
    "key": '"env:APNS_KEY"',
    "key_id": '"ABC123DEFG"',
    "team_id": '"TEAM123456"',
    "bundle_id": '"org.example.app"',
    "environment": '"production"',
}


def apns_block(**changes: str | None) -> str:
    """A [push.apns] block; a key changed to None is left out."""
    keys = APNS | changes
    return "[push.apns]\n" + "".join(f"{name} = {value}\n" for name, value in keys.items() if value is not None)


def environ() -> dict[str, str]:
    """The variables the blocks here name."""
    return {"APNS_KEY": pem(), "FCM_ACCOUNT": service_account()}


FCM_BLOCK = '[push.fcm]\nservice_account = "env:FCM_ACCOUNT"\n'

# Under an old h2 every non-loopback example needs this line as well; a test about something else adds it.
OPEN_H2 = "" if h2_is_strict(importlib.metadata.version("h2")) else "allow_old_h2 = true\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "pushd.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, variables: Mapping[str, str] | None = None) -> Config:
    return load_config(write(folder, text), environ() if variables is None else variables)


def mistakes(folder: Path, text: str, variables: Mapping[str, str] | None = None) -> list[Finding]:
    """The mistakes `text` is refused for; none if it is taken."""
    try:
        load(folder, text, variables)
    except InvalidConfig as exc:
        return list(exc.findings)
    return []


def wrong_keys(folder: Path, text: str, variables: Mapping[str, str] | None = None) -> list[str]:
    return [finding.key for finding in mistakes(folder, text, variables)]
