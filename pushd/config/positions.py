"""On which line of a TOML text each key stands.

The standard parser keeps no positions, and a style-preserving one costs a dependency for one number. So the text is
scanned a second time, after `tomllib` has accepted it: syntax is known to be right, and the scan only has to step over
values without being fooled by what stands inside strings. Where it meets something it does not know it stops and
leaves the rest without a line, which costs a line number and nothing else.
"""

from __future__ import annotations

import json
import re
import tomllib

KeyPath = tuple[str | int, ...]

_BARE_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
# Multi-line strings first, since `""` would match as an empty string; then the two single-line forms; then what has
# no delimiters, where only a date may hold a space. A multi-line string may end in up to five quotes.
_SCALAR = re.compile(
    r'''"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*"{3,5}'''
    r"""|'{3}(?:[^']|'{1,2}(?!'))*'{3,5}"""
    r'''|"(?:[^"\\\n]|\\.)*"'''
    r"""|'[^'\n]*'"""
    r"""|\d{4}-\d{2}-\d{2}[ ]\d[^\s,\]}#]*"""
    r"""|[^\s,\[\]{}#]+"""
)


def dotted(path: KeyPath) -> str:
    """`path` in one line, with names quoted that would otherwise be ambiguous or break the line."""
    return ".".join(part if _BARE_NAME.match(part) else json.dumps(part) for part in map(str, path))


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, counted from 1, of every key, table header and array element of the valid TOML `text`."""
    return _Scan(text.replace("\r\n", "\n")).run()


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._lines: dict[KeyPath, int] = {}
        self._arrays: dict[KeyPath, int] = {}  # index of the newest element of each array of tables

    def run(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        try:
            while not self._skip_blank():
                if self._take("[["):
                    table = self._header(array=True)
                elif self._take("["):
                    table = self._header(array=False)
                else:
                    self._pair(table)
        except (_Lost, RecursionError, tomllib.TOMLDecodeError):
            pass
        return self._lines

    def _header(self, *, array: bool) -> KeyPath:
        line = self._line
        self._skip_blank()
        names = self._names()
        self._skip_blank()
        self._expect("]]" if array else "]")
        table: KeyPath = ()
        for depth, name in enumerate(names, start=1):
            table = (*table, name)
            self._mark(table, line)
            if array and depth == len(names):
                self._arrays[table] = self._arrays.get(table, -1) + 1
            if table in self._arrays:
                table = (*table, self._arrays[table])
                self._mark(table, line)
        return table

    def _pair(self, table: KeyPath) -> None:
        line = self._line
        path = table
        for name in self._names():
            path = (*path, name)
            self._mark(path, line)
        self._skip_blank()
        self._expect("=")
        self._skip_blank()
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._take("["):
            index = 0
            while not self._closed("]"):
                self._mark((*path, index), self._line)
                self._value((*path, index))
                index += 1
        elif self._take("{"):
            while not self._closed("}"):
                self._pair(path)
        else:
            self._match(_SCALAR)

    def _closed(self, bracket: str) -> bool:
        self._skip_blank()
        self._take(",")
        self._skip_blank()
        return self._take(bracket)

    def _names(self) -> list[str]:
        names = [self._name()]
        while dot := _DOT.match(self._text, self._at):
            self._at = dot.end()
            names.append(self._name())
        return names

    def _name(self) -> str:
        name = self._match(_KEY)
        # The standard parser undoes the escapes of a quoted name.
        return next(iter(tomllib.loads(f"{name} = 0"))) if name[0] in "\"'" else name

    def _mark(self, path: KeyPath, line: int) -> None:
        self._lines.setdefault(path, line)

    def _skip_blank(self) -> bool:
        self._match(_BLANK)
        return self._at == len(self._text)

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise _Lost

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise _Lost
        self._line += found.group().count("\n")
        self._at = found.end()
        return found.group()


class _Lost(Exception):
    """The scan met something it does not know."""
