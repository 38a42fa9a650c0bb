"""A fake FCM with its OAuth endpoint: `python -m fakes.fcm`.

HTTP/2 clients reach `messages:send`; HTTP/1.1 clients reach the token endpoint at `/token` on the same port. A service
account that fits is written to a file at start. OAuth exchanges are scripted under the token name `oauth`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ._control import http_reply
from ._http2 import Connection
from ._provider import Answer, Provider, Request
from ._serve import arguments, run

PROJECT_ID = "fake-project"
CLIENT_EMAIL = "push@fake-project.iam.gserviceaccount.com"
FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
_SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
_GRANT_TYPE = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_TOKEN_LENGTH = 1_024  # about what Google's have


def refusal(status: int, text: str, code: str | None = None) -> Answer:
    """An error body in Google's form, with a typed detail where `code` is given."""
    error: dict[str, Any] = {"code": status, "status": text, "message": "scripted"}
    if code is not None:
        error["details"] = [{"@type": FCM_ERROR, "errorCode": code}]
    return Answer(status=status, body=json.dumps({"error": error}), headers={"content-type": "application/json"})


class Fcm(Provider):
    """FCM as a sender sees it."""

    def __init__(self, *, latency_ms: float, streams: int, record: int) -> None:
        super().__init__(latency_ms=latency_ms, streams=streams, record=record)
        self.key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
        self.token_uri = ""
        self.exchanges: list[dict[str, Any]] = []
        self._issued: set[str] = set()
        self._messages = 0

    def token(self, request: Request) -> str:
        try:
            return str(json.loads(request.body)["message"]["token"])
        except (ValueError, KeyError, TypeError):
            return ""

    def shorthand(self, fields: dict[str, Any]) -> Answer:
        """`code` with `status` stands for a typed error body."""
        fields = dict(fields)
        if "code" in fields:
            status = fields.get("status", 400)
            fields["body"] = refusal(status, "SCRIPTED", fields.pop("code")).body
        return Answer(**fields)

    def judge(self, request: Request) -> Answer:
        headers = request.headers
        if headers.get(":path") != f"/v1/projects/{PROJECT_ID}/messages:send" or headers.get(":method") != "POST":
            return refusal(404, "NOT_FOUND")
        if headers.get("authorization", "").removeprefix("Bearer ") not in self._issued:
            return refusal(401, "UNAUTHENTICATED")
        if b'"token"' not in request.body:
            return refusal(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        self._messages += 1
        body = f'{{"name":"projects/{PROJECT_ID}/messages/{self._messages}"}}'
        return Answer(body=body, headers={"content-type": "application/json; charset=UTF-8"})

    def exchange(self, body: bytes) -> Answer:
        """The token endpoint's answer to a form."""
        form = parse_qs(body.decode("latin-1"))
        self.exchanges.append({name: values[0] for name, values in form.items()})
        script = self.scripts.get("oauth")
        if script:
            return script.popleft()
        if sorted(form) != ["assertion", "grant_type"] or form["grant_type"] != [_GRANT_TYPE]:
            return Answer(status=400, body='{"error":"unsupported_grant_type"}')
        if not self._verify(form["assertion"][0]):
            return Answer(status=400, body='{"error":"invalid_grant"}')
        token = f"ya29.fake-{len(self._issued)}-".ljust(_TOKEN_LENGTH, "x")
        self._issued.add(token)
        return Answer(body=json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": 3_599}))

    def _verify(self, assertion: str) -> bool:
        try:
            signed, _, signature = assertion.rpartition(".")
            header, claims = (json.loads(_decode(part)) for part in signed.split("."))
            self.key.public_key().verify(_decode(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        except (ValueError, InvalidSignature):
            return False
        return bool(
            header["alg"] == "RS256"
            and claims["iss"] == CLIENT_EMAIL
            and claims["aud"] == self.token_uri
            and claims["scope"] == _SCOPE
            and claims["exp"] - claims["iat"] == 3_600
        )

    def revoke(self) -> None:
        """Refuse every token issued so far."""
        self._issued.clear()

    def statistics(self) -> dict[str, Any]:
        return {**super().statistics(), "exchanges": len(self.exchanges)}


class Front(asyncio.Protocol):
    """Hands a new connection to the protocol that its client chose."""

    def __init__(self, provider: Fcm) -> None:
        self._provider = provider

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        tls = transport.get_extra_info("ssl_object")
        chosen: asyncio.Protocol
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            chosen = Connection(self._provider)
        else:
            chosen = TokenEndpoint(self._provider)
        transport.set_protocol(chosen)
        chosen.connection_made(transport)


class TokenEndpoint(asyncio.Protocol):
    """HTTP/1.1, one form after another."""

    def __init__(self, provider: Fcm) -> None:
        self._provider = provider
        self._transport: asyncio.Transport
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        path = head.split(b" ", 2)[1]
        answer = self._provider.exchange(rest[:length]) if path == b"/token" else Answer(status=404, body="{}")
        asyncio.get_running_loop().call_later((answer.delay_ms or 0) / 1_000, self._give, answer)

    def _give(self, answer: Answer) -> None:
        reply = http_reply(answer.status, answer.body.encode(), answer.headers)
        if answer.stall == "body":
            reply = reply[:-1]
        if answer.stall != "headers" and not self._transport.is_closing():
            self._transport.write(reply)


def _decode(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def main() -> None:
    """Run the fake as a process."""
    options = arguments("A fake FCM on loopback.").parse_args()
    provider = Fcm(latency_ms=options.latency_ms, streams=options.streams, record=options.record)

    def describe(port: int, folder: Path) -> dict[str, Any]:
        provider.token_uri = f"https://127.0.0.1:{port}/token"
        pem = provider.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")
        account = {
            "type": "service_account",
            "project_id": PROJECT_ID,
            "client_email": CLIENT_EMAIL,
            "private_key": pem,
            "token_uri": provider.token_uri,
        }
        path = folder / "service-account.json"
        path.write_text(json.dumps(account))
        return {"endpoint": f"https://127.0.0.1:{port}", "service_account": str(path), "project_id": PROJECT_ID}

    run(options, provider, lambda: Front(provider), ("h2", "http/1.1"), describe)


if __name__ == "__main__":
    main()
