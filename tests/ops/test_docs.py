"""What the documents promise is there: links, log events, exit codes, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pushd import __main__ as command_line
from pushd.core import webhook_answers
from pushd.model import Gone, Rejected, Transient
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
    fields: dict[str, set[str]] = {}
    for event, level, names in events_logged():
        assert level == documented[event][0], event
        fields.setdefault(event, set()).update(documented[event][1] if names is None else names)
    assert len(fields) > 20
    assert {event: documented[event][1] for event in fields} == fields


def test_exit_codes_are_explained() -> None:
    codes = re.findall(r"^\| (\d+) \|", OPERATIONS, re.M)
    assert codes == ["0", "1", "2", str(command_line.EXIT_CRASHED)]
    assert command_line.EXIT_CANNOT_START == 1


def test_reasons_of_ended_terms_are_explained() -> None:
    section = OPERATIONS.partition("## The holder changes often")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(stopped|stepped_down|ownership_lost|database_\w+)`", section)) == set(TERM_ENDS)


def test_reasons_of_webhook_attempts_are_explained() -> None:
    section = OPERATIONS.partition("### Reasons of webhook attempts")[2].partition("\n## ")[0]
    documented = {
        (reason, kind)
        for reasons, kind in re.findall(r"^\| (`[^|]+`) \| (\w+) \|", section, re.M)
        for reason in re.findall(r"`(\w+)`", reasons)
    }
    outcomes = [
        *(value for value in vars(webhook_answers).values() if isinstance(value, Transient | Rejected)),
        *map(webhook_answers.judge_status, (101, 301, 404, 410, 429, 503, 600)),
    ]
    expected = {
        (f"status_{outcome.status}", "gone")
        if isinstance(outcome, Gone)
        else (outcome.reason, "rejected" if isinstance(outcome, Rejected) else "transient")
        for outcome in outcomes
        if isinstance(outcome, Gone | Transient | Rejected)
    }
    assert documented == expected | {("internal", "transient")}  # the last one is the dispatcher's own


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
