"""What a peer did, as far as a call or its connection is concerned."""

from __future__ import annotations

from attrs import field, frozen

from pushd.rpc.machine.framing import Fault
from pushd.rpc.machine.headers import Request, Status


@frozen
class CallOpened:
    """Server: a request's headers arrived."""

    stream_id: int
    request: Request


@frozen
class MessageReceived:
    """A whole message. Its bytes are counted as held until `consumed` is called."""

    stream_id: int
    payload: bytes = field(repr=False)


@frozen
class HalfClosed:
    """Server: the caller has sent its last message."""

    stream_id: int


@frozen
class MessagesSpoilt:
    """No further message of this stream can be read."""

    stream_id: int
    fault: Fault


@frozen
class CallCancelled:
    """Server: the caller reset the stream; nothing sent on it arrives any more."""

    stream_id: int


@frozen
class AnswerDropped:
    """Server: what waited to be sent on this stream made room for others; the stream is reset."""

    stream_id: int


@frozen
class CallEnded:
    """Client: the call is over.

    `unprocessed` says that the server promises not to have seen the call, so that it may be repeated elsewhere
    (RFC 9113 §8.7).
    """

    stream_id: int
    status: Status
    unprocessed: bool = False


@frozen
class GoAwayReceived:
    """Client: the server takes no new calls on this connection."""


@frozen
class ConnectionFailed:
    """The peer broke the protocol or wore out our patience; a last GOAWAY is in the output."""

    reason: str


MachineEvent = (
    CallOpened
    | MessageReceived
    | HalfClosed
    | MessagesSpoilt
    | CallCancelled
    | AnswerDropped
    | CallEnded
    | GoAwayReceived
    | ConnectionFailed
)
