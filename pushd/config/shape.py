"""The keys and tables of the configuration as a flat list, read off the classes."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs
from attrs import NOTHING, frozen

from pushd.config.keys import Config
from pushd.config.positions import KeyPath
from pushd.config.values import Address, Key
from pushd.secret import Secret


@frozen
class KeyShape:
    """One key: where it is, what it takes, what it defaults to."""

    path: str
    kind: Any
    """The type without None and without annotations."""
    optional: bool
    default: Any
    about: Key

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def required(self) -> bool:
        """Whether a block that has it missing is refused."""
        return self.default is NOTHING

    @property
    def may_be_left_out(self) -> bool:
        """Whether the default is fit advice for somebody who meant to set the key.

        That of a number, a switch or a choice is. Without an address, a file or a list, pushd would do something else:
        start a database of its own, send to any host, accept tokens for others.
        """
        return self.kind in (int, bool) or (choices(self.kind) != () and not self.required)

    @property
    def example_toml(self) -> str:
        """A value as it would be written in the file."""
        return toml(self.default if self.about.example is None else self.about.example)


@frozen
class TableShape:
    """One table or array of tables."""

    path: str
    cls: type
    optional: bool
    repeated: bool

    @property
    def doc(self) -> str:
        """What the table is for."""
        return (self.cls.__doc__ or "").strip()


def toml(value: Any) -> str:
    """`value` in TOML; None, which TOML cannot say, as nothing."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
        case str() | Address() | Path():
            return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    raise TypeError("no such value in a configuration")


def _table_class(kind: Any) -> type | None:
    return kind if isinstance(kind, type) and attrs.has(kind) and kind is not Address else None


def _bare(kind: Any) -> tuple[Any, bool, Key | None]:
    about = None
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
        about = next((item for item in metadata if isinstance(item, Key)), None)
    optional = get_origin(kind) in (Union, types.UnionType)
    if optional:
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    return kind, optional, about


def _walk(cls: type, prefix: str) -> tuple[dict[str, KeyShape], dict[str, TableShape]]:
    keys: dict[str, KeyShape] = {}
    tables: dict[str, TableShape] = {}
    for attribute in attrs.fields(cls):
        path = f"{prefix}{attribute.name}"
        kind, optional, about = _bare(attribute.type)
        repeated = get_origin(kind) is tuple
        table = _table_class(get_args(kind)[0] if repeated else kind)
        if table is not None:
            tables[path] = TableShape(path, table, optional, repeated)
            more_keys, more_tables = _walk(table, f"{path}.")
            keys |= more_keys
            tables |= more_tables
        else:
            assert about is not None, f"{path} is not described"
            keys[path] = KeyShape(path, kind, optional, attribute.default, about)
    return keys, tables


KEYS, TABLES = _walk(Config, "")
SECRET_KEYS = frozenset(path for path, key in KEYS.items() if key.kind is Secret)


def choices(kind: Any) -> tuple[str, ...]:
    """The values of an enumerated key, or nothing."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def find(path: KeyPath) -> KeyShape | None:
    """The key that stands at `path`, whatever its place in a list."""
    return KEYS.get(".".join(part for part in path if isinstance(part, str)))
