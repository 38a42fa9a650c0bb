"""Every metric and every log event of pushd, and the set-up of structlog.

One catalogue in code: a metric that is not made here does not exist. Labels are closed lists; no name, label or field
carries or derives from a recipient id, secret, token, URL, key or topic (PUSH-096).
"""

from __future__ import annotations

import enum
import logging
import math
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from attrs import frozen
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from pushd.core.tokens import Reason
from pushd.model import Channel
from pushd.tracebacks import render_traceback

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter that nobody reads

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# From a poll interval to an outage of half a day.
AGE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200, 43_200)
SWEEP_BUCKETS = (0.01, 0.1, 1, 10, 60, 600, 3_600)

CHANNELS = tuple(channel.label for channel in Channel)
DELIVERY_OUTCOMES = ("delivered", "failed", "rejected", "mismatch", "dead", "suppressed")
RECIPIENT_ACTIONS = ("registered", "unregistered", "expired", "dead")
SUBSCRIPTION_ACTIONS = ("added", "removed")
DB_ERROR_KINDS = ("timeout", "invariant", "connection", "other")
AUTH_REASONS = tuple(reason.value for reason in Reason)
BOUNDARY_RESULTS = ("ok", "lock_timeout", "error")
PUBLISH_OUTCOMES = ("stored", "duplicate", "rejected")
PUBLISH_REASONS = (
    "REASON_MALFORMED_PAYLOAD",
    "REASON_INVALID_KEY_PACKAGE",
    "REASON_INVALID_IDENTITY_UPDATE",
    "REASON_INVALID_SIGNATURE",
    "REASON_TOO_LARGE",
)
STREAM_KINDS = ("bidi", "static")
STREAM_FRAMES_SENT = ("started", "applied", "messages", "keepalive", "ping", "pong")
STREAM_FRAMES_RECEIVED = ("update", "ping", "pong")
FAILURE_KINDS = ("transient", "gone", "rejected", "mismatch", "terminal")
TERM_ENDS = (
    "stopped",
    "stepped_down",
    "ownership_lost",
    "database_timeout",
    "database_connection",
    "database_invariant",
    "database_other",
)


class StreamEnd(enum.StrEnum):
    """Why a stream ended: the `reason` label of `xmtp_stream_ended_total`."""

    CLIENT = "client"
    BACKPRESSURE = "backpressure"
    CAPACITY = "capacity"
    KEEPALIVE = "keepalive"
    TAILER = "tailer"
    DATABASE = "database"
    SHUTDOWN = "shutdown"
    INVALID = "invalid"
    RATE_LIMITED = "rate_limited"


class Event(enum.StrEnum):
    """Names of log events. `docs/operations.md` explains each to an operator."""

    READY = "ready"
    DESCRIPTORS_SHORT = "descriptors_short"
    ACCEPT_FAILED = "accept_failed"
    CERTIFICATE_TROUBLE = "certificate_trouble"
    STOPPING = "stopping"
    STOPPED = "stopped"
    STOP_NOW = "stop_now"
    MIGRATED = "migrated"
    CRASHED = "crashed"
    DATABASE_STARTED = "database_started"
    DATABASE_REPLACED = "database_replaced"
    REPLICA_WAIT = "replica_wait"
    RPC_COMPLETED = "rpc_completed"
    RPC_FAILED = "rpc_failed"
    RPC_PEER_DROPPED = "rpc_peer_dropped"
    TERM_STARTED = "term_started"
    TERM_ENDED = "term_ended"
    STEPPING_DOWN = "stepping_down"
    DISPATCHER_UNREACHABLE = "dispatcher_unreachable"
    PAGE_FAILED = "page_failed"
    SWEEP_FAILED = "sweep_failed"
    SWEPT = "swept"
    DEAD_DELETE_FAILED = "dead_delete_failed"
    MAINTENANCE_PROBE_FAILED = "maintenance_probe_failed"
    CHANNEL_MISSING = "channel_missing"
    ATTEMPT_CRASHED = "attempt_crashed"
    BOUNDARY_LOCK_TIMEOUT = "boundary_lock_timeout"
    PROVIDER_REFUSES = "provider_refuses"
    BOUNDARY_FAILED = "boundary_failed"
    TAILER_FAILED = "tailer_failed"
    CURSOR_SKIPPED = "cursor_skipped"
    KEY_SET_REFRESH_FAILED = "key_set_refresh_failed"
    KEY_SET_STALE = "key_set_stale"


