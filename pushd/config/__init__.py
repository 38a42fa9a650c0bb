"""The configuration: one TOML file, read once at the start (PUSH-070 to PUSH-072).

`keys` describes every key, `load` turns a file into a `Config` or into all of its mistakes, `printed` writes the JSON
schema and the documentation.
"""

from pushd.config.finding import Finding, InvalidConfig, Severity
from pushd.config.keys import (
    Apns,
    Auth,
    AuthKey,
    Config,
    Database,
    Fcm,
    Http,
    Limits,
    Publishing,
    Push,
    Retention,
    Server,
    Streams,
    Telemetry,
)
from pushd.config.load import check_clock, load_config
from pushd.config.values import Address

__all__ = [
    "Address",
    "Apns",
    "Auth",
    "AuthKey",
    "Config",
    "Database",
    "Fcm",
    "Finding",
    "Http",
    "InvalidConfig",
    "Limits",
    "Publishing",
    "Push",
    "Retention",
    "Server",
    "Severity",
    "Streams",
    "Telemetry",
    "check_clock",
    "load_config",
]
