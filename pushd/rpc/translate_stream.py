"""Protobuf to the streams' values and back. No I/O.

Envelopes are encoded once, into the element of a Messages frame, and frames are put together from such elements: the
same envelope goes to every stream that follows its topic, and its stored payload already is its encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from attrs import frozen

from pushd.core.outbound import Applied, Frame, Keepalive, Messages, Ping, Pong, Started, Target
from pushd.core.stream_updates import Update, UpdateLimits, Wanted
from pushd.model import StoredEnvelope
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as wire
from pushd.rpc.gen.xmtp.backend.v1.types_pb2 import ServerEnvelope
from pushd.rpc.translate_publish import write_meta
from pushd.turns import in_turns

R = TypeVar("R", wire.SubscribeResponse, wire.SubscribeStaticResponse)


def _tag(message: Any, name: str) -> bytes:
    """The tag of a length-delimited field with a number below 16."""
    return bytes((message.DESCRIPTOR.fields_by_name[name].number << 3 | 2,))


# `Messages` is the same in both kinds of stream but for the field that holds it.
_ELEMENT = _tag(wire.SubscribeResponse.Messages, "envelopes")
_PAYLOAD = _tag(ServerEnvelope, "envelope")
_DYNAMIC = _tag(wire.SubscribeResponse, "messages")
_STATIC = _tag(wire.SubscribeStaticResponse, "messages")


@frozen
class EncodedMessages:
    """A response that is encoded already: of a generated message the edge asks for nothing but its encoding."""

    encoded: bytes

    def SerializeToString(self) -> bytes:
        """The encoding."""
        return self.encoded


def encode_envelope(stored: StoredEnvelope) -> bytes:
    """The envelope as one element of a Messages frame."""
    head = ServerEnvelope()
    write_meta(head.meta, stored.meta)
    body = head.SerializeToString() + _PAYLOAD + _varint(len(stored.payload)) + stored.payload
    return bytes(_ELEMENT + _varint(len(body)) + body)


async def wanted_from(queries: Sequence[Any], most: int) -> list[Wanted]:
    """TopicQuery elements, one more than `most` if there are more: enough to see that they are too many."""
    return await in_turns(Wanted(query.topic.topic, query.cursor.sequence_id) for query in queries[: most + 1])


async def update_from(message: wire.SubscribeRequest.Update, limits: UpdateLimits) -> Update:
    """An update as it came, as far as it is needed; whether it is valid is decided elsewhere."""
    adds = await wanted_from(message.adds, limits.max_update_adds)
    removes = await in_turns(topic.topic for topic in message.removes[: limits.max_update_removes + 1])
    return Update(message.id, adds, removes)


def dynamic_response(frame: Frame, keepalive_ms: int) -> wire.SubscribeResponse:
    """A frame of `Subscribe`; for Messages a stand-in that is encoded already."""
    if isinstance(frame, Messages):
        return _messages(_DYNAMIC, frame, wire.SubscribeResponse)
    response = wire.SubscribeResponse()
    match frame:
        case Started():
            response.started.keepalive_interval_ms = keepalive_ms
        case Applied():
            response.applied.id = frame.update_id
            _write_targets(response.applied.added_targets, frame.targets)
        case Ping():
            response.ping.nonce = frame.nonce
        case Pong():
            response.pong.nonce = frame.nonce
        case Keepalive():
            raise AssertionError("keepalives are of static streams")
    return response


def static_response(frame: Frame, keepalive_ms: int) -> wire.SubscribeStaticResponse:
    """A frame of `SubscribeStatic`; for Messages a stand-in that is encoded already."""
    if isinstance(frame, Messages):
        return _messages(_STATIC, frame, wire.SubscribeStaticResponse)
    response = wire.SubscribeStaticResponse()
    match frame:
        case Started():
            response.started.keepalive_interval_ms = keepalive_ms
            _write_targets(response.started.targets, frame.targets)
        case Keepalive():
            response.keepalive.SetInParent()
        case Applied() | Ping() | Pong():
            raise AssertionError("a static stream answers nothing")
    return response


def _messages(tag: bytes, frame: Messages, _: type[R]) -> R:
    encoded = EncodedMessages(b"".join((tag, _varint(frame.size), *frame.pieces)))
    return cast("R", encoded)


def _write_targets(field: Any, targets: Sequence[Target]) -> None:
    for topic, head in targets:
        target = field.add()
        target.topic.topic = topic
        target.through_sequence_id = head


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
