from pushd.rpc.gen.xmtp.backend.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QueryRequest(_message.Message):
    __slots__ = ("queries", "limit")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedCompositeFieldContainer[_types_pb2.TopicQuery]
    limit: int
    def __init__(self, queries: _Optional[_Iterable[_Union[_types_pb2.TopicQuery, _Mapping]]] = ..., limit: _Optional[int] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("has_more",)
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    has_more: bool
    def __init__(self, has_more: _Optional[bool] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("envelopes", "continuation")
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ServerEnvelope]
    continuation: Continuation
    def __init__(self, envelopes: _Optional[_Iterable[_Union[_types_pb2.ServerEnvelope, _Mapping]]] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ...) -> None: ...

class QueryNewestRequest(_message.Message):
    __slots__ = ("topics", "include_full_envelope")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_FULL_ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[_types_pb2.Topic]
    include_full_envelope: bool
    def __init__(self, topics: _Optional[_Iterable[_Union[_types_pb2.Topic, _Mapping]]] = ..., include_full_envelope: _Optional[bool] = ...) -> None: ...

class QueryNewestResponse(_message.Message):
    __slots__ = ("results",)
    class Result(_message.Message):
        __slots__ = ("topic", "meta", "envelope")
        TOPIC_FIELD_NUMBER: _ClassVar[int]
        META_FIELD_NUMBER: _ClassVar[int]
        ENVELOPE_FIELD_NUMBER: _ClassVar[int]
        topic: _types_pb2.Topic
        meta: _types_pb2.EnvelopeMeta
        envelope: _types_pb2.ClientEnvelope
        def __init__(self, topic: _Optional[_Union[_types_pb2.Topic, _Mapping]] = ..., meta: _Optional[_Union[_types_pb2.EnvelopeMeta, _Mapping]] = ..., envelope: _Optional[_Union[_types_pb2.ClientEnvelope, _Mapping]] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[QueryNewestResponse.Result]
    def __init__(self, results: _Optional[_Iterable[_Union[QueryNewestResponse.Result, _Mapping]]] = ...) -> None: ...
