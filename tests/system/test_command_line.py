"""The command line's own text: help that fits a terminal, and errors that repeat nothing private."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import cyclopts
import pytest
from rich.console import Console

from pushd import __main__ as command_line
from pushd.errors import ConfigError, StartError, StoreTimeout, UsageError
from pushd.ops.health import run_health


def commands(app: cyclopts.App = command_line.app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name in app:
        if not name.startswith("-"):
            yield from commands(app[name], (*path, name))


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_help_fits_80_columns_and_describes_everything(command: tuple[str, ...]) -> None:
    out = io.StringIO()
    command_line.app.help_print(command, console=Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Usage: {' '.join(('pushd', *command))}")
    assert re.match(r"[A-Z]", lines[2]), "what it does, as a sentence"
    entries = [line[1:-1] for line in lines if line.startswith("│")]
    names = [entry for entry in entries if re.match(r" (\*  |   )?\S", entry)]
    assert all(re.match(r" (\*  |   )?\S+( [A-Z]+| \(-\w\))?  +\S", name) for name in names), names


def test_every_command_is_among_them() -> None:
    assert {("serve",), ("cursor", "skip"), ("send-test",)} <= set(commands())
    assert len(list(commands())) > 12


@pytest.mark.parametrize("wrap", [False, True])
def test_database_error_is_one_line_without_the_drivers_text(wrap: bool, capsys: pytest.CaptureFixture[str]) -> None:
    error = StoreTimeout()
    error.__cause__ = ValueError("DETAIL: Key (recipient_id)=(private) exists")
    code = command_line._exit_code(BaseExceptionGroup("tasks", [error, StartError("no way")]) if wrap else error)
    assert code == command_line.EXIT_CANNOT_START
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["pushd: database operation timed out", *(["pushd: no way"] if wrap else [])]


def test_wrong_argument_has_the_code_of_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line._exit_code(UsageError("--recipient must be")) == 2
    assert command_line._exit_code(StartError("no database")) == command_line.EXIT_CANNOT_START
    assert capsys.readouterr().err == "pushd: --recipient must be\npushd: no database\n"


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", ":5050", "127.0.0.1:x", ""])
async def test_health_of_an_address_that_is_none_is_a_wrong_command_line(address: str) -> None:
    with pytest.raises(UsageError, match="must be host:port"):
        await run_health(address, "", tls=False, ca_file=None)


def test_every_mistake_has_its_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = [ConfigError("a: is wrong\nb: is wrong"), ConfigError("a: is wrong")]
    assert command_line._exit_code(BaseExceptionGroup("", mistakes)) == command_line.EXIT_CANNOT_START
    assert capsys.readouterr().err == "pushd: a: is wrong\npushd: b: is wrong\n"
