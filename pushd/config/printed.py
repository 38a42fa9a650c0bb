"""The JSON schema and the documentation of the configuration, both made of the classes in `keys`.

`python -m pushd.config.printed` writes both files under `docs/`; a test fails when they are out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pushd.config import shape
from pushd.config.keys import Config
from pushd.config.shape import KeyShape, TableShape
from pushd.config.values import Address
from pushd.secret import Secret

Shape = TypeVar("Shape", KeyShape, TableShape)

_ENV = {"type": "string", "pattern": "^env:.+$", "description": "The value of an environment variable."}


def config_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the configuration file (PUSH-072). Rules between keys are not in it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pushd configuration",
        **_table_schema("", (Config.__doc__ or "").strip()),
    }


def schema_text() -> str:
    """`config_schema` as it is published."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


def _table_schema(path: str, doc: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required = []
    for table in _children(shape.TABLES, path):
        inner = _table_schema(table.path, table.doc)
        properties[_name(table.path)] = (
            {"type": "array", "minItems": 1, "description": table.doc, "items": inner} if table.repeated else inner
        )
    for key in _children(shape.KEYS, path):
        properties[key.name] = _key_schema(key)
        if key.required:
            required.append(key.name)
    schema: dict[str, Any] = {"type": "object", "description": doc, "properties": properties}
    if required:
        schema["required"] = required
    return schema | {"additionalProperties": False}


def _key_schema(key: KeyShape) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": key.about.doc}
    if key.kind is Secret:
        schema["description"] += " Secret: the value or env:NAME."
    schema |= _type_schema(key.kind)
    if key.about.low is not None:
        schema["minimum"] = key.about.low
    if key.about.high is not None:
        schema["maximum"] = key.about.high
    if key.default not in (None, ()) and not key.required:
        schema["default"] = str(key.default) if isinstance(key.default, Address) else key.default
    return schema


def _type_schema(kind: Any) -> dict[str, Any]:
    if kind is bool:
        return {"type": "boolean"}
    if kind is int:
        return {"type": "integer"}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _type_schema(get_args(kind)[0])}
    if choices := shape.choices(kind):
        return {"anyOf": [{"enum": list(choices)}, _ENV]}
    if kind is Secret:
        return {"anyOf": [_ENV, {"type": "string", "minLength": 1, "writeOnly": True, "description": "The value."}]}
    return {"type": "string"}


_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m pushd.config.printed` from pushd/config/keys.py; edit the descriptions there. -->

pushd reads one [TOML](https://toml.io) file: the one given by `--config`, else the one the environment variable
`PUSHD_CONFIG` names, else none. Every key has a default, except within the blocks that switch a channel on. The file
is read once, at the start.

- An unknown key stops the start, as does every other mistake. All of them are reported together, with their lines.
- Any string may be written as `env:NAME`: its value is then that of the environment variable `NAME`. An unset or empty
  variable is a mistake. Only a whole string is replaced, and only once.
- Secrets are never printed, in no message, log line or metric.
- Names tell units: `_ms` milliseconds, `_seconds`, `_bytes`.
- File names are relative to the directory pushd is started in.

`pushd check-config [FILE]` examines a file without starting anything. It prints one finding a line and ends with exit
code 1 if one of them is an error; warnings and notes alone end with 0. `pushd config [FILE]` prints every key, its
value unless that may be private, and where it comes from: the default, a line of the file, an environment variable.
`pushd config-schema` prints a JSON schema for editors, which is also [config.schema.json](config.schema.json).

On an address other than loopback pushd serves only with TLS (`server.tls_cert` and `server.tls_key`) and with h2 4.3
or newer. Where a proxy does that part, `server.allow_cleartext` and `server.allow_old_h2` say so.
"""

_EXAMPLE = """\
## Example

```toml
[server]
listen = "0.0.0.0:5050"
tls_cert = "/etc/pushd/tls.crt"
tls_key = "/etc/pushd/tls.key"

[database]
url = "env:PUSHD_DATABASE_URL"

[auth]
jwks_url = "https://issuer.example.com/.well-known/jwks.json"
audiences = ["pushd"]

[push.apns]
key = "env:PUSHD_APNS_KEY"
key_id = "ABC123DEFG"
team_id = "TEAM123456"
bundle_id = "org.example.app"
environment = "production"

[push.fcm]
service_account = "env:PUSHD_FCM_SERVICE_ACCOUNT"

[push.http]
allowed_domains = ["hooks.example.com", "*.example.org"]
```
"""


def configuration_markdown() -> str:
    """`docs/configuration.md`."""
    return "\n".join([_INTRODUCTION, *map(_section, shape.TABLES.values()), _EXAMPLE])


def _section(table: TableShape) -> str:
    heading = f"[[{table.path}]]" if table.repeated else f"[{table.path}]"
    lines = [f"## `{heading}`", "", table.doc]
    if keys := list(_children(shape.KEYS, table.path)):
        lines += ["", "| Key | Value | Default | Meaning |", "| --- | --- | --- | --- |", *map(_row, keys)]
    return "\n".join([*lines, ""])


def _row(key: KeyShape) -> str:
    if key.required:
        default = "required"
    elif key.default is None:
        default = '`""`' if key.kind is Address else "–"
    else:
        default = f"`{shape.toml(key.default)}`"
    return f"| `{key.name}` | {_value_words(key)} | {default} | {key.about.doc} |"


def _value_words(key: KeyShape) -> str:
    if key.kind is int:
        return f"{key.about.low} to {key.about.high}"
    if choices := shape.choices(key.kind):
        return ", ".join(f"`{choice}`" for choice in choices)
    if get_origin(key.kind) is tuple:
        return "list of strings"
    return {bool: "`true`, `false`", Secret: "secret, or `env:NAME`", Address: "address:port", Path: "file name"}.get(
        key.kind, "string"
    )


def _children(shapes: Mapping[str, Shape], table: str) -> list[Shape]:
    return [found for path, found in shapes.items() if path.rpartition(".")[0] == table]


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def main() -> None:
    """Write both files into the docs folder of the checkout this module lies in."""
    docs = Path(__file__).parents[2] / "docs"
    (docs / "config.schema.json").write_text(schema_text(), encoding="utf-8")
    (docs / "configuration.md").write_text(configuration_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
