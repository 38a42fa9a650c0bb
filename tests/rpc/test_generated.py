"""The generated code is current, and lives beside other packages' code for the same protocols."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pushd.rpc import generate


def test_the_generated_code_is_what_the_protos_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", "--check"])
    assert generate.main() == 0


_OURS = "from pushd.rpc.gen.grpc.health.v1 import health_pb2 as ours; from pushd.rpc.gen.google.rpc import status_pb2; \
from pushd.rpc.gen.grpc.reflection.v1alpha import reflection_pb2\n"
_THEIRS = "import grpc_health.v1.health_pb2 as theirs, grpc_reflection.v1alpha.reflection_pb2\n"
_CHECK = """
assert theirs.HealthCheckRequest.FromString(ours.HealthCheckRequest(service="x").SerializeToString()).service == "x"
status = status_pb2.Status(code=3)
status.details.add().Pack(ours.HealthCheckRequest(service="x"))
back = ours.HealthCheckRequest()
assert status_pb2.Status.FromString(status.SerializeToString()).details[0].Unpack(back) and back.service == "x"
"""


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_it_coexists_with_grpcios_packages_in_either_order(first: str) -> None:
    imports = _OURS + _THEIRS if first == "ours" else _THEIRS + _OURS
    subprocess.run([sys.executable, "-c", imports + _CHECK], check=True, timeout=60)


def test_importing_purerpc_changes_nothing_for_other_users_of_h2() -> None:
    code = """
import h2.stream, h2.connection
before, send = dict(h2.stream._transitions), h2.connection.H2Connection.data_to_send
from pushd.rpc._purerpc import purerpc
assert h2.stream._transitions == before and h2.connection.H2Connection.data_to_send is send
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
