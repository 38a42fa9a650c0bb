"""Writes the inputs the corpora begin with: `python -m tests.fuzz.seeds`.

It leaves others alone: `found-…` broke a promise once, `guided-…` were grown by Atheris and reach further than chance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pushd.rpc.machine.framing import encode_message
from tests.channels.http2_peer import DATA, GOAWAY, HEADERS, PING, RST_STREAM
from tests.fuzz.access import FAIR, OTHER, token
from tests.fuzz.access import jwks as key_set
from tests.fuzz.edge import METHODS, head
from tests.fuzz.engine import CORPUS
from tests.fuzz.inputs import packed
from tests.fuzz.messages import GROUP, HOST, ID, KEY, PATH, SECRET, TOKEN, TOKEN_BYTES, TOPIC
from tests.fuzz.pure import FCM_ERROR, QUOTA
from tests.rpc.frames import PREFACE, frame
from tests.support import envelopes


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
        "public": "https://8.8.8.8/x",
        "public-v6": "https://[2001:4860:4860::8888]/",
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


def tokens() -> dict[str, bytes]:
    texts = {
        "fair": token(FAIR),
        "lists": token(FAIR | {"aud": ["x", "pushd"], "scope": ["b", "a"], "nbf": 1}),
        "late": token(FAIR | {"exp": 1}),
        "no-scope": token(FAIR | {"scope": "b"}),
        "third-key": token(FAIR, OTHER, kid="k3"),
        "stranger": token(FAIR, OTHER),
        "none": token(FAIR, alg="none"),
        "other-algorithm": token(FAIR, alg="ES256", kid="k2"),
    }
    return {name: f"Bearer {text}".encode() for name, text in texts.items()} | {"two": b"Bearer a.b.c,Bearer a.b.c"}


def jwks() -> dict[str, bytes]:
    keys = key_set()
    made = {f"one-{key['kty'].lower()}-{key['alg'].lower()}": {"keys": [key]} for key in keys}
    made |= {"all": {"keys": keys}, "private": {"keys": [keys[0] | {"d": keys[0]["x"]}]}, "none": {"keys": []}}
    made["short-rsa"] = {"keys": [keys[3] | {"n": keys[3]["n"][:170]}]}
    made["others"] = {"keys": [keys[1] | {"use": "enc"}, keys[1] | {"crv": "P-384"}, {"kty": "oct", "k": "AA"}]}
    return {name: json.dumps(document).encode() for name, document in made.items()}


def config() -> dict[str, bytes]:
    return {
        "small": b'[server]\nlisten = "127.0.0.1:0"\n[push.http]\n',
        "secrets": b'[database]\nurl = "postgresql://pushd:hunter2hunter2@localhost/pushd"\n'
        b'[push.apns]\nkey = "s3cr3tk3yt3xt"\nkey_id = "ABC123DEFG"\nteam_id = "TEAM123456"\n'
        b'bundle_id = "org.example.app"\nenvironment = "sandbox"\n',
        "variable": b'[push]\nmax_attempts = 10\n[push.fcm]\nservice_account = "env:PUSHD_KEY"\n',
        "lists": b'[push.http]\nallowed_domains = ["hooks.example.com", "*.example.org"]\n'
        b"allow_private_addresses = true\n",
        "full": b'[server]\nlisten = "[::1]:0"\nlog_level = "debug"\n[limits]\nmax_query_limit = 5\n[retention]\n'
        b'welcome_seconds = 60\n[push]\nmax_attempts = 2\n[telemetry]\nmetrics_listen = ""\n',
        "auth": b'[[auth.keys]]\nkid = "1"\nalg = "ES256"\npublic_key = """\n-----BEGIN PUBLIC KEY-----\n"""\n'
        b'[auth]\nrequired_scopes = ["a b"]\n',
        "dotted": b"[" + b".".join([b"a"] * 1_500) + b"]",
        "nested": b"a = " + b"[" * 200 + b"]" * 200,
        "wrong": b'[streams]\npoll_interval_ms = "100"\nkeepalive = 1e400\n[limits]\nmax_push_topics = -1\n',
    }


def http2() -> dict[str, bytes]:
    status, not_found = b"\x88", b"\x8d"  # :status 200 and 404 of HPACK's static table
    made = {
        "answer": frame(HEADERS, 5, 1, status),
        "answers": b"".join(frame(HEADERS, 4, n, not_found) + frame(DATA, 1, n, b'{"reason":"x"}') for n in (1, 3, 5)),
        "informational": frame(HEADERS, 4, 1, b"\x08\x03100") + frame(HEADERS, 5, 1, status),
        "goaway": frame(GOAWAY, 0, 0, bytes(8)) + frame(HEADERS, 5, 1, status),
        "goaway-debug": frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff\0\0\0\x0b" + b'{"reason":"Shutdown"}'),
        "reset": frame(RST_STREAM, 0, 1, b"\0\0\0\7") + frame(HEADERS, 5, 3, status),
        "settings": frame(4, 0, 0, b"\0\3\0\0\0\1\0\4\0\0\0\0\0\5\0\0\x40\0") + frame(PING, 0, 0, bytes(8)),
        "window": frame(8, 0, 0, b"\x7f\xff\xff\xff") + frame(8, 0, 1, b"\0\0\0\1"),
        "table": frame(HEADERS, 4, 1, b"\x3f\xe1\x1f" + status + b"\x40\1a\1b") + frame(DATA, 9, 1, b"\3abc\0\0\0"),
        "long": frame(HEADERS, 4, 1, not_found) + b"".join(frame(DATA, end, 1, b"x" * 16_384) for end in (0, 1)),
        "push": frame(5, 4, 1, b"\0\0\0\2" + b"\x82"),
    }
    early = {"before": b"\1" + made["answer"], "settings-before": b"\1" + made["settings"] + made["answer"]}
    return {name: bytes([number % 4 << 1]) + data for number, (name, data) in enumerate(made.items())} | early


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
    alone = {name: b"\0" + packed([answer]) for name, answer in made.items()}
    smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n" + b"x" * 13
    return alone | {
        "endless": b"\1" + packed([made["interim"][:25]]),
        "slow": b"\6" + packed([made["chunked"]]),
        "three": b"\0" + packed([made["body"], made["chunked"], made["no-content"]]),
        "together": b"\0" + packed([made["body"] + made["no-content"]]),
        "in-a-body": b"\4" + packed([smuggled, made["body"]]),
        "half-a-body": b"\0" + packed([smuggled[:50], smuggled[50:]]),
    }


def operators() -> dict[str, bytes]:
    tail = b" HTTP/1.1\r\nHost: x\r\n\r\n"
    made = {
        "page": b"GET /healthz" + tail,
        "head": b"HEAD /healthz" + tail,
        "query": b"GET /healthz?verbose" + tail,
        "nothing": b"GET /nothing" + tail,
        "method": b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok",
        "no-host": b"GET /healthz HTTP/1.1\r\n\r\n",
        "old": b"GET /healthz HTTP/1.0\r\n\r\n",
        "unfinished": b"GET /" + b"x" * 20_000,
        "tls": b"\x16\x03\x01\0\x05\1\0\0\1\3",
        "twice": b"GET /healthz" + tail + b"GET /nothing" + tail,
    }
    return {name: b"\0" + data for name, data in made.items()} | {"slow": b"\6" + made["page"], "gone": b"\1GET"}


def requests() -> dict[str, bytes]:
    """A fair request of each method."""
    topic = {"topic": TOPIC}
    reflection = [{"list_services": ""}, {"file_containing_symbol": "xmtp.backend.v1.QueryService"}]
    first: dict[str, list[dict[str, Any]]] = {
        "PublishRequest": [{"envelopes": [envelopes.group_envelope(GROUP, body=b"sealed")]}],
        "QueryRequest": [{"queries": [{"topic": topic, "cursor": {"sequence_id": 0}}], "limit": 10}],
        "QueryNewestRequest": [{"topics": [topic], "include_full_envelope": True}],
        "RegisterRequest": [{"recipient_id": ID, "recipient_secret": SECRET, "apns": {"token": TOKEN_BYTES.hex()}}],
        "UnregisterRequest": [{"recipient_id": ID, "recipient_secret": SECRET}],
        "UpdateSubscriptionsRequest": [
            {
                "recipient_id": ID,
                "recipient_secret": SECRET,
                "adds": [{"topic": TOPIC, "hmac_epoch_base": 600, "hmac_keys": [KEY, KEY]}],
                "removes": [b"\1" + ID],
            }
        ],
        "SubscribeRequest": [
            {"update": {"id": 1, "adds": [{"topic": topic, "cursor": {}}]}},
            {"update": {"id": 2, "removes": [topic]}},
        ],
        "SubscribeStaticRequest": [{"topics": [{"topic": topic, "cursor": {"sequence_id": 1}}]}],
        "HealthCheckRequest": [{"service": "xmtp.backend.v1.QueryService"}],
        "ServerReflectionRequest": reflection,
    }
    made = {}
    for path, kind, is_stream in METHODS:
        bodies = [kind(**fields).SerializeToString() for fields in first[kind.DESCRIPTOR.name]]
        made[path] = packed(bodies) if is_stream else bodies[0]
    return made


def calls() -> dict[str, bytes]:
    made = {_short(path): bytes([number]) + body for number, (path, body) in enumerate(requests().items())}
    kind = METHODS[3][1]
    hook = {"url": f"https://{HOST}:8443/{PATH}", "signing_key": KEY[:32]}
    for name, channel in (("http", hook), ("fcm", {"token": TOKEN})):
        register = kind(recipient_id=ID, recipient_secret=SECRET, **{name: channel})
        made[f"register-{name}"] = b"\3" + register.SerializeToString()
    return made | {"no-token": b"\x80", "bad-token": b"\xc1"}


def sockets() -> dict[str, bytes]:
    greeting = PREFACE + frame(4, 0, 0, b"")
    made = {"nothing": b"\2", "http1": b"\1GET / HTTP/1.1\r\nHost: x\r\n\r\n", "tls": b"\1\x16\x03\x01\0\x05\1\0\0\1\3"}
    made["greeting"] = b"\1" + greeting
    for path, body in requests().items():
        made[_short(path)] = b"\2" + frame(HEADERS, 4, 1, head(path)) + frame(DATA, 1, 1, encode_message(body))
    made["rapid-reset"] = b"\0" + b"".join(
        frame(HEADERS, 4, n, b"\x83\x86\x44\x02/x") + frame(RST_STREAM, 0, n, b"\0\0\0\x08") for n in range(1, 41, 2)
    )
    path = METHODS[1][0]
    made["query-reset"] = b"\2" + b"".join(
        frame(HEADERS, 4, n, head(path))
        + frame(DATA, 1, n, encode_message(requests()[path]))
        + frame(RST_STREAM, 0, n, bytes(4))
        for n in (1, 3, 5)
    )
    made["continuations"] = b"\0" + frame(HEADERS, 0, 1, b"\x83") + frame(9, 0, 1, b"\x86") * 20
    made["settings"] = b"\2" + frame(4, 0, 0, b"\0\4\0\0\0\0") + made["query"][1:] + frame(8, 0, 1, b"\0\0\0\1") * 9
    return made


def tls() -> dict[str, bytes]:
    made = sockets()
    return made | {f"clear-{name}": bytes([made[name][0] | 16]) + made[name][1:] for name in ("query", "http1", "tls")}


def _short(path: str) -> str:
    service, _, method = path.rpartition("/")
    return f"{method}-alpha".lower() if "alpha" in service else method.lower()


def main() -> None:
    for make in (mls, urls, answers, tokens, jwks, config, http2, webhooks, operators, sockets, tls, calls):
        folder = CORPUS / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in make().items():
            Path(folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
