"""Tracebacks tell where and what kind, and never what an error says."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from pushd.telemetry import Event, configure_logging, get_logger
from pushd.tracebacks import render_traceback

PRIVATE = "token-of-somebody"


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError(PRIVATE)


def wrong_key() -> None:
    registered: dict[str, int] = {}
    registered[PRIVATE]


def caused() -> None:
    try:
        wrong_key()
    except KeyError as error:
        raise ValueError(PRIVATE) from error


def meanwhile() -> None:
    try:
        wrong_key()
    finally:
        int(PRIVATE)


def hidden() -> None:
    try:
        wrong_key()
    except KeyError:
        raise LookupError(PRIVATE) from None


def group() -> None:
    members = []
    for one in (caused, wrong_key):
        try:
            one()
        except Exception as error:
            members.append(error)
    raise ExceptionGroup(PRIVATE, [ExceptionGroup(PRIVATE, members), OSError(errno.ECONNRESET, PRIVATE)])


def noted() -> None:
    error = Odd(PRIVATE)
    error.add_note(PRIVATE)
    raise error


def circle() -> None:
    first, second = ValueError(PRIVATE), KeyError(PRIVATE)
    first.__cause__, second.__cause__ = second, first
    raise first


def foreign() -> None:
    raise socket.gaierror(socket.EAI_NONAME, PRIVATE)


@pytest.mark.parametrize(
    ("fail", "kinds"),
    [
        (wrong_key, ["KeyError"]),
        (caused, ["KeyError", "which was the cause of:", "ValueError"]),
        (meanwhile, ["KeyError", "and meanwhile:", "ValueError"]),
        (hidden, ["LookupError"]),
        (noted, [f"{__name__}.Odd"]),
        (circle, ["KeyError", "which was the cause of:", "ValueError"]),
        (foreign, [f"socket.gaierror {socket.EAI_NONAME}"]),
        (
            group,
            [
                "ExceptionGroup",
                "  member 1 of 2:",
                "    ExceptionGroup",
                "      member 1 of 2:",
                "        KeyError",
                "        which was the cause of:",
                "        ValueError",
                "      member 2 of 2:",
                "        KeyError",
                "  member 2 of 2:",
                "    ConnectionResetError ECONNRESET",
            ],
        ),
    ],
)
def test_kinds_and_places_without_texts(fail: object, kinds: list[str]) -> None:
    with pytest.raises(BaseException) as caught:
        fail()  # type: ignore[operator]
    text = render_traceback(caught.value)
    assert PRIVATE not in text
    assert f'File "{__file__}"' in text
    assert f"in {fail.__name__}" in text  # type: ignore[attr-defined]
    source = {line.strip() for line in Path(__file__).read_text().splitlines()}
    places = ("Traceback", "File", "^", "~")
    lines = [line for line in text.splitlines() if line.strip() not in source]
    assert [line for line in lines if not line.strip().startswith(places)] == kinds


def test_a_long_chain_is_told_to_its_end() -> None:
    last: Exception | None = None
    for _ in range(5_000):
        error = ValueError(PRIVATE)
        error.__cause__ = last
        last = error
    assert last is not None
    assert render_traceback(last).count("which was the cause of:") == 4_999


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_log_is_written_so(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", log_format)
    try:
        caused()
    except ValueError as error:
        get_logger().error(Event.RPC_FAILED, exc_info=error)
    said = capsys.readouterr().err
    assert PRIVATE not in said
    if log_format == "json":
        said = json.loads(said)["exception"]
    assert "in wrong_key" in said
    assert said.rstrip().endswith("ValueError")
