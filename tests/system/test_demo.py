"""The demo shows what it promises, and says so when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pushd.ops import demo
from pushd.ops.demo import DemoFailed


def test_pushes_arrive_on_all_channels() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pushd", "demo", "--json", "--seconds", "1"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    expected = demo.PUBLISHES_PER_S * demo.RECIPIENTS_PER_CHANNEL
    assert summary["ok"] is True
    assert summary["received"] == {"apns": expected, "fcm": expected, "http": expected}
    assert summary["counted_by_server"] == 3 * expected


async def test_server_that_does_not_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, _fakes: object) -> tuple[Path, dict[str, str]]:
        return folder / "absent.toml", {}

    monkeypatch.setattr(demo, "_configure", broken)
    cause = pytest.RaisesExc(DemoFailed, match=r"the server did not start: pushd: .*cannot be read")
    with pytest.RaisesGroup(cause, flatten_subgroups=True):
        await demo.run_demo(as_json=True, seconds=1)
