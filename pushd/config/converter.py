"""The one cattrs converter, and the translation of its errors into mistakes with key paths.

Every hook refuses by raising `_Refused` with a constant text: cattrs' own messages quote the value.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import cattrs
from attrs import frozen, has
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from pushd.config.keys import Config
from pushd.config.positions import KeyPath, dotted
from pushd.config.values import Address, Key, parse_address
from pushd.secret import Secret

Hook = Callable[[Any, Any], Any]


@frozen
class Mistake:
    """Something wrong at `path`; `unknown` says that no such key exists."""

    path: KeyPath
    what: str
    mend: str = ""
    unknown: bool = False

    @property
    def key(self) -> str:
        """The path in dotted form."""
        return dotted(self.path)


class _Refused(ValueError):
    """A value its key does not take; the text is constant."""


def structure(document: dict[str, Any]) -> Config:
    """The configuration in the parsed `document`, rules between keys aside.

    Raises:
        ClassValidationError: for `mistakes_of`.
    """
    return _converter.structure(document, Config)


def mistakes_of(error: BaseValidationError, path: KeyPath = ()) -> Iterator[Mistake]:
    """Every mistake in the error tree of `structure`."""
    for inner in error.exceptions:
        at = (*path, *_step(inner))
        match inner:
            case BaseValidationError():
                yield from mistakes_of(inner, at)
            case ForbiddenExtraKeysError():
                for name in sorted(inner.extra_fields):
                    yield Mistake((*at, name), "", unknown=True)
            case _Refused():
                yield Mistake(at, str(inner))
            case KeyError():
                yield Mistake(at, "is required")
            case _:
                raise AssertionError("a hook failed in an unforeseen way") from inner


def _step(error: BaseException) -> tuple[str | int, ...]:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return (note.name,)
        if isinstance(note, IterableValidationNote):
            return (note.index,)
    return ()


def _exactly(kind: type, words: str) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not kind:  # bool is an int to isinstance
            raise _Refused(f"must be {words}")
        return value

    return hook


def _text(value: Any, _: Any = None) -> str:
    if not isinstance(value, str):
        raise _Refused("must be a string")
    if not value.strip():
        raise _Refused("must not be empty")
    if "\0" in value:
        raise _Refused("must not hold a NUL character")
    return value


def _address(value: Any, _: Any) -> Address:
    address = parse_address(_text(value))
    if address is None:
        raise _Refused("must be a numeric address with a port, like 127.0.0.1:5050 or [::1]:5050")
    return address


def _address_or_off(value: Any, kind: Any) -> Address | None:
    return None if value == "" else _address(value, kind)


def _literal(kind: Any) -> Hook:
    choices = get_args(kind)

    def hook(value: Any, _: Any) -> Any:
        # `in` alone would ask a list for its hash or equality with a string; the text of the value is never shown.
        if not isinstance(value, str) or value not in choices:
            raise _Refused("must be one of " + ", ".join(choices))
        return value

    return hook


def _checked(kind: Any) -> Hook:
    inner, *metadata = get_args(kind)
    about = next(item for item in metadata if isinstance(item, Key))
    structured = _converter.get_structure_hook(inner)

    def hook(value: Any, _: Any) -> Any:
        result = structured(value, inner)
        fault = None if result is None else about.fault(result)
        if fault is not None:
            raise _Refused(fault)
        return result

    return hook


def _tuple(kind: Any) -> Hook:
    as_list: Any = types.GenericAlias(list, get_args(kind)[:1])
    structured = _converter.get_structure_hook(as_list)

    def hook(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Refused("must be a list")
        return tuple(structured(value, as_list))

    return hook


def _table(kind: Any) -> Hook:
    structured = make_dict_structure_fn(kind, _converter, _cattrs_forbid_extra_keys=True)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise _Refused("must be a table")
        return structured(value, kind)

    return hook


def _origin_is(origin: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


_converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
_converter.register_structure_hook_factory(has, _table)
_converter.register_structure_hook_factory(_origin_is(tuple), _tuple)
_converter.register_structure_hook_factory(_origin_is(Literal), _literal)
_converter.register_structure_hook_factory(_origin_is(Annotated), _checked)
_converter.register_structure_hook(int, _exactly(int, "a whole number"))
_converter.register_structure_hook(bool, _exactly(bool, "true or false"))
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook(Secret, lambda value, _: Secret(_text(value)))
_converter.register_structure_hook(Path, lambda value, _: Path(_text(value)))
_converter.register_structure_hook(Address, _address)
_converter.register_structure_hook(Address | None, _address_or_off)
