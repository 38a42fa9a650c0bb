"""From a file to a `Config`, with every mistake found on the way.

read → parse → resolve `env:NAME` → structure → rules. Nothing stops at the first mistake: a key that is wrong is taken
out and the rest is judged on, and a mistake that only follows from one already reported is not reported again.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen
from cattrs.errors import ClassValidationError

from pushd.config import shape
from pushd.config.converter import Mistake, mistakes_of, structure
from pushd.config.finding import Finding, InvalidConfig, Severity
from pushd.config.keys import Config
from pushd.config.positions import KeyPath, key_lines
from pushd.config.rules import broken_rules
from pushd.core.expiry import ExpiryOutOfRange, expires_at_ns

CONFIG_VARIABLE = "PUSHD_CONFIG"
ENV_PREFIX = "env:"
_MAX_DEPTH = 32  # no key of ours lies deeper than 4
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


@frozen
class Examined:
    """What a configuration file came to: a `Config` exactly when no finding is an error."""

    config: Config | None
    findings: tuple[Finding, ...]
    file: Path | None
    lines: Mapping[KeyPath, int] = field(factory=dict, repr=False)
    literal: frozenset[str] = frozenset()
    """The secret keys whose value stands in the file itself."""
    given: Mapping[KeyPath, str | None] = field(factory=dict, repr=False)
    """Every value that the file gives, with the environment variable it is taken from, if it is."""

    def where(self, key: str) -> str:
        """`file:line` of the dotted `key`, or of the nearest table around it."""
        path = (int(part) if part.isdecimal() else part for part in key.split("."))
        return _where(self.file, self.lines, tuple(path))


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration of `path`, else of the file PUSHD_CONFIG names, else the defaults.

    Raises:
        InvalidConfig: (a ConfigError) with one line for every mistake.
    """
    examined = examine(path, environ)
    if examined.config is None:
        raise InvalidConfig(finding for finding in examined.findings if finding.severity is Severity.ERROR)
    return examined.config


def check_clock(config: Config, now_ns: int) -> None:
    """Check that what lasts from `now_ns`, nanoseconds since 1970 by the database's clock, ends in 64 bits.

    Raises:
        InvalidConfig: a lifetime is too long for this clock.
    """
    lifetimes = {
        "push.recipient_ttl_seconds": config.push.recipient_ttl_seconds,
        "retention.group_message_seconds": config.retention.group_message_seconds,
        "retention.welcome_seconds": config.retention.welcome_seconds,
        "retention.key_package_seconds": config.retention.key_package_seconds,
    }
    findings = []
    for key, lifetime_s in lifetimes.items():
        try:
            expires_at_ns(now_ns, lifetime_s)
        except ExpiryOutOfRange:
            what = "counted from the database's clock ends after 2262, beyond 64 bits of nanoseconds"
            findings.append(Finding(Severity.ERROR, key, "database clock", what, "lower it, or set that clock right"))
    if findings:
        raise InvalidConfig(findings)


def examine(path: Path | None, environ: Mapping[str, str]) -> Examined:
    """Read and judge the configuration; `path` and the defaults as for `load_config`."""
    if path is None and environ.get(CONFIG_VARIABLE):
        path = Path(environ[CONFIG_VARIABLE])
    text = "" if path is None else _read(path)
    document = text if isinstance(text, Finding) else _parse(text, path)
    if isinstance(document, Finding):
        return Examined(None, (document,), path)
    assert isinstance(text, str)
    lines = key_lines(text)
    literal = frozenset(
        key for key in shape.SECRET_KEYS if isinstance(found := _value_at(document, key), str) and not _is_env(found)
    )
    given = dict(_given(document, ()))
    config, mistakes = _judge(document, environ)
    mistakes.sort(key=lambda mistake: (_line(lines, mistake.path), mistake.key))
    findings = tuple(
        Finding(Severity.ERROR, mistake.key, _where(path, lines, mistake.path), mistake.what, mistake.mend)
        for mistake in mistakes
    )
    return Examined(None if findings else config, findings, path, lines, literal, given)


def _read(path: Path) -> str | Finding:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        return _whole_file(path, f"cannot be read: {exc.strerror}", "check the path and the file's permissions")
    except ValueError:  # UnicodeDecodeError would quote bytes of the file, hence no detail
        return _whole_file(path, "is not UTF-8 text", "save the file as UTF-8")


def _parse(text: str, path: Path | None) -> dict[str, Any] | Finding:
    try:
        document = tomllib.loads(text)
        _check_depth(document)
        return document
    except tomllib.TOMLDecodeError as exc:
        # The parser's own text names a position and at most one character.
        return _whole_file(path, f"is not valid TOML: {exc}", "strings need quotes; see https://toml.io")
    except (ValueError, RecursionError):
        return _whole_file(path, "is not valid TOML: a number or a nesting is too large", "see https://toml.io")


def _check_depth(document: dict[str, Any]) -> None:
    """Raise RecursionError where whoever walks the document would: the parser builds dotted names without recursing."""
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for node in level
            for inner in (node.values() if isinstance(node, dict) else node)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise RecursionError


