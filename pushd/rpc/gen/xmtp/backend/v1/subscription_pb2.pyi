from pushd.rpc.gen.xmtp.backend.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CatchupTarget(_message.Message):
    __slots__ = ("topic", "through_sequence_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    THROUGH_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    topic: _types_pb2.Topic
    through_sequence_id: int
    def __init__(self, topic: _Optional[_Union[_types_pb2.Topic, _Mapping]] = ..., through_sequence_id: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("update", "ping", "pong")
    class Update(_message.Message):
        __slots__ = ("id", "adds", "removes")
        ID_FIELD_NUMBER: _ClassVar[int]
        ADDS_FIELD_NUMBER: _ClassVar[int]
        REMOVES_FIELD_NUMBER: _ClassVar[int]
        id: int
        adds: _containers.RepeatedCompositeFieldContainer[_types_pb2.TopicQuery]
        removes: _containers.RepeatedCompositeFieldContainer[_types_pb2.Topic]
        def __init__(self, id: _Optional[int] = ..., adds: _Optional[_Iterable[_Union[_types_pb2.TopicQuery, _Mapping]]] = ..., removes: _Optional[_Iterable[_Union[_types_pb2.Topic, _Mapping]]] = ...) -> None: ...
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    update: SubscribeRequest.Update
    ping: Ping
    pong: Pong
    def __init__(self, update: _Optional[_Union[SubscribeRequest.Update, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("started", "applied", "messages", "ping", "pong")
    class Started(_message.Message):
        __slots__ = ("keepalive_interval_ms",)
        KEEPALIVE_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
        keepalive_interval_ms: int
        def __init__(self, keepalive_interval_ms: _Optional[int] = ...) -> None: ...
    class Applied(_message.Message):
        __slots__ = ("id", "added_targets")
        ID_FIELD_NUMBER: _ClassVar[int]
        ADDED_TARGETS_FIELD_NUMBER: _ClassVar[int]
        id: int
        added_targets: _containers.RepeatedCompositeFieldContainer[CatchupTarget]
        def __init__(self, id: _Optional[int] = ..., added_targets: _Optional[_Iterable[_Union[CatchupTarget, _Mapping]]] = ...) -> None: ...
    class Messages(_message.Message):
        __slots__ = ("envelopes",)
        ENVELOPES_FIELD_NUMBER: _ClassVar[int]
        envelopes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ServerEnvelope]
        def __init__(self, envelopes: _Optional[_Iterable[_Union[_types_pb2.ServerEnvelope, _Mapping]]] = ...) -> None: ...
    STARTED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    started: SubscribeResponse.Started
    applied: SubscribeResponse.Applied
    messages: SubscribeResponse.Messages
    ping: Ping
    pong: Pong
    def __init__(self, started: _Optional[_Union[SubscribeResponse.Started, _Mapping]] = ..., applied: _Optional[_Union[SubscribeResponse.Applied, _Mapping]] = ..., messages: _Optional[_Union[SubscribeResponse.Messages, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class SubscribeStaticRequest(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[_types_pb2.TopicQuery]
    def __init__(self, topics: _Optional[_Iterable[_Union[_types_pb2.TopicQuery, _Mapping]]] = ...) -> None: ...

class SubscribeStaticResponse(_message.Message):
    __slots__ = ("started", "messages", "keepalive")
    class Started(_message.Message):
        __slots__ = ("keepalive_interval_ms", "targets")
        KEEPALIVE_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
        TARGETS_FIELD_NUMBER: _ClassVar[int]
        keepalive_interval_ms: int
        targets: _containers.RepeatedCompositeFieldContainer[CatchupTarget]
        def __init__(self, keepalive_interval_ms: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[CatchupTarget, _Mapping]]] = ...) -> None: ...
    class Messages(_message.Message):
        __slots__ = ("envelopes",)
        ENVELOPES_FIELD_NUMBER: _ClassVar[int]
        envelopes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ServerEnvelope]
        def __init__(self, envelopes: _Optional[_Iterable[_Union[_types_pb2.ServerEnvelope, _Mapping]]] = ...) -> None: ...
    class Keepalive(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    STARTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_FIELD_NUMBER: _ClassVar[int]
    started: SubscribeStaticResponse.Started
    messages: SubscribeStaticResponse.Messages
    keepalive: SubscribeStaticResponse.Keepalive
    def __init__(self, started: _Optional[_Union[SubscribeStaticResponse.Started, _Mapping]] = ..., messages: _Optional[_Union[SubscribeStaticResponse.Messages, _Mapping]] = ..., keepalive: _Optional[_Union[SubscribeStaticResponse.Keepalive, _Mapping]] = ...) -> None: ...
