from pushd.rpc.gen.xmtp.backend.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PublishRequest(_message.Message):
    __slots__ = ("envelopes",)
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ClientEnvelope]
    def __init__(self, envelopes: _Optional[_Iterable[_Union[_types_pb2.ClientEnvelope, _Mapping]]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("envelope_metas",)
    ENVELOPE_METAS_FIELD_NUMBER: _ClassVar[int]
    envelope_metas: _containers.RepeatedCompositeFieldContainer[_types_pb2.EnvelopeMeta]
    def __init__(self, envelope_metas: _Optional[_Iterable[_Union[_types_pb2.EnvelopeMeta, _Mapping]]] = ...) -> None: ...

class PublishError(_message.Message):
    __slots__ = ("index", "reason", "message")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[PublishError.Reason]
        REASON_MALFORMED_PAYLOAD: _ClassVar[PublishError.Reason]
        REASON_INVALID_KEY_PACKAGE: _ClassVar[PublishError.Reason]
        REASON_INVALID_IDENTITY_UPDATE: _ClassVar[PublishError.Reason]
        REASON_INVALID_SIGNATURE: _ClassVar[PublishError.Reason]
        REASON_TOO_LARGE: _ClassVar[PublishError.Reason]
    REASON_UNSPECIFIED: PublishError.Reason
    REASON_MALFORMED_PAYLOAD: PublishError.Reason
    REASON_INVALID_KEY_PACKAGE: PublishError.Reason
    REASON_INVALID_IDENTITY_UPDATE: PublishError.Reason
    REASON_INVALID_SIGNATURE: PublishError.Reason
    REASON_TOO_LARGE: PublishError.Reason
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: PublishError.Reason
    message: str
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[PublishError.Reason, str]] = ..., message: _Optional[str] = ...) -> None: ...
