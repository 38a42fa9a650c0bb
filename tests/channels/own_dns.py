"""A name server for made-up names, and what the webhook check says to each of them: a refusal's name, or null.

`python -m tests.channels.own_dns` is started by test_webhook_dns.py with a network and mounts of its own, where it may
take port 53 and tell the C library to ask there.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import trio

from pushd.channels.resolver import ThreadResolver, check_webhook_url

PUBLIC, PRIVATE = "93.184.216.34", "10.1.2.3"
# Each name: the aliases on the way, then the addresses at the end.
NAMES: dict[str, tuple[list[str], list[str]]] = {
    "plain.example": ([], [PUBLIC]),
    "alias.example": (["middle.example", "end.example"], [PUBLIC]),
    "inside.example": ([], [PRIVATE]),
    "alias-inside.example": (["middle.example", "end.example"], [PRIVATE]),
    "alias-both.example": (["middle.example"], [PUBLIC, PRIVATE]),
    "alias-metadata.example": (["metadata.example"], ["169.254.169.254"]),
    "alias-inside-v6.example": (["middle.example"], ["fd00::1"]),
    "alias-mapped.example": (["middle.example"], ["::ffff:10.1.2.3"]),
    "alias-public-v6.example": (["middle.example"], ["2606:2800:220:1::1"]),
    "alias-nowhere.example": (["middle.example"], []),
    "alias-loop.example": (["alias-loop.example"], []),
}
# Names with an answer that tells nothing: the response code (RFC 1035 section 4.1.1), or None for silence.
FAILING: dict[str, int | None] = {"servfail.example": 2, "refused.example": 5, "silent.example": None}
_NXDOMAIN = 3
_A, _CNAME, _AAAA, _IN = 1, 5, 28, 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def _encoded(name: str) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in name.split(".")) + b"\0"


def _record(name: str, kind: int, data: bytes) -> bytes:
    return _encoded(name) + struct.pack("!HHIH", kind, _IN, 0, len(data)) + data


def answer(query: bytes) -> bytes | None:
    """The whole chain for a question of type A or AAAA (RFC 1035 §4.1), NXDOMAIN for a name that is not listed."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    (kind,) = struct.unpack_from("!H", query, at + 1)
    name = ".".join(labels).lower()
    found = NAMES.get(name)
    records = []
    if found is not None:
        aliases, addresses = found
        owner = name
        for alias in aliases:
            records.append(_record(owner, _CNAME, _encoded(alias)))
            owner = alias
        ends = [ipaddress.ip_address(text) for text in addresses]
        records += [_record(owner, kind, end.packed) for end in ends if kind == (_A if end.version == 4 else _AAAA)]
    code = FAILING.get(name, 0 if found is not None else _NXDOMAIN)
    if code is None:
        return None
    head = query[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(records), 0, 0)
    return head + query[12 : at + 5] + b"".join(records)


def _serve(server: socket.socket) -> None:
    while True:
        query, peer = server.recvfrom(512)
        if (answered := answer(query)) is not None:
            server.sendto(answered, peer)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _ask_here(folder: Path) -> None:
    for name, text in (
        ("resolv.conf", "nameserver 127.0.0.1\noptions timeout:2 attempts:1\n"),
        ("nsswitch.conf", "hosts: files dns\n"),
    ):
        (folder / name).write_text(text)
        subprocess.run(["mount", "--bind", folder / name, f"/etc/{name}"], check=True)


async def _judge() -> dict[str, str | None]:
    resolver = ThreadResolver()
    verdicts = {
        name: await check_webhook_url(
            f"https://{name}/hook", allowed_domains=(), allow_private_addresses=False, resolver=resolver
        )
        for name in (*NAMES, *FAILING, "unknown.example")
    }
    return {name: verdict and verdict.name for name, verdict in verdicts.items()}


def main() -> None:
    _loopback_up()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        _ask_here(Path(folder))
        json.dump(trio.run(_judge), sys.stdout)


if __name__ == "__main__":
    main()
