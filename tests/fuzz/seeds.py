"""Writes the inputs the corpora begin with: `python -m tests.fuzz.seeds`. Files named `found-…` are left alone."""

from __future__ import annotations

import json
from pathlib import Path

from pushd.rpc.gen.grpc.health.v1 import health_pb2
from pushd.rpc.machine.encoder import PlainEncoder
from pushd.rpc.machine.framing import encode_message
from tests.channels.http2_peer import DATA, GOAWAY, HEADERS, PING, RST_STREAM
from tests.fuzz.edge import METHODS
from tests.fuzz.engine import CORPUS
from tests.rpc.frames import PREFACE, frame
from tests.support import envelopes

FCM_ERROR = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
QUOTA = "type.googleapis.com/google.rpc.QuotaFailure"
ID, SECRET, TOPIC, KEY = b"\x11" * 32, b"\x22" * 32, b"\0" + bytes(range(16)), b"k" * 42


def mls() -> dict[str, bytes]:
    made = {
        "private": b"g" + envelopes.private_message(ciphertext=b"sealed"),
        "private-long": b"g" + envelopes.private_message(ciphertext=bytes(300)),
        "commit": b"g" + envelopes.public_message(),
        "proposal-external": b"g" + envelopes.public_message(content_type=2, sender_type=2),
        "proposal-new-member": b"g" + envelopes.public_message(content_type=2, sender_type=3),
        "key-package": b"k" + envelopes.key_package().serialized(),
        "key-package-update": b"k" + envelopes.key_package(source=2).serialized(),
        "key-package-commit": b"k" + envelopes.key_package(source=3, extensions=b"\0\1\2ab").serialized(),
    }
    wrapped = {
        "group": envelopes.group_envelope(body=b"sealed", sender_hmac=bytes(32)),
        "welcome": envelopes.welcome_envelope(data=b"sealed"),
        "key-package": envelopes.key_package().envelope(),
        "commit-log": envelopes.commit_log_envelope(),
        "identity": envelopes.identity_envelope(),
    }
    return made | {f"envelope-{name}": b"e" + one.SerializeToString() for name, one in wrapped.items()}


def urls() -> dict[str, bytes]:
    texts = {
        "plain": "https://hooks.example.com/path?query=1#fragment",
        "port": "HTTPS://Hooks.Example.com:8443",
        "v4": "https://127.0.0.1/",
        "v6": "https://[::ffff:127.0.0.1]:65535/x",
        "user": "https://user:password@example.com/",
        "backslash": "https://good.example\\@evil.example/",
        "numbers": "https://0x7f.1/",
        "tab": "https://exa\tmple.com/",
        "idn": "https://xn--bcher-kva.example./",
        "zone": "https://[fe80::1%25eth0]/",
    }
    return {name: text.encode() for name, text in texts.items()}


def answers() -> dict[str, bytes]:
    def fcm(code: str, *more: object) -> dict[str, object]:
        details = [{"@type": FCM_ERROR, "errorCode": code}, *more]
        return {"error": {"code": 400, "status": "X", "details": details}}

    bodies: dict[str, tuple[int, object]] = {
        "apns-bad-token": (400, {"reason": "BadDeviceToken"}),
        "apns-unregistered": (410, {"reason": "Unregistered", "timestamp": 1_794_000_000_000}),
        "apns-expired-jwt": (403, {"reason": "ExpiredProviderToken"}),
        "fcm-unregistered": (404, fcm("UNREGISTERED")),
        "fcm-mismatch": (403, fcm("SENDER_ID_MISMATCH")),
        "fcm-quota": (429, fcm("QUOTA_EXCEEDED", {"@type": QUOTA, "violations": []})),
        "oauth": (200, {"access_token": "ya29.x", "expires_in": 3_599, "token_type": "Bearer"}),
    }
    made = {name: status.to_bytes(2, "big") + json.dumps(body).encode() for name, (status, body) in bodies.items()}
    texts = {"seconds": "120", "date": "Fri, 06 Nov 2026 08:51:37 GMT", "old-date": "Friday, 06-Nov-26 08:51:37 GMT"}
    return made | {f"retry-{name}": b"\x01\xf7" + text.encode() for name, text in texts.items()}


def config() -> dict[str, bytes]:
    return {
        "small": b'[server]\nlisten = "127.0.0.1:0"\n[push.http]\n',
        "secrets": b'[database]\nurl = "postgresql://pushd:hunter2hunter2@localhost/pushd"\n'
        b'[push.apns]\nkey = "s3cr3tk3yt3xt"\nkey_id = "ABC123DEFG"\nteam_id = "TEAM123456"\n'
        b'bundle_id = "org.example.app"\nenvironment = "sandbox"\n',
        "variable": b'[push]\nmax_attempts = 10\n[push.fcm]\nservice_account = "env:PUSHD_KEY"\n',
        "lists": b'[push.http]\nallowed_domains = ["hooks.example.com", "*.example.org"]\n'
        b"allow_private_addresses = true\n",
        "auth": b'[[auth.keys]]\nkid = "1"\nalg = "ES256"\npublic_key = """\n-----BEGIN PUBLIC KEY-----\n"""\n'
        b'[auth]\nrequired_scopes = ["a b"]\n',
        "dotted": b"[" + b".".join([b"a"] * 1_500) + b"]",
        "nested": b"a = " + b"[" * 200 + b"]" * 200,
        "wrong": b'[streams]\npoll_interval_ms = "100"\nkeepalive = 1e400\n[limits]\nmax_push_topics = -1\n',
    }


