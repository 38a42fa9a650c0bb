"""The demo shows what it promises, and says so when it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import trio

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


async def test_sigterm_ends_it_and_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory(prefix="pushd-") as folder:  # not tmp_path: too long for a socket
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "pushd", "demo", "--seconds", "60"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": folder},
        )
        with trio.fail_after(120):
            # Another process makes it: the server's PostgreSQL is being started then.
            while not list(Path(folder).glob("pushd-demo-*/data/lock")):  # noqa: ASYNC110
                await trio.sleep(0.02)
            process.terminate()
            assert await process.wait() == 128 + signal.SIGTERM
        assert os.listdir(folder) == []
        assert not [argv for argv in Path("/proc").glob("[0-9]*/cmdline") if folder in _text(argv)]


def _text(argv: Path) -> str:
    try:
        return argv.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def test_server_that_does_not_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, _fakes: object) -> tuple[Path, dict[str, str]]:
        return folder / "absent.toml", {}

    monkeypatch.setattr(demo, "_configure", broken)
    cause = pytest.RaisesExc(DemoFailed, match=r"the server did not start: pushd: .*cannot be read")
    with pytest.RaisesGroup(cause, flatten_subgroups=True):
        await demo.run_demo(as_json=True, seconds=1)
