"""Webhook URLs against a name server of our own in a network namespace, which the C library asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.channels.own_dns import FAILING, NAMES

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def _refused() -> bool:
    return shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0


@pytest.mark.skipif(_refused(), reason="namespaces are refused here")
def test_S037_a_chain_of_aliases_counts_for_where_it_ends() -> None:
    command = [*NAMESPACE, sys.executable, "-m", "tests.channels.own_dns"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert len(verdicts) == len(NAMES) + len(FAILING) + 1
    allowed = {name for name, refusal in verdicts.items() if refusal is None}
    assert allowed == {"plain.example", "alias.example", "alias-public-v6.example"}
    unresolved = {name for name, refusal in verdicts.items() if refusal == "WEBHOOK_UNRESOLVED"}
    assert unresolved == set(FAILING)
