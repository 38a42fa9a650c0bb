"""Spellings of a database's address."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from psycopg.conninfo import conninfo_to_dict


def as_url(conninfo: str) -> str:
    """The same connection parameters as the URL that a configuration file wants."""
    parameters = dict(conninfo_to_dict(conninfo))
    name = quote(str(parameters.pop("dbname", "")), safe="")
    return f"postgresql:///{name}?{urlencode(parameters)}"
