"""Every key of the configuration file: its type, its default, its bounds and what it means.

Validation, the published JSON schema and `docs/configuration.md` are all made of these classes, so a key is described
once. Units are part of a key's name. A block that is absent is None where its presence means something (PUSH-070).
"""

from pathlib import Path
from typing import Annotated, Literal

from attrs import field, frozen

from pushd.config import values
from pushd.config.values import Address, Key
from pushd.core.credentials import JwtAlgorithm
from pushd.secret import Secret

# Deadlines are computed in nanoseconds of an int64 and timers in milliseconds of an int32 (PostgreSQL's time-outs).
_MAX_MS = 2**31 - 1
_MAX_COUNT = 2**31 - 1
_MAX_SECONDS = 9_223_372_036
_25_MIB = 25 * 1024 * 1024
_GRPC_ADDRESS = Address("127.0.0.1", 5050)
_METRICS_ADDRESS = Address("127.0.0.1", 9464)


def _count(doc: str) -> Key:
    """A number of things: at least one, since a limit of nothing would be a switch in disguise."""
    return Key(doc, low=1, high=_MAX_COUNT)


def _ms(doc: str) -> Key:
    """A duration in milliseconds."""
    return Key(doc, low=1, high=_MAX_MS)


LogLevel = Literal["off", "error", "warn", "info", "debug", "trace"]
LogFormat = Literal["text", "json"]
ApnsEnvironment = Literal["production", "sandbox"]


@frozen
class Server:
    """The gRPC listener, its limits, and the log."""

    listen: Annotated[Address, Key("Numeric address and port of the gRPC listener; port 0 lets the system choose.")] = (
        _GRPC_ADDRESS
    )
    tls_cert: Annotated[
        Path | None, Key("PEM file with the certificate chain. Together with `tls_key`.", example="/etc/pushd/cert.pem")
    ] = None
    tls_key: Annotated[
        Path | None,
        Key("PEM file with the certificate's private key. Together with `tls_cert`.", example="/etc/pushd/key.pem"),
    ] = None
    allow_cleartext: Annotated[
        bool,
        Key("Serve on a non-loopback address without TLS. Requests carry secrets: only behind a proxy that does TLS."),
    ] = False
    allow_old_h2: Annotated[
        bool, Key("Serve on a non-loopback address with an h2 library before 4.3, which lets bad headers through.")
    ] = False
    max_drain_duration_ms: Annotated[int, _ms("After SIGTERM, running calls and sends get this long.")] = 20_000
    log_level: Annotated[LogLevel, Key("The least severe log line written.")] = "info"
    log_format: Annotated[LogFormat, Key("Lines for people or JSON for machines.")] = "text"
    request_logger: Annotated[bool, Key("Write one log line for every finished call, health checks excepted.")] = True
    max_connections: Annotated[int, _count("Open client connections; further ones are closed.")] = 1_024
    max_handshake_duration_ms: Annotated[
        int, _ms("A connection must have finished TLS and the HTTP/2 preface by then.")
    ] = 10_000
    max_idle_duration_ms: Annotated[int, _ms("A connection silent for this long is probed by a PING, then closed.")] = (
        300_000
    )
    max_header_list_bytes: Annotated[int, Key("Header list of one request, decoded.", low=1_024, high=2**20)] = 16_384
    max_receive_bytes: Annotated[
        int, Key("Request bytes held for all connections together.", low=2**16, high=2**40)
    ] = 256 * 2**20
    max_connection_receive_bytes: Annotated[
        int, Key("Request bytes held for one connection.", low=2**16, high=2**31 - 1)
    ] = 64 * 2**20


@frozen
class Telemetry:
    """Metrics."""

    metrics_listen: Annotated[
        Address | None, Key('Numeric address and port of the metrics and status listener; "" switches it off.')
    ] = _METRICS_ADDRESS


@frozen
class Database:
    """PostgreSQL 16 or newer. Without `url` pushd starts its own in the data directory."""

    url: Annotated[
        Secret | None,
        Key(
            "Connection URL of the primary; several hosts are allowed.",
            check=values.database_url,
            example="env:PUSHD_DATABASE_URL",
        ),
    ] = None
    replica_url: Annotated[
        Secret | None,
        Key(
            "Connection URL of a physical replica for reads.",
            check=values.database_url,
            example="env:PUSHD_REPLICA_URL",
        ),
    ] = None
    max_connections: Annotated[int, Key("Connections of each pool.", low=1, high=262_143)] = 20
    max_statement_timeout_ms: Annotated[int, _ms("A statement is ended after this.")] = 5_000


