"""The exceptions of pushd: situations a caller can act on, and nothing else.

    PushdError
    ├─ ConfigError          the configuration is wrong; the text names keys, never secret values
    ├─ StartError           the machine or the database does not allow a start (port in use, data directory, ...)
    │  ├─ UsageError        an argument of the command line is wrong
    │  └─ MigrationError    the database's schema does not fit this program
    ├─ StoreError           PostgreSQL did not do what was asked; `str()` is the constant public text
    │  ├─ StoreUnavailable  unreachable, shutting down, pool exhausted, anything not listed below
    │  ├─ StoreTimeout      a statement or transaction ran out of time
    │  └─ StoreInvariant    the database contradicts what the program relies on
    ├─ OwnershipLost        the dispatcher lock or the cursor belongs to somebody else now
    └─ StatusError          an expected refusal of a call: gRPC code and constant message

What a provider or a client may legitimately answer is a value (`pushd.model.Outcome`), not an exception. No text
here may hold an id, secret, token, URL, key or topic (PUSH-096).
"""

from __future__ import annotations

from enum import IntEnum


class PushdError(Exception):
    """Base of every exception raised on purpose by pushd."""


class ConfigError(PushdError):
    """The configuration cannot be used. The text names the key and the mistake, never a secret value."""


class StartError(PushdError):
    """The process cannot start here. The text is one line that names the cause and, where known, the way out."""


class UsageError(StartError):
    """The command line is wrong in a way its parser cannot see. The text names the argument, never its value."""


class MigrationError(StartError):
    """The database's schema is newer than this program, or was changed by hand."""


class StoreError(PushdError):
    """PostgreSQL did not do what was asked.

    `kind` is the closed label of `xmtp_db_errors_total`: timeout, invariant, connection or other. The driver's text
    is kept only as `__cause__`, because its DETAIL lines quote column values.
    """

    kind = "other"
    text = "database operation failed"

    def __init__(self, kind: str | None = None) -> None:
        super().__init__(self.text)
        if kind is not None:
            self.kind = kind


class StoreUnavailable(StoreError):
    """The database cannot be reached or refused the work; trying again later may help."""

    kind = "connection"


class StoreTimeout(StoreError):
    """A statement or transaction was ended by its time-out (SQLSTATE 57014, 25P04)."""

    kind = "timeout"
    text = "database operation timed out"


class StoreInvariant(StoreError):
    """Stored data contradicts what the program relies on (SQLSTATE 23505, 23514, 22003, or a failed check)."""

    kind = "invariant"
    text = "storage invariant failed"


class OwnershipLost(PushdError):
    """The dispatcher lock or the cursor belongs to another instance now (PUSH-045)."""


class Code(IntEnum):
    """gRPC status codes, numbered as on the wire (gRPC `doc/statuscodes.md`)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class StatusError(PushdError):
    """An expected refusal: the call ends with `code` and the constant `message`.

    Args:
        code: the gRPC status.
        message: a constant; never built from the request.
        details: serialized `google.rpc.Status` for `grpc-status-details-bin`, or None.
    """

    def __init__(self, code: Code, message: str, details: bytes | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.details = details
