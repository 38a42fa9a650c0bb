"""Options and what all fault runs share: one `pushd db`, the fakes, the random seeds, the summary."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fakes.launch import launch
from pushd.model import Channel
from tests.faults.cluster import DbProcess, data_folder, running_db
from tests.faults.world import Fakes, Report, Tell

RECORD = "200000"
_lines: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--short", action="store_true", help="each fault once, mildly; else ROUNDS times")
    group.addoption("--rounds", type=int, default=5, help="how often each fault is tried without --short")
    group.addoption("--fault-seed", type=int, help="the first seed; printed with every line, random if not given")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        config = metafunc.config
        first = config.getoption("--fault-seed")
        if first is None:
            first = random.SystemRandom().randrange(10**6)
        rounds = 1 if config.getoption("--short") else config.getoption("--rounds")
        metafunc.parametrize("seed", range(first, first + rounds), ids=lambda seed: f"seed{seed}")


@pytest.fixture
def is_short(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--short"))


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(scope="session")
def fakes() -> Iterator[Fakes]:
    with ExitStack() as stack:
        names = {Channel.APNS: "apns", Channel.FCM: "fcm", Channel.HTTP: "webhooks"}
        yield {channel: stack.enter_context(launch(name, "--record", RECORD)) for channel, name in names.items()}


@pytest.fixture
def folder(seed: int) -> Iterator[Path]:
    """A place for a run's files. Every run has one, and with it a seed, so that every run can be repeated."""
    random.seed(seed)  # what a `World` takes its own random numbers from
    place = Path(tempfile.mkdtemp(prefix="pushd-"))  # not tmp_path: too long for a socket
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def session_db() -> Iterator[DbProcess]:
    with data_folder() as place, running_db(place) as running:
        yield running


@pytest.fixture
def db(session_db: DbProcess) -> DbProcess:
    """One `pushd db` for all runs that do not need one of their own, up again whatever the run before did to it."""
    session_db.mend()
    return session_db


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Notes what a run came to, for the summary."""
    began = time.monotonic()

    def note(report: Report) -> None:
        _lines.append(f"{request.node.name} ({time.monotonic() - began:.0f} s): {report.line()}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _lines:
        terminalreporter.write_line(line)
