"""The published schema and documentation are those of the classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pushd.config.printed import config_schema, configuration_markdown, schema_text
from pushd.config.shape import KEYS, SECRET_KEYS, TABLES
from tests.config.support import OPEN_H2, environ, load

DOCS = Path(__file__).parents[2] / "docs"


def test_T076_published_schema_is_current():
    assert json.loads((DOCS / "config.schema.json").read_text()) == config_schema(), "python -m pushd.config.printed"
    assert (DOCS / "config.schema.json").read_text() == schema_text()


def test_published_documentation_is_current():
    assert (DOCS / "configuration.md").read_text() == configuration_markdown(), "python -m pushd.config.printed"


def _described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}", inner
        yield from _described(inner.get("items", inner), f"{path}{name}.")


def test_every_key_and_table_is_described():
    described = dict(_described(config_schema()))
    assert set(described) == set(KEYS) | set(TABLES)
    assert all(inner["description"] for inner in described.values())


def test_no_table_takes_further_keys():
    tables = [config_schema(), *(inner.get("items", inner) for _, inner in _described(config_schema()))]
    assert all(table["additionalProperties"] is False for table in tables if "properties" in table)


def test_secrets_may_be_a_value_or_a_variable():
    described = dict(_described(config_schema()))
    assert {"push.apns.key", "push.fcm.service_account", "database.url"} <= SECRET_KEYS
    for key in SECRET_KEYS:
        forms = described[key]["anyOf"]
        assert any(form.get("pattern", "").startswith("^env:") for form in forms)
        assert any("pattern" not in form for form in forms)


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [("push.recipient_ttl_seconds", 86_400, 9_223_372_036), ("push.max_attempts", 1, 10)],
)
def test_bounds_are_in_the_schema(key, low, high):
    schema = dict(_described(config_schema()))[key]
    assert (schema["minimum"], schema["maximum"]) == (low, high)


def test_blocks_name_what_they_require():
    described = dict(_described(config_schema()))
    assert described["push.apns"]["required"] == ["key", "key_id", "team_id", "bundle_id", "environment"]
    assert described["push.fcm"]["required"] == ["service_account"]
    assert "required" not in described["push.http"]


def test_example_of_the_documentation_loads(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", configuration_markdown(), re.DOTALL)
    variables = {
        "PUSHD_DATABASE_URL": "postgresql://h/d",
        "PUSHD_APNS_KEY": environ()["APNS_KEY"],
        "PUSHD_FCM_SERVICE_ACCOUNT": environ()["FCM_ACCOUNT"],
    }
    config = load(tmp_path, example.replace("[server]\n", f"[server]\n{OPEN_H2}"), variables)
    assert config.push.apns is not None
    assert config.push.fcm is not None
    assert config.push.http is not None


def test_defaults_of_the_documentation_are_the_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| `([^`]*)` \| [^|]*\|$", configuration_markdown(), re.MULTILINE))
    assert rows["recipient_ttl_seconds"] == "2592000"
    assert rows["listen"] == '"127.0.0.1:5050"'