@frozen
class Publishing:
    """Storing envelopes."""

    max_publish_duration_ms: Annotated[int, _ms("A publish is ended after this; more than the statement time-out.")] = (
        10_000
    )
    max_barrier_wait_ms: Annotated[int, _ms("The boundary task waits this long for running publishes.")] = 1_000


@frozen
class Streams:
    """Subscriptions of clients, and the pace of every poll."""

    poll_interval_ms: Annotated[int, _ms("Pause between two polls of the database.")] = 100
    max_gap_ranges: Annotated[int, _count("Unsettled gaps remembered before streams restart.")] = 10_000
    keepalive_interval_ms: Annotated[int, _ms("A silent stream is sent a sign of life.")] = 30_000
    max_pong_wait_ms: Annotated[int, _ms("A client must answer a ping by then; more than the keepalive.")] = 90_000


@frozen
class Retention:
    """How long envelopes are kept."""

    group_message_seconds: Annotated[
        int, Key("Group messages; commits and proposals are kept for ever.", low=1, high=_MAX_SECONDS)
    ] = 7_776_000
    welcome_seconds: Annotated[int, Key("Welcome messages.", low=1, high=_MAX_SECONDS)] = 7_776_000
    key_package_seconds: Annotated[int, Key("Key packages.", low=1, high=_MAX_SECONDS)] = 7_776_000


@frozen
class AuthKey:
    """One key tokens may be signed with."""

    kid: Annotated[str, Key("The key id tokens name in their header.", check=values.key_id, example="2026-01")]
    alg: Annotated[JwtAlgorithm, Key("The only algorithm accepted with this key.", example="ES256")]
    public_key: Annotated[str, Key("PEM SubjectPublicKeyInfo.", example="env:PUSHD_AUTH_PUBLIC_KEY")] = field(
        repr=False
    )


@frozen
class Auth:
    """Bearer tokens. The block's presence switches authentication on; exactly one of `jwks_url` and `keys` is given."""

    jwks_url: Annotated[
        Secret | None,
        Key(
            "Where the key set is fetched; https, or http on loopback.",
            check=values.jwks_url,
            example="https://issuer.example.com/.well-known/jwks.json",
        ),
    ] = None
    keys: Annotated[tuple[AuthKey, ...] | None, Key("Keys given in this file.", check=values.not_empty)] = None
    audiences: Annotated[
        tuple[str, ...] | None,
        Key(
            "A token's audience must be one of these; absent: not looked at.",
            check=values.not_empty,
            example=("https://push.example.com",),
        ),
    ] = None
    issuers: Annotated[
        tuple[str, ...] | None,
        Key(
            "A token's issuer must be one of these; absent: not looked at.",
            check=values.not_empty,
            example=("https://issuer.example.com",),
        ),
    ] = None
    required_scopes: Annotated[tuple[str, ...], Key("Scopes every token must have.", example=("push",))] = ()
    leeway_seconds: Annotated[int, Key("Clock difference granted to tokens.", low=0, high=300)] = 60
    jwks_refresh_seconds: Annotated[int, _count("Pause between two fetches of the key set.")] = 300
    jwks_max_stale_seconds: Annotated[int, _count("Without a successful fetch for this long, the server stops.")] = (
        3_600
    )


@frozen
class Apns:
    """Apple devices. The block's presence switches the channel on."""

    key: Annotated[
        Secret, Key("The signing key from Apple (.p8): PKCS#8 PEM text of a P-256 key.", example="env:PUSHD_APNS_KEY")
    ]
    key_id: Annotated[str, Key("The key's id, 10 characters.", example="ABC123DEFG")]
    team_id: Annotated[str, Key("The developer team's id, 10 characters.", example="TEAM123456")]
    bundle_id: Annotated[str, Key("The app's bundle id.", check=values.bundle_id, example="org.example.app")]
    environment: Annotated[ApnsEnvironment, Key("Where the app's tokens come from.", example="production")]
    endpoint: Annotated[
        str | None,
        Key(
            "Development only: a fake provider on this machine.",
            check=values.loopback_endpoint,
            example="https://127.0.0.1:2197",
        ),
    ] = None
    ca_file: Annotated[
        Path | None, Key("Development only: PEM file with the authority of the fake's certificate.", example="ca.pem")
    ] = None


