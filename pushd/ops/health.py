"""`pushd health`: one question to a running server, one line, one exit code."""

from __future__ import annotations

import ssl
from pathlib import Path

from pushd.errors import StartError, UsageError
from pushd.rpc.check import check_health

ANSWER_S = 5.0


async def run_health(address: str, service: str, *, tls: bool, ca_file: Path | None) -> int:
    """0 when the server at `address` says it serves `service`, else 1.

    Raises:
        UsageError: `address` is not host:port.
        StartError: the authority cannot be read.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal():
        raise UsageError("the address must be host:port, for instance 127.0.0.1:5050")
    try:
        context = ssl.create_default_context(cafile=ca_file) if tls or ca_file else None
    except OSError as exc:
        raise StartError("--ca-file: cannot be read, or holds no certificate") from exc
    serving = await check_health(host.strip("[]"), int(port), service, deadline_s=ANSWER_S, tls=context)
    print("serving" if serving else "not serving")
    return 0 if serving else 1