@frozen
class Family:
    """A row of the catalogue: one metric as `/metrics` names it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    """The metrics of one server, on a registry of its own so that tests can run several in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.catalogue: list[Family] = []
        """Every metric made here, in order; `docs/metrics.md` is printed from it."""
        ProcessCollector(registry=self.registry)  # process_*: memory, processor time, open files
        self.info = self._gauge("xmtp_backend_info", "The running version; always 1.", ("version",))
        self.ready = self._gauge("xmtp_backend_ready", "1 while this instance serves, else 0.")
        self.tasks = self._gauge("pushd_tasks", "Trio tasks alive in this instance: more under load, never ever more.")

        self.certificate_expiry = self._gauge(
            "pushd_tls_certificate_expiry_timestamp_seconds",
            "Unix time at which the certificate in use on the gRPC listener ends; NaN without TLS.",
        )
        self.certificate_expiry.set(math.nan)

        call = ("grpc_service", "grpc_method", "grpc_type")
        self.grpc_started = self._counter("grpc_server_started", "Calls begun.", call)
        self.grpc_handled = self._counter("grpc_server_handled", "Calls ended, by status.", (*call, "grpc_code"))
        self.grpc_handling_seconds = self._histogram(
            "grpc_server_handling_seconds", "Time from a call's headers to its status.", (*call, "grpc_code")
        )
        self.grpc_in_flight = self._gauge("grpc_server_in_flight", "Calls being served.", call)
        self.grpc_connections = self._gauge("grpc_server_connections", "Open gRPC connections.")
        self.grpc_request_bytes = self._counter("grpc_server_request_bytes", "Request messages, encoded.", call)
        self.grpc_response_bytes = self._counter("grpc_server_response_bytes", "Response messages, encoded.", call)

        self.db_errors = self._counter("xmtp_db_errors", "Database errors answered to callers.", ("kind",))
        for kind in DB_ERROR_KINDS:
            self.db_errors.labels(kind)
        self.db_released_open_transactions = self._counter(
            "xmtp_db_released_open_transactions", "Sessions given back to a pool with a transaction still open."
        )

        self.auth_rejections = self._counter(
            "xmtp_auth_rejections", "Calls turned away by authentication.", ("reason",)
        )
        for reason in AUTH_REASONS:
            self.auth_rejections.labels(reason)
        self.auth_jwks_refresh = self._counter(
            "xmtp_auth_jwks_refresh", "Fetches of the issuer's key set.", ("result",)
        )
        for result in ("ok", "error"):
            self.auth_jwks_refresh.labels(result)
        self.auth_keys = self._gauge("xmtp_auth_keys", "Keys tokens may be signed with now.")

        self.push_deliveries = self._counter(
            "xmtp_push_deliveries", "Deliveries by channel and final outcome.", ("channel", "outcome")
        )
        for channel in CHANNELS:
            for outcome in DELIVERY_OUTCOMES:
                self.push_deliveries.labels(channel, outcome)
        self.push_recipients = self._counter("xmtp_push_recipients", "Recipient changes by action.", ("action",))
        for action in RECIPIENT_ACTIONS:
            self.push_recipients.labels(action)
        self.push_subscriptions = self._counter(
            "xmtp_push_subscriptions", "Subscription rows inserted and deleted by clients.", ("action",)
        )
        for action in SUBSCRIPTION_ACTIONS:
            self.push_subscriptions.labels(action)
        self.push_dispatcher = self._gauge(
            "xmtp_push_dispatcher", "1 while this instance holds the push dispatcher lock, else 0."
        )

        self._make_push_metrics()

        self.boundary_advances = self._counter(
            "xmtp_boundary_advances", "Attempts to advance the closed allocation boundary.", ("result",)
        )
        for result in BOUNDARY_RESULTS:
            self.boundary_advances.labels(result)

        self._make_stream_metrics()

        self.publish_envelopes = self._counter(
            "xmtp_publish_envelopes", "Published envelopes by what became of them.", ("outcome",)
        )
        for outcome in PUBLISH_OUTCOMES:
            self.publish_envelopes.labels(outcome)
        self.publish_rejections = self._counter(
            "xmtp_publish_rejections", "Refused publish requests by the reason given.", ("reason",)
        )
        for reason in PUBLISH_REASONS:
            self.publish_rejections.labels(reason)

    def _make_push_metrics(self) -> None:
        channel = ("channel",)
        self.push_attempt_seconds = self._histogram(
            "pushd_push_attempt_seconds", "One attempt, with credentials, lookup, connecting and the answer.", channel
        )
        self.push_permit_wait_seconds = self._histogram(
            "pushd_push_permit_wait_seconds", "How long a delivery that was ready waited for a permit.", channel
        )
        self.push_age_seconds = self._histogram(
            "pushd_push_age_seconds", "Age of the envelope when its push was delivered.", channel, AGE_BUCKETS
        )
        self.push_attempt_failures = self._counter(
            "pushd_push_attempt_failures",
            "Attempts that did not deliver, by what follows from the answer and by its reason.",
            ("channel", "kind", "reason"),
        )
        self.push_retained = self._gauge(
            "pushd_push_retained", "Deliveries held here that wait for an attempt or a retry, 10,000 at most."
        )
        self.push_in_flight = self._gauge(
            "pushd_push_in_flight", "Attempts being made here, 256 a channel at most.", channel
        )
        self.push_terms_started = self._counter(
            "pushd_push_terms_started", "Times this instance became the holder of the dispatcher lock."
        )
        self.push_terms_ended = self._counter(
            "pushd_push_terms_ended", "Times this instance ceased to be the holder, by why.", ("reason",)
        )
        for reason in TERM_ENDS:
            self.push_terms_ended.labels(reason)
        self.push_sweeps = self._counter("pushd_push_sweeps", "Hourly deletions of expired recipients.", ("result",))
        for result in ("ok", "error"):
            self.push_sweeps.labels(result)
        self.push_sweep_seconds = self._histogram(
            "pushd_push_sweep_seconds", "Duration of a sweep.", buckets=SWEEP_BUCKETS
        )
        self.push_credential_age_seconds = self._gauge(
            "pushd_push_credential_age_seconds",
            "Age of the provider token (APNs) or OAuth token (FCM) in use; NaN while there is none.",
            channel,
        )
        for label in CHANNELS:
            for family in (self.push_attempt_seconds, self.push_permit_wait_seconds, self.push_age_seconds):
                family.labels(label)
            self.push_in_flight.labels(label)

        # Read from the database when somebody asks; every instance reports the same.
        self.database_up = self._gauge("pushd_database_up", "1 when the primary answered the last request for metrics.")
        self.push_cursor_lag_rows = self._gauge(
            "pushd_push_cursor_lag_rows", "Eligible envelopes above the stored cursor, counted up to 100,000."
        )
        self.push_cursor_lag_seconds = self._gauge(
            "pushd_push_cursor_lag_seconds", "Age of the oldest eligible envelope above the stored cursor; 0 for none."
        )
        self.push_cursor_lag_sequences = self._gauge(
            "pushd_push_cursor_lag_sequences",
            "Distance from the stored cursor to the closed boundary, with the envelopes nobody is pushed.",
        )
        self.push_skipped_rows = self._gauge(
            "pushd_push_skipped_rows", "Eligible envelopes that operators ever skipped with `pushd cursor skip`."
        )

    def _make_stream_metrics(self) -> None:
        self.stream_sessions = self._gauge("xmtp_stream_sessions", "Open streams.", ("kind",))
        self.stream_topics_registered = self._gauge("xmtp_stream_topics_registered", "Topics followed by streams.")
        self.stream_frames_sent = self._counter("xmtp_stream_frames_sent", "Frames sent to streams.", ("frame",))
        self.stream_frames_received = self._counter(
            "xmtp_stream_frames_received", "Frames received from streams.", ("frame",)
        )
        self.stream_envelopes_sent = self._counter(
            "xmtp_stream_envelopes_sent", "Envelopes sent to streams, fetched later or as they came.", ("phase",)
        )
        self.stream_updates = self._counter("xmtp_stream_updates", "Updates of streams by outcome.", ("outcome",))
        self.stream_ended = self._counter("xmtp_stream_ended", "Ended streams by reason.", ("reason",))
        self.stream_outbound_wait_seconds = self._histogram(
            "xmtp_stream_outbound_wait_seconds", "Time a frame waited for its stream's reader."
        )
        self.stream_fetch_wait_seconds = self._histogram(
            "xmtp_stream_fetch_wait_seconds", "Time a stream waited for its turn at the database."
        )
        self.tailer_polls = self._counter("xmtp_tailer_polls", "Polls for new envelopes.", ("result",))
        self.tailer_rows = self._counter(
            "xmtp_tailer_rows", "Envelopes seen by polls, new ones or ones that filled a gap.", ("source",)
        )
        self.tailer_gap_ranges = self._gauge(
            "xmtp_tailer_gap_ranges", "Ranges of ids not yet settled that are watched."
        )
        self.tailer_ready = self._gauge("xmtp_tailer_ready", "1 while streams are served, else 0.")
        self.tailer_restarts = self._counter("xmtp_tailer_restarts", "Recoveries of the tailer, which end all streams.")
        labels: list[tuple[Counter | Gauge, tuple[str, ...]]] = [
            (self.stream_sessions, STREAM_KINDS),
            (self.stream_frames_sent, STREAM_FRAMES_SENT),
            (self.stream_frames_received, STREAM_FRAMES_RECEIVED),
            (self.stream_envelopes_sent, ("catch_up", "live")),
            (self.stream_updates, ("applied", "invalid", "rate_limited")),
            (self.stream_ended, tuple(StreamEnd)),
            (self.tailer_polls, ("ok", "error")),
            (self.tailer_rows, ("forward", "gap")),
        ]
        for family, values in labels:
            for value in values:
                family.labels(value)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        self.catalogue.append(Family(f"{name}_total", "counter", labels, text))
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        self.catalogue.append(Family(name, "gauge", labels, text))
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = SECONDS_BUCKETS
    ) -> Histogram:
        self.catalogue.append(Family(name, "histogram", labels, text))
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


def get_logger() -> Any:
    """The logger of pushd; bind only values that `Event` documents."""
    return structlog.get_logger("pushd")


_LEVELS = {"off": logging.CRITICAL + 10, "error": 40, "warn": 30, "info": 20, "debug": 10, "trace": 10}


class _Forgiving:
    """A file whose loss ends nothing: a closed terminal asks for a drain, and takes no more lines about it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


def configure_logging(level: str = "info", log_format: str = "text") -> None:
    """Write events to standard error, as text for people or as one JSON object a line.

    Args:
        level: off, error, warn, info, debug or trace (as debug).
        log_format: text or json.
    """
    renderer: Any
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(lambda exc_info: render_traceback(exc_info[1])),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Forgiving(sys.stderr))),
        cache_logger_on_first_use=False,
    )
