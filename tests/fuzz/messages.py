"""Any protobuf message of a type, with values that are nearly right more often than chance would have it."""

from __future__ import annotations

import functools
import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tests.support import envelopes
from tests.support.privacy import PrivateValues, private_bytes, private_text

# What a client tells the server in confidence. None of it may be found in a log line or the text of a status.
PRIVATE = PrivateValues()
_rng = random.Random(1)
ID, SECRET, KEY, TOKEN_BYTES = (PRIVATE.keep(private_bytes(_rng, size)) for size in (32, 32, 42, 32))
GROUP = PRIVATE.keep(private_bytes(_rng, 16))
TOPIC = b"\0" + GROUP
TOKEN, PATH = (PRIVATE.keep(private_text(_rng, 40)) for _ in range(2))
HOST = f"{PRIVATE.keep(private_text(_rng, 12))}.invalid"

MARKS: list[str] = []
"""Further private texts, which look like others in any four of their letters."""


def tells_private(text: str | bytes) -> bool:
    """Whether there is a private value in what the server lets out."""
    data = text.encode() if isinstance(text, str) else text
    return bool(PRIVATE.find_in(data)) or any(mark.encode() in data for mark in MARKS)


_WORDS = [
    b"",
    TOPIC,
    b"\1" + ID,
    b"\2" + ID,
    ID,
    SECRET,
    KEY,
    bytes(16),
    bytes(64),
    envelopes.private_message(GROUP, ciphertext=b"sealed"),
    envelopes.public_message(GROUP),
    envelopes.key_package().serialized(),
    envelopes.group_envelope(GROUP, body=b"sealed").SerializeToString(),
]
_TEXTS = ["", "abcd", TOKEN_BYTES.hex(), "0" * 64, TOKEN, "\0", "é" * 9]
_TEXTS += [f"https://{HOST}/{PATH}", f"https://{HOST}:8443/x?{PATH}", "https://127.0.0.1/", "xmtp.backend.v1"]
_TEXTS += ["grpc.health.v1.Health", "xmtp/backend/v1/publish.proto", "xmtp.backend.v1.PublishService.Publish"]
_UNSIGNED = [0, 1, 2, 100, 600, 2**31 - 1, 2**31, 2**32 - 1]
_LONG = [*_UNSIGNED, 2**53, 2**63 - 1]


@functools.cache
def messages(descriptor: Descriptor, depth: int = 4) -> st.SearchStrategy[Message]:
    """Messages of this type; what lies deeper than `depth` is left empty."""
    made = GetMessageClass(descriptor)
    fields = [
        (field, st.lists(values, max_size=3) if field.is_repeated else st.lists(values, max_size=1))
        for field in descriptor.fields
        if (values := _values(field, depth)) is not None
    ]

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message: Message = made()
        for field, many in fields:
            for value in draw(many):
                if field.message_type is not None:
                    target = getattr(message, field.name)
                    (target.add() if field.is_repeated else target).CopyFrom(value)
                elif field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)
        return message

    return build()


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any] | None:
    if field.message_type is not None:
        return messages(field.message_type, depth - 1) if depth else None
    # Registrations and updates are let in by these two alone, so they are right more often than the rest.
    if field.name == "recipient_id":
        return st.sampled_from([ID, ID, ID, SECRET, b""])
    if field.name == "recipient_secret":
        return st.sampled_from([SECRET, SECRET, SECRET, ID, b""])
    kind = FieldDescriptor
    match field.type:
        case kind.TYPE_BYTES:
            return st.sampled_from(_WORDS) | st.binary(max_size=50)
        case kind.TYPE_STRING:
            return st.sampled_from(_TEXTS) | st.text(max_size=20)
        case kind.TYPE_BOOL:
            return st.booleans()
        case kind.TYPE_INT64 | kind.TYPE_SINT64 | kind.TYPE_SFIXED64:
            return st.sampled_from([*_LONG, -1, -(2**63)])
        case kind.TYPE_UINT64 | kind.TYPE_FIXED64:
            return st.sampled_from([*_LONG, 2**63, 2**64 - 1])
        case kind.TYPE_INT32 | kind.TYPE_SINT32 | kind.TYPE_SFIXED32:
            return st.sampled_from([0, 1, 2, -1, 2**31 - 1, -(2**31)])
        case kind.TYPE_UINT32 | kind.TYPE_FIXED32:
            return st.sampled_from(_UNSIGNED)
        case kind.TYPE_ENUM:
            return st.sampled_from([0, 1, 2, 99])
        case _:
            return st.just(0)
