"""Certificates for the rpc tests."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from pushd.rpc.server import require_http2
from tests.rpc import harness


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> harness.Tls:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    client.set_alpn_protocols(["h2"])
    ca_pem = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_pem))
    return harness.Tls(require_http2(server), client, ca_pem)


@pytest.fixture(params=["clear", "tls"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> harness.Tls | None:
    """Runs a test twice: servers, and clients that are not told otherwise, speak clear text first and then TLS."""
    spoken = request.getfixturevalue("tls") if request.param == "tls" else None
    monkeypatch.setattr(harness, "transport", spoken)
    return spoken
