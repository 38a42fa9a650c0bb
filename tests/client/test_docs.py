"""The documented example does what the document says, from an empty folder on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trio
import trustme

import pushd.client
from pushd.client import ClientError, errors
from tests.support.server import running_server

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "client.md"


ERRORS = sorted(name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, ClientError))


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def make_certificate(folder: Path) -> None:
    """By the documented command; where there is no openssl, the same by other means."""
    if shutil.which("openssl"):
        subprocess.run(block("sh"), shell=True, cwd=folder, check=True, capture_output=True)
        return
    certificate = trustme.CA().issue_cert("localhost")
    (folder / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_exported_and_explained(name: str) -> None:
    assert name in pushd.client.__all__
    assert errors.__doc__ is not None
    assert f" {name} " in errors.__doc__.replace("\n", " ")
    if name != "ClientError":
        rows = [line.split("|")[1] for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
        assert any(f"`{name}`" in row for row in rows)


def test_status_of_a_failed_call_can_be_compared() -> None:
    assert pushd.client.CallFailed(pushd.client.Code.UNAVAILABLE).code is pushd.client.Code.UNAVAILABLE


@pytest.mark.slow
async def test_example_goes_from_nothing_to_a_received_push(own_database: str, tmp_path: Path) -> None:
    make_certificate(tmp_path)
    (tmp_path / "app.py").write_text(block("python"))
    config = block("toml").replace("127.0.0.1:5050", "127.0.0.1:0")
    assert "127.0.0.1:0" in config
    async with _server(tmp_path, config, own_database) as server:
        result = await trio.run_process(
            [sys.executable, "app.py"],
            cwd=tmp_path,
            env={
                **os.environ,
                "BACKEND": f"http://{server.grpc}",
                "PYTHONPATH": str(DOCUMENT.parents[1]),
                "PYTHONWARNINGS": "error",
            },
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert result.stderr == b""
    assert result.stdout.decode() == block("text")
    assert result.returncode == 0


def _server(folder: Path, config: str, database_url: str):
    document = tomllib.loads(config)
    document["push"]["http"]["ca_file"] = str(folder / document["push"]["http"]["ca_file"])
    document["server"]["log_format"] = "json"
    document["telemetry"] = {"metrics_listen": "127.0.0.1:0"}
    document["database"] = {"url": database_url}  # the suite's PostgreSQL, which spares starting another
    return running_server(folder, document)