def _whole_file(path: Path | None, what: str, mend: str) -> Finding:
    return Finding(Severity.ERROR, "", str(path), what, mend)


def _judge(document: dict[str, Any], environ: Mapping[str, str]) -> tuple[Config | None, list[Mistake]]:
    mistakes = list(_resolve(document, (), environ))
    config, structural = _structure(document)
    known = {mistake.path for mistake in mistakes}
    mistakes += (mistake for mistake in structural if mistake.path not in known)
    if config is None:
        # Rules still get a say about what is right: judge the document without its mistakes.
        for mistake in mistakes:
            _make_do(document, mistake.path)
        config, _ = _structure(document)
    if config is not None:
        rules = broken_rules(config, importlib.metadata.version("h2"))
        wrong = [mistake.path for mistake in mistakes]
        mistakes += (
            Mistake(rule.paths[0], rule.what, rule.mend)
            for rule in rules
            if not any(_overlap(path, bad) for path in rule.paths for bad in wrong)
        )
    return config, mistakes


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one path is the other or lies in it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _structure(document: dict[str, Any]) -> tuple[Config | None, list[Mistake]]:
    try:
        return structure(document), []
    except ClassValidationError as exc:
        return None, [_explained(mistake) for mistake in mistakes_of(exc)]


def _is_env(text: str) -> bool:
    return text.startswith(ENV_PREFIX)


def _given(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str | None]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    inner = list(items)
    if not inner:
        yield path, node.removeprefix(ENV_PREFIX) if isinstance(node, str) and _is_env(node) else None
    for name, value in inner:
        yield from _given(value, (*path, name))


def _resolve(node: Any, path: KeyPath, environ: Mapping[str, str]) -> Iterator[Mistake]:
    """Replace every whole `env:NAME` string under `node`, once; values of variables are not looked into again."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in list(items):
        if not isinstance(value, str):
            yield from _resolve(value, (*path, name), environ)
        elif _is_env(value):
            variable = value.removeprefix(ENV_PREFIX)
            node[name] = environ.get(variable) or None
            if _VARIABLE.match(variable) is None:
                # Not repeated: what stands here may be the secret itself, pasted after the prefix.
                yield Mistake((*path, name), "must name a variable after env:, of letters, digits and _", "env:NAME")
            elif node[name] is None:
                state = "is empty" if variable in environ else "is not set"
                what = f"names the environment variable {variable}, which {state}"
                yield Mistake((*path, name), what, f"set {variable} before starting pushd")


def _explained(mistake: Mistake) -> Mistake:
    """The mistake with a way to mend it, taken from what is known about its key."""
    if mistake.mend:
        return mistake
    if mistake.unknown:
        guess = _suggestion(mistake.path)
        if guess is None:
            return Mistake(mistake.path, "is not a key of pushd", "remove it; pushd config-schema lists every key")
        return Mistake(mistake.path, f"is not a key of pushd; did you mean {guess}?", f"write {guess}")
    about = shape.find(mistake.path)
    if about is None:
        return Mistake(mistake.path, mistake.what, "see docs/configuration.md")
    if about.may_be_left_out:
        return Mistake(mistake.path, mistake.what, "leave the key out for its default")
    how = "" if about.required else "correct it, "
    return Mistake(mistake.path, mistake.what, f"{how}for instance {about.name} = {about.example_toml}")


def _suggestion(path: KeyPath) -> str | None:
    """The known key an operator most likely meant by the unknown `path`: a near name beside it, the same name in
    another table, or a near path."""
    *around, name = (part for part in path if isinstance(part, str))
    table = ".".join(around)
    known = [*shape.KEYS, *shape.TABLES]
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    if near := difflib.get_close_matches(name, beside, n=1):
        return beside[near[0]]
    if elsewhere := [key for key in known if key.rpartition(".")[2] == name]:
        return elsewhere[0]
    near = difflib.get_close_matches(".".join((*around, name)), known, n=1, cutoff=0.8)
    return near[0] if near else None


def _value_at(document: dict[str, Any], key: str) -> Any:
    node: Any = document
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _make_do(document: dict[str, Any], path: KeyPath) -> None:
    """Remove what stands at `path`, the whole list if it is in one; a key its table needs gets its example instead."""
    while isinstance(path[-1], int):
        path = path[:-1]
    node: Any = document
    try:
        for part in path[:-1]:
            node = node[part]
    except KeyError:
        return  # the list around it went with an earlier mistake
    node.pop(path[-1], None)
    key = shape.find(path)
    if key is not None and key.required:
        node[path[-1]] = key.about.example


def _where(file: Path | None, lines: Mapping[KeyPath, int], path: KeyPath) -> str:
    if file is None:
        return "defaults"
    line = _line(lines, path)
    return f"{file}:{line}" if line else str(file)


def _line(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    """The line of `path` or of the nearest table around it, 0 if neither stands in the file."""
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), 0)