@frozen
class Fcm:
    """Android devices. The block's presence switches the channel on."""

    service_account: Annotated[
        Secret,
        Key("JSON text of the service account; the project id comes from it.", example="env:PUSHD_FCM_SERVICE_ACCOUNT"),
    ]
    endpoint: Annotated[
        str | None,
        Key(
            "Development only: a fake provider on this machine. The service account's token_uri may then be local too.",
            check=values.loopback_endpoint,
            example="https://127.0.0.1:2198",
        ),
    ] = None
    ca_file: Annotated[
        Path | None, Key("Development only: PEM file with the authority of the fake's certificate.", example="ca.pem")
    ] = None


@frozen
class Http:
    """Signed webhooks. The block's presence switches the channel on, even if it is empty."""

    allowed_domains: Annotated[
        tuple[str, ...],
        Key(
            "Hosts webhooks may go to: names, or `*.` and a name for everything below it. Empty: any public host.",
            check=values.domain_entries,
            example=("hooks.example.com", "*.example.org"),
        ),
    ] = ()
    allow_private_addresses: Annotated[
        bool, Key("Allow webhooks to private and loopback addresses; for development and tests.")
    ] = False
    ca_file: Annotated[
        Path | None, Key("Development only: PEM file with an authority to trust for webhooks.", example="ca.pem")
    ] = None


@frozen
class Push:
    """Notifications. Without channel blocks nothing is sent and every registration is refused."""

    recipient_ttl_seconds: Annotated[
        int, Key("A recipient that was not renewed for this long is deleted.", low=86_400, high=_MAX_SECONDS)
    ] = 2_592_000
    max_attempts: Annotated[int, Key("Attempts of one delivery.", low=1, high=10)] = 3
    apns: Apns | None = None
    fcm: Fcm | None = None
    http: Http | None = None


@frozen
class Limits:
    """What one request, stream or recipient may ask for."""

    max_query_topics: Annotated[int, _count("Topics of one query.")] = 1_000
    default_query_limit: Annotated[int, _count("Envelopes of a page when the query names no limit.")] = 100
    max_query_limit: Annotated[int, _count("Envelopes of a page at most.")] = 1_000
    max_newest_metadata_topics: Annotated[int, _count("Topics of a query for newest metadata.")] = 1_000
    max_newest_full_topics: Annotated[int, _count("Topics of a query for newest envelopes.")] = 100
    max_publish_topics: Annotated[int, _count("Distinct topics of one publish.")] = 1_000
    max_envelope_bytes: Annotated[int, Key("One envelope.", low=1, high=2 * 2**20 - 256)] = 2**20
    max_request_bytes: Annotated[int, Key("One request message.", low=1, high=_25_MIB)] = _25_MIB
    max_response_bytes: Annotated[int, Key("One response message.", low=1, high=_25_MIB)] = _25_MIB
    max_update_adds: Annotated[int, _count("Topics one stream update adds.")] = 100_000
    max_update_removes: Annotated[int, _count("Topics one stream update removes.")] = 100_000
    max_stream_topics: Annotated[int, _count("Topics of one stream.")] = 100_000
    max_followed_topics: Annotated[
        int, _count("Topics of all streams of an instance together; each takes about 300 bytes of memory.")
    ] = 2_000_000
    max_static_topics: Annotated[int, _count("Topics of one static stream.")] = 10_000
    max_http2_streams: Annotated[int, _count("Concurrent calls of one connection.")] = 100
    max_update_frames_per_second: Annotated[int, _count("Update frames of one stream, lasting.")] = 10
    max_update_burst: Annotated[int, _count("Update frames of one stream, at once.")] = 100
    max_ping_frames_per_second: Annotated[int, _count("Ping frames of one stream, lasting.")] = 10
    max_ping_burst: Annotated[int, _count("Ping frames of one stream, at once.")] = 100
    max_push_topics: Annotated[int, _count("Topics of one recipient.")] = 100_000


@frozen
class Config:
    """The whole configuration, checked: every value is in bounds and the keys agree with each other."""

    server: Server = Server()
    telemetry: Telemetry = Telemetry()
    database: Database = Database()
    publishing: Publishing = Publishing()
    streams: Streams = Streams()
    retention: Retention = Retention()
    auth: Auth | None = None
    push: Push = Push()
    limits: Limits = Limits()
