"""`pushd config`: the configuration in effect, and where each value comes from.

What is shown is decided by a key's type: numbers, switches, choices, addresses and names of files say nothing private,
any other text may be a URL, an id or a secret. A file name that a variable gave is not shown either, as the variable
may have been named by mistake.
"""

from __future__ import annotations

import json as json_text
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, fields, frozen

from pushd.config import shape
from pushd.config.finding import InvalidConfig
from pushd.config.load import Examined, examine
from pushd.config.positions import KeyPath, dotted
from pushd.config.shape import KeyShape
from pushd.config.values import Address
from pushd.secret import REDACTED

ABSENT = "(absent)"


@frozen
class Setting:
    """One key, or an absent block: its value as TOML, `<redacted>` or `(absent)`, and where it comes from."""

    key: str
    value: str
    source: str


def run_show_config(path: Path | None, *, json: bool = False) -> None:
    """Print the settings of `path` (else of PUSHD_CONFIG, else the defaults).

    Raises:
        InvalidConfig: there is a mistake in the configuration.
    """
    found = settings(path, os.environ)
    if json:
        print(json_text.dumps([asdict(setting) for setting in found], indent=2, ensure_ascii=False))
        return
    for setting in found:
        print(f"{setting.key} = {setting.value}  # {setting.source}")


def settings(path: Path | None, environ: Mapping[str, str]) -> list[Setting]:
    """Every key in the order of the documentation.

    Raises:
        InvalidConfig: there is a mistake in the configuration.
    """
    examined = examine(path, environ)
    if examined.config is None:
        raise InvalidConfig(examined.findings)
    return list(_settings(examined, examined.config, ()))


def _settings(examined: Examined, node: Any, path: KeyPath) -> Iterator[Setting]:
    for attribute in fields(type(node)):
        at = (*path, attribute.name)
        value = getattr(node, attribute.name)
        if key := shape.find(at):
            yield _setting(examined, key, value, at)
        elif value is None:
            yield Setting(dotted(at), ABSENT, "default")
        elif isinstance(value, tuple):
            for index, inner in enumerate(value):
                yield from _settings(examined, inner, (*at, index))
        else:
            yield from _settings(examined, value, at)


def _setting(examined: Examined, key: KeyShape, value: Any, at: KeyPath) -> Setting:
    name = dotted(at)
    given = [variable for path, variable in examined.given.items() if path[: len(at)] == at]
    variables = sorted({variable for variable in given if variable is not None})
    source = ", ".join([examined.where(name), *(f"env:{variable}" for variable in variables)]) if given else "default"
    return Setting(name, _shown(key, value, is_from_file=bool(given), is_from_variable=bool(variables)), source)


def _shown(key: KeyShape, value: Any, *, is_from_file: bool, is_from_variable: bool) -> str:
    if value is None:
        return '""' if key.kind is Address else ABSENT
    is_plain = key.kind in (int, bool, Address) or shape.choices(key.kind) != ()
    if not is_from_file or is_plain or (key.kind is Path and not is_from_variable):
        return shape.toml(value)
    return REDACTED
