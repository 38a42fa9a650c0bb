"""Tracebacks for the log: where it went wrong, and the kinds of the errors, without their texts.

The text of an exception quotes whatever failed: a KeyError the key, a ValueError the input, a driver's error the row.
Any of it may be a token, an id or a topic, and nobody who writes `raise` somewhere deep down thinks of that. Frames
carry lines of source, which are no secret.
"""

from __future__ import annotations

import errno
import textwrap
import traceback
from collections.abc import Iterator

_CAUSE = "which was the cause of:"
_CONTEXT = "and meanwhile:"


def render_traceback(error: BaseException) -> str:
    """What `traceback.format_exception` says, with causes and the members of groups, but no error's own text."""
    return "\n".join(_lines(error, set()))


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    chain: list[BaseException] = []
    before: BaseException | None = error
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        chain.append(before)
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    for number, one in enumerate(reversed(chain)):
        if number:
            yield _CONTEXT if one.__cause__ is None else _CAUSE
        yield from _own_lines(one, seen)


def _own_lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    yield "Traceback (most recent call last):"
    yield from (entry.rstrip("\n") for entry in traceback.format_tb(error.__traceback__))
    yield _kind(error)
    if isinstance(error, BaseExceptionGroup):
        for number, member in enumerate(error.exceptions, 1):
            yield f"  member {number} of {len(error.exceptions)}:"
            yield textwrap.indent("\n".join(_lines(member, seen)), "    ")


def _kind(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    number = error.errno if isinstance(error, OSError) else None
    return name if number is None else f"{name} {errno.errorcode.get(number, number)}"
