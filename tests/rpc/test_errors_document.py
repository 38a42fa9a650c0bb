"""docs/errors.md lists every status the server can answer, with its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pushd.core import tokens
from pushd.core.checks import Refusal
from pushd.errors import StoreInvariant, StoreTimeout, StoreUnavailable
from pushd.rpc.settings import RpcSettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text()
ROWS = [line for line in DOCUMENT.splitlines() if line.startswith("|")]

# What the client side of the connection layer reports is no answer of the server.
SOURCES = [
    path
    for folder in ("core", "backend", "rpc")
    for path in sorted((ROOT / "pushd" / folder).rglob("*.py"))
    if "client" not in path.stem and "gen" not in path.parts
]
LITERAL = re.compile(r'Code\.([A-Z_]+),\s*"([^"]+)"')
STATUSES = sorted({found for path in SOURCES for found in LITERAL.findall(path.read_text())})


def is_listed(code: str, text: str) -> bool:
    return any(f"| {code} |" in row and f"`{text}`" in row for row in ROWS)


@pytest.mark.parametrize(("code", "text"), STATUSES, ids=[text for _, text in STATUSES])
def test_status_in_the_source_is_in_the_document(code: str, text: str) -> None:
    assert is_listed(code, text)


def test_sources_are_found() -> None:
    assert len(STATUSES) > 20
    assert {(refusal.code.name, refusal.text) for refusal in Refusal} <= set(STATUSES)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("UNAVAILABLE", StoreUnavailable.text),
        ("DEADLINE_EXCEEDED", StoreTimeout.text),
        ("INTERNAL", StoreInvariant.text),
    ],
)
def test_storage_status_is_in_the_document(code: str, text: str) -> None:
    assert is_listed(code, text)


REJECTIONS = [value for value in vars(tokens).values() if isinstance(value, tokens.Rejection)]


@pytest.mark.parametrize("rejection", REJECTIONS, ids=lambda rejection: rejection.reason)
def test_rejection_of_a_token_is_in_the_document(rejection: tokens.Rejection) -> None:
    assert is_listed(rejection.code.name, rejection.message)


def test_fixed_limits_in_the_document_are_those_of_the_edge() -> None:
    text, limits = " ".join(DOCUMENT.split()), RpcSettings()
    assert f"{limits.send_bytes // 2**20} MiB of responses wait for callers" in text
    assert f"{limits.send_bytes // 2**21} MiB of responses wait on one connection" in text
    assert f"for {limits.stall_s:.0f} s nothing moved" in text
    assert f"unanswered for {limits.ping_s:.0f} s" in text
    assert f"more than {limits.abuse_burst} at once, or {limits.abuse_per_s:.0f} a second" in text


LISTED = sorted(
    {text for row in ROWS for cell in re.findall(r"\| [A-Z_]+ \|([^|]+)\|", row) for text in cell.split("`")[1::2]}
)


@pytest.mark.parametrize("text", LISTED)
def test_text_in_the_document_is_in_the_source(text: str) -> None:
    """No row outlives its status."""
    everything = "".join(path.read_text() for path in [*SOURCES, ROOT / "pushd" / "errors.py"])
    assert text.rstrip("…") in everything
