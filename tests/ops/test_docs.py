"""What the documents promise is there: links, log events, exit codes, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pushd import __main__ as command_line
from pushd.telemetry import TERM_ENDS, Event
from tests.ops.test_kit import headings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
OPERATIONS = (DOCS / "operations.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        if anchor:
            assert anchor in headings(found), target


def events_logged() -> Iterator[tuple[str, str, frozenset[str] | None]]:
    """(event, level, fields) of each log call in the program; None for fields that are not written out there."""
    for file in (ROOT / "pushd").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name) and first.value.id == "Event":
                    names = [keyword.arg for keyword in node.keywords]
                    fields = None if None in names else frozenset(str(name) for name in names) - {"exc_info"}
                    yield str(Event[first.attr]), node.func.attr, fields


def documented_events() -> dict[str, tuple[str, set[str]]]:
    section = OPERATIONS.partition("## Log events")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", section, re.M)
    assert len({event for event, _, _ in rows}) == len(rows)
    return {event: (level, set(re.findall(r"\w+", fields))) for event, level, fields in rows}


def test_every_event_is_explained() -> None:
    assert documented_events().keys() == {str(event) for event in Event}


def test_levels_and_fields_of_events_are_those_of_the_program() -> None:
    documented = documented_events()
    seen = 0
    for event, level, fields in events_logged():
        seen += 1
        assert documented[event][0] == level, event
        assert fields is None or documented[event][1] == fields, event
    assert seen > 20


def test_exit_codes_are_explained() -> None:
    codes = re.findall(r"^\| (\d+) \|", OPERATIONS, re.M)
    assert codes == ["0", "1", "2", str(command_line.EXIT_CRASHED)]
    assert command_line.EXIT_CANNOT_START == 1


def test_reasons_of_ended_terms_are_explained() -> None:
    section = OPERATIONS.partition("## The holder changes often")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(stopped|ownership_lost|database_\w+)`", section)) == set(TERM_ENDS)


def commands() -> set[str]:
    """Every command, `cursor skip` and the like as two words."""
    names = {name for name in command_line.app if not name.startswith("-")}
    return names | {f"cursor {name}" for name in command_line.cursor if not name.startswith("-")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_are_named_exist(document: Path) -> None:
    known = commands()
    text = document.read_text()
    code = "\n".join([*re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S), *re.findall(r"`([^`\n]+)`", text)])
    for first, second in re.findall(r"^\s*pushd ([a-z]+(?:-[a-z]+)*)(?: ([a-z]+))?", code, re.M):
        assert first in known, first
        if first == "cursor":
            assert f"cursor {second}" in known, second


def test_every_command_is_named_in_a_document() -> None:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    for command in commands() - {"cursor"}:
        assert f"pushd {command}" in text, command
