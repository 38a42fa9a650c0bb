"""Certificates for the rpc tests."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from attrs import frozen

from pushd.rpc.server import require_http2


@frozen
class Tls:
    """A certificate for localhost and who trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    ca_pem: Path


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> Tls:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    client.set_alpn_protocols(["h2"])
    ca_pem = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_pem))
    return Tls(require_http2(server), client, ca_pem)
