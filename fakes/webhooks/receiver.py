"""The receiving side: HTTP/1.1 requests in, scripted answers out, everything recorded and verified.

Written as an asyncio protocol with a reader of its own for requests, because one core has to take more webhooks than
the program under test can send.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from .behaviour import Behaviour, answer, behaviour_of

TOLERANCE_S = 300  # Standard Webhooks: how old or new a timestamp may be
_CHUNK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"


@dataclass(frozen=True, slots=True)
class Received:
    """One request. `verified` is None when no key is known for its recipient."""

    number: int
    received_ns: int
    connection: int
    server_name: str | None
    target: str
    headers: dict[str, str]
    body: bytes
    verified: bool | None
    status: int

    def as_json(self) -> dict[str, Any]:
        """For the control port; `wall_s` is the Unix time, named as the provider fakes name it."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "wall_s": self.received_ns / 1e9, "body": self.body.decode("latin-1")}


class Receiver:
    """What all connections share: scripts, keys, records, counters."""

    def __init__(self, *, latency_ms: float = 0.0, record: int = 10_000, key: bytes | None = None) -> None:
        self.default = Behaviour(delay_ms=latency_ms)
        self.scripts: dict[str, deque[Behaviour]] = {}
        self.keys: dict[str, bytes] = {}
        self.common_key = key
        self.records: deque[Received] = deque(maxlen=record)
        self.open: set[Connection] = set()
        self.connections = 0
        self.in_flight = 0
        self.forget()

    def forget(self) -> None:
        """Drop scripts, records and counters; keys and requests in flight stay."""
        self.scripts.clear()
        self.records.clear()
        self.received = 0
        self.verdicts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.ids: Counter[str] = Counter()
        self.connections = len(self.open)

    def statistics(self) -> dict[str, Any]:
        """For the control port."""
        return {
            "requests": self.received,
            "connections": self.connections,
            "open": len(self.open),
            "in_flight": self.in_flight,
            "verified": self.verdicts["True"],
            "bad_signature": self.verdicts["False"],
            "no_key": self.verdicts["None"],
            "distinct_ids": len(self.ids),
            "repeated_ids": sum(count > 1 for count in self.ids.values()),
            "statuses": {str(status): count for status, count in self.statuses.items()},
        }

    def next_behaviour(self, target: str) -> Behaviour:
        """A script for the path comes first, then what the query asks for, then the default."""
        path, _, query = target.partition("?")
        if script := self.scripts.get(path):
            told = script.popleft()
            if not script:
                del self.scripts[path]
            return told
        return (query and behaviour_of(query)) or self.default

    def take(self, connection: Connection, target: str, headers: dict[str, str], body: bytes) -> Behaviour:
        """Record one request and say what to do about it."""
        told = self.next_behaviour(target)
        verified = self._verify(headers, body)
        self.received += 1
        self.verdicts[str(verified)] += 1
        self.ids[headers.get("webhook-id", "")] += 1
        if self.records.maxlen:
            self.records.append(
                Received(
                    self.received,
                    time.time_ns(),
                    connection.number,
                    connection.server_name,
                    target,
                    headers,
                    body,
                    verified,
                    told.status,
                )
            )
        return told

    def _verify(self, headers: dict[str, str], body: bytes) -> bool | None:
        key = self.common_key
        if self.keys:
            try:
                key = self.keys.get(json.loads(body)["recipient_id"], key)
            except (ValueError, KeyError, TypeError):
                return False
        if key is None:
            return None
        stamp = headers.get("webhook-timestamp", "")
        if not stamp.isdecimal() or abs(time.time() - int(stamp)) > TOLERANCE_S:
            return False
        signed = f"{headers.get('webhook-id', '')}.{stamp}.".encode() + body
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        return hmac.compare_digest(expected.encode(), headers.get("webhook-signature", "").encode())


class Connection(asyncio.Protocol):
    """One connection: reads requests one after the other and answers each before it reads the next."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._buffer = b""
        self._busy = False
        self._unanswered = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._receiver.connections += 1
        self.number = self._receiver.connections
        tls = transport.get_extra_info("ssl_object")
        self.server_name: str | None = getattr(tls, "fakes_server_name", None)
        self._receiver.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiver.open.discard(self)
        self._over()
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._busy:
            self._read()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def abort(self) -> None:
        """Cut the connection."""
        self._transport.abort()

    def _read(self) -> None:
        while not self._busy:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            request, *lines = head.decode("latin-1").split("\r\n")
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            length = int(headers.get("content-length", "0"))
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            _, target, _ = request.split(" ", 2)
            self._do(self._receiver.take(self, target, headers, rest[:length]))

    def _do(self, told: Behaviour) -> None:
        self._unanswered = True
        self._receiver.in_flight += 1
        if told.keeps_to_http and not told.delay_ms:
            self._answer(told)
            return
        self._busy = True
        if told.keeps_to_http:
            asyncio.get_running_loop().call_later(told.delay_ms / 1_000, self._answer_late, told)
        else:
            task = asyncio.get_running_loop().create_task(self._misbehave(told))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _over(self) -> None:
        """The request is answered, or nobody waits for its answer any more."""
        self._receiver.in_flight -= self._unanswered
        self._unanswered = False

    def _answer(self, told: Behaviour) -> None:
        if self._unanswered:  # else the client has gone meanwhile
            self._receiver.statuses[told.status] += 1
        self._over()
        self._transport.write(answer(told))
        if told.close:
            self._transport.close()

    def _answer_late(self, told: Behaviour) -> None:
        self._answer(told)
        self._busy = False
        self._read()

    async def _misbehave(self, told: Behaviour) -> None:
        await asyncio.sleep(told.delay_ms / 1_000)
        if told.reset:
            self._transport.abort()
        elif told.slow_headers:
            for number in answer(told):
                if self._transport.is_closing():
                    break
                self._transport.write(bytes([number]))
                await asyncio.sleep(told.slow_headers / 1_000)
        elif told.endless:
            self._transport.write(answer(told))
            while not self._transport.is_closing():
                self._transport.write(_CHUNK)
                await asyncio.sleep(0)  # waiting for an event that is set lets nobody else run
                await self._writable.wait()
        # else it stalls: the connection stays open and nothing more happens
