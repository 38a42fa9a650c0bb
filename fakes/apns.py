"""A fake APNs: `python -m fakes.apns`.

Checks what Apple checks (path, headers, size, the provider token's signature and age) and answers with Apple's reasons.
`_control` lists the commands that change its mind.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ._http2 import Connection
from ._provider import Answer, Provider, Request
from ._serve import arguments, run

KEY_ID = "ABC123DEFG"
TEAM_ID = "TEAM123456"
_MAX_BODY = 4_096
_MAX_JWT_AGE_S = 3_600
_PUSH_TYPES = {"alert", "background", "location", "voip", "complication", "fileprovider", "mdm", "liveactivity"}


def refusal(status: int, reason: str) -> Answer:
    """An answer with one of Apple's reasons."""
    return Answer(status=status, body=json.dumps({"reason": reason}))


class Apns(Provider):
    """APNs as a sender sees it."""

    def __init__(self, *, latency_ms: float, streams: int, record: int) -> None:
        super().__init__(latency_ms=latency_ms, streams=streams, record=record)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._issued_at: dict[str, float | None] = {}
        self._apns_id = 0

    def token(self, request: Request) -> str:
        return request.headers.get(":path", "").removeprefix("/3/device/")

    def shorthand(self, fields: dict[str, Any]) -> Answer:
        """`reason` stands for the JSON body."""
        fields = dict(fields)
        if "reason" in fields:
            fields["body"] = json.dumps({"reason": fields.pop("reason")})
        return Answer(**fields)

    def judge(self, request: Request) -> Answer:
        headers = request.headers
        token = self.token(request)
        if headers.get(":method") != "POST":
            return refusal(405, "MethodNotAllowed")
        if not headers.get(":path", "").startswith("/3/device/"):
            return refusal(404, "BadPath")
        if not token or token.strip("0123456789abcdefABCDEF"):
            return refusal(400, "BadDeviceToken")
        if "apns-topic" not in headers:
            return refusal(400, "MissingTopic")
        if headers.get("apns-push-type") not in _PUSH_TYPES:
            return refusal(400, "InvalidPushType")
        if headers.get("apns-priority") not in {"1", "5", "10"}:
            return refusal(400, "BadPriority")
        if len(headers.get("apns-collapse-id", "")) > 64:
            return refusal(400, "BadCollapseId")
        if not request.body:
            return refusal(400, "PayloadEmpty")
        if len(request.body) > _MAX_BODY:
            return refusal(413, "PayloadTooLarge")
        return self._judge_credentials(headers.get("authorization", ""), request.wall_s) or self._accept()

    def _accept(self) -> Answer:
        self._apns_id += 1
        return Answer(headers={"apns-id": f"00000000-0000-0000-0000-{self._apns_id:012X}"})

    def _judge_credentials(self, authorization: str, now_s: float) -> Answer | None:
        if not authorization:
            return refusal(403, "MissingProviderToken")
        if authorization not in self._issued_at:
            self._issued_at[authorization] = self._verify(authorization)
        issued_at = self._issued_at[authorization]
        if issued_at is None:
            return refusal(403, "InvalidProviderToken")
        if now_s - issued_at > _MAX_JWT_AGE_S:
            return refusal(403, "ExpiredProviderToken")
        return None

    def _verify(self, authorization: str) -> float | None:
        scheme, _, jwt = authorization.partition(" ")
        try:
            signed, _, signature = jwt.rpartition(".")
            header, claims = (json.loads(_decode(part)) for part in signed.split("."))
            raw = _decode(signature)
            header.pop("typ", None)
            if scheme != "bearer" or header != {"alg": "ES256", "kid": KEY_ID}:
                return None
            if claims["iss"] != TEAM_ID or len(raw) != 64:
                return None
            pair = encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
            self.key.public_key().verify(pair, signed.encode(), ec.ECDSA(hashes.SHA256()))
            return float(claims["iat"])
        except (ValueError, KeyError, TypeError, InvalidSignature):
            return None

    def statistics(self) -> dict[str, Any]:
        return {**super().statistics(), "provider_tokens": len(self._issued_at)}


def _decode(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def main() -> None:
    """Run the fake as a process."""
    options = arguments("A fake APNs on loopback.").parse_args()
    provider = Apns(latency_ms=options.latency_ms, streams=options.streams, record=options.record)

    def describe(port: int, folder: Path) -> dict[str, Any]:
        path = folder / f"AuthKey_{KEY_ID}.p8"
        path.write_bytes(provider.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return {
            "endpoint": f"https://127.0.0.1:{port}",
            "key": str(path),
            "key_id": KEY_ID,
            "team_id": TEAM_ID,
        }

    run(options, provider, lambda: Connection(provider), ("h2",), describe)


if __name__ == "__main__":
    main()
