"""Reads the statements of `sql/` by name. The only place that vouches for SQL text."""

from __future__ import annotations

import functools
from pathlib import Path


def _sql_root() -> Path:
    """`sql/` of the checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_sql"
    return installed if installed.is_dir() else package.parent / "sql"


SQL_ROOT = _sql_root()


@functools.cache
def query(name: str) -> str:
    """The text of `sql/queries/<name>.sql`, one statement.

    Raises:
        FileNotFoundError: no such statement; a mistake in this program.
    """
    return (SQL_ROOT / "queries" / f"{name}.sql").read_text(encoding="utf-8")
