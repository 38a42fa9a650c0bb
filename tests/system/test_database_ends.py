"""An embedded PostgreSQL that ends by itself takes along whoever started it, with a line that says so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import base_config, running_server


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="pushd-"))  # not tmp_path: too long for a socket
    yield place
    shutil.rmtree(place)


def end_postgres(data_dir: Path) -> None:
    """End it without a word to its parent."""
    os.kill(int((data_dir / "postgres" / "postmaster.pid").read_text().splitlines()[0]), signal.SIGQUIT)


def test_db_ends_with_its_server(folder: Path) -> None:
    argv = [sys.executable, "-m", "pushd", "db", "--data-dir", str(folder / "data")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("postgresql://")
        end_postgres(folder / "data")
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the embedded PostgreSQL ended by itself" in said
    assert "Traceback" not in said


async def test_serve_ends_with_its_server(folder: Path) -> None:
    async with running_server(folder, base_config()) as server:
        end_postgres(folder / "data")
        assert await server.wait_exit() == 1
        await server.wait_ended()
        assert "the embedded PostgreSQL ended by itself" in server.lines[-1]