def http2() -> dict[str, bytes]:
    status, not_found = b"\x88", b"\x8d"  # :status 200 and 404 of HPACK's static table
    return {
        "answer": frame(HEADERS, 5, 1, status),
        "answers": b"".join(frame(HEADERS, 4, n, not_found) + frame(DATA, 1, n, b'{"reason":"x"}') for n in (1, 3, 5)),
        "informational": frame(HEADERS, 4, 1, b"\x08\x03100") + frame(HEADERS, 5, 1, status),
        "goaway": frame(GOAWAY, 0, 0, bytes(8)) + frame(HEADERS, 5, 1, status),
        "goaway-debug": frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff\0\0\0\x0b" + b'{"reason":"Shutdown"}'),
        "reset": frame(RST_STREAM, 0, 1, b"\0\0\0\7") + frame(HEADERS, 5, 3, status),
        "settings": frame(4, 0, 0, b"\0\3\0\0\0\1\0\4\0\0\0\0\0\5\0\0\x40\0") + frame(PING, 0, 0, bytes(8)),
        "window": frame(8, 0, 0, b"\x7f\xff\xff\xff") + frame(8, 0, 1, b"\0\0\0\1"),
        "table": frame(HEADERS, 4, 1, b"\x3f\xe1\x1f" + status + b"\x40\1a\1b") + frame(DATA, 9, 1, b"\3abc\0\0\0"),
        "push": frame(5, 4, 1, b"\0\0\0\2" + b"\x82"),
    }


def webhooks() -> dict[str, bytes]:
    made = {
        "no-content": b"HTTP/1.1 204 No Content\r\n\r\n",
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "chunked": b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nTrailer: t\r\n\r\n",
        "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n",
        "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        "old": b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\nuntil the end",
        "both": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "redirect": b"HTTP/1.1 302 Found\r\nLocation: https://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        "not-http": b"SSH-2.0-OpenSSH_9.6\r\n",
        "no-end": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200,
    }
    return {name: b"\6" + answer for name, answer in made.items()} | {"endless": b"\7" + made["interim"][:25]}


def requests() -> list[bytes]:
    """A fair request of each method, in the order of METHODS."""
    first = {
        "PublishRequest": {"envelopes": [envelopes.group_envelope(body=b"sealed")]},
        "QueryRequest": {"queries": [{"topic": {"topic": TOPIC}, "cursor": {"sequence_id": 0}}], "limit": 10},
        "QueryNewestRequest": {"topics": [{"topic": TOPIC}], "include_full_envelope": True},
        "RegisterRequest": {"recipient_id": ID, "recipient_secret": SECRET, "apns": {"token": "ab" * 32}},
        "UnregisterRequest": {"recipient_id": ID, "recipient_secret": SECRET},
        "UpdateSubscriptionsRequest": {
            "recipient_id": ID,
            "recipient_secret": SECRET,
            "adds": [{"topic": TOPIC, "hmac_epoch_base": 600, "hmac_keys": [KEY, KEY]}],
            "removes": [b"\1" + bytes(32)],
        },
        "SubscribeRequest": {"update": {"id": 1, "adds": [{"topic": {"topic": TOPIC}, "cursor": {}}]}},
        "SubscribeStaticRequest": {"topics": [{"topic": {"topic": TOPIC}, "cursor": {"sequence_id": 1}}]},
    }
    return [kind(**first[kind.DESCRIPTOR.name]).SerializeToString() for _, kind in METHODS]


def calls() -> dict[str, bytes]:
    names = [path.rpartition("/")[2].lower() for path, _ in METHODS]
    made = {name: bytes([number]) + body for number, (name, body) in enumerate(zip(names, requests(), strict=True))}
    kind = METHODS[3][1]
    hook = {"url": "https://hooks.invalid:8443/x", "signing_key": bytes(32)}
    made["register-http"] = b"\3" + kind(recipient_id=ID, recipient_secret=SECRET, http=hook).SerializeToString()
    made["register-fcm"] = (
        b"\3" + kind(recipient_id=ID, recipient_secret=SECRET, fcm={"token": "t"}).SerializeToString()
    )
    return made


def sockets() -> dict[str, bytes]:
    greeting = PREFACE + frame(4, 0, 0, b"")
    made = {"greeting": greeting, "http1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "tls": b"\x16\x03\x01\0\x05\1\0\0\1\3"}
    bodies = [(f"/xmtp.backend.v1.{path}", body) for (path, _), body in zip(METHODS, requests(), strict=True)]
    bodies.append(("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest().SerializeToString()))
    for path, body in bodies:
        headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b"te", b"trailers")]
        headers += [(b"content-type", b"application/grpc"), (b"grpc-timeout", b"50m")]
        call = frame(HEADERS, 4, 1, PlainEncoder().encode(headers)) + frame(DATA, 1, 1, encode_message(body))
        made[path.rpartition("/")[2].lower()] = greeting + call
    made["rapid-reset"] = greeting + b"".join(
        frame(HEADERS, 4, n, b"\x83\x86\x44\x02/x") + frame(RST_STREAM, 0, n, b"\0\0\0\x08") for n in range(1, 41, 2)
    )
    made["continuations"] = greeting + frame(HEADERS, 0, 1, b"\x83") + frame(9, 0, 1, b"\x86") * 20
    return made


def main() -> None:
    for make in (mls, urls, answers, config, http2, webhooks, calls, sockets):
        folder = CORPUS / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in make().items():
            Path(folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
