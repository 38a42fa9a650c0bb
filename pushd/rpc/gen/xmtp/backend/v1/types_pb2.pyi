from pushd.rpc.gen.xmtp.identity.associations import associations_pb2 as _associations_pb2
from pushd.rpc.gen.xmtp.mls.message_contents import message_contents_pb2 as _message_contents_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Cursor(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Topic(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: bytes
    def __init__(self, topic: _Optional[bytes] = ...) -> None: ...

class MessageHash(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class TopicQuery(_message.Message):
    __slots__ = ("topic", "cursor")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    cursor: Cursor
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ...) -> None: ...

class EnvelopeMeta(_message.Message):
    __slots__ = ("cursor", "server_ns", "message_hash", "topic", "expiry_ns", "is_commit_or_proposal")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SERVER_NS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_HASH_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_NS_FIELD_NUMBER: _ClassVar[int]
    IS_COMMIT_OR_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    cursor: Cursor
    server_ns: int
    message_hash: MessageHash
    topic: Topic
    expiry_ns: int
    is_commit_or_proposal: bool
    def __init__(self, cursor: _Optional[_Union[Cursor, _Mapping]] = ..., server_ns: _Optional[int] = ..., message_hash: _Optional[_Union[MessageHash, _Mapping]] = ..., topic: _Optional[_Union[Topic, _Mapping]] = ..., expiry_ns: _Optional[int] = ..., is_commit_or_proposal: _Optional[bool] = ...) -> None: ...

class GroupMessage(_message.Message):
    __slots__ = ("data", "sender_hmac", "should_push")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SENDER_HMAC_FIELD_NUMBER: _ClassVar[int]
    SHOULD_PUSH_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    sender_hmac: bytes
    should_push: bool
    def __init__(self, data: _Optional[bytes] = ..., sender_hmac: _Optional[bytes] = ..., should_push: _Optional[bool] = ...) -> None: ...

class WelcomeMessage(_message.Message):
    __slots__ = ("v1", "welcome_pointer")
    class V1(_message.Message):
        __slots__ = ("installation_key", "data", "hpke_public_key", "wrapper_algorithm", "welcome_metadata")
        INSTALLATION_KEY_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        HPKE_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
        WRAPPER_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
        WELCOME_METADATA_FIELD_NUMBER: _ClassVar[int]
        installation_key: bytes
        data: bytes
        hpke_public_key: bytes
        wrapper_algorithm: _message_contents_pb2.WelcomeWrapperAlgorithm
        welcome_metadata: bytes
        def __init__(self, installation_key: _Optional[bytes] = ..., data: _Optional[bytes] = ..., hpke_public_key: _Optional[bytes] = ..., wrapper_algorithm: _Optional[_Union[_message_contents_pb2.WelcomeWrapperAlgorithm, str]] = ..., welcome_metadata: _Optional[bytes] = ...) -> None: ...
    class WelcomePointer(_message.Message):
        __slots__ = ("installation_key", "welcome_pointer", "hpke_public_key", "wrapper_algorithm")
        INSTALLATION_KEY_FIELD_NUMBER: _ClassVar[int]
        WELCOME_POINTER_FIELD_NUMBER: _ClassVar[int]
        HPKE_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
        WRAPPER_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
        installation_key: bytes
        welcome_pointer: bytes
        hpke_public_key: bytes
        wrapper_algorithm: _message_contents_pb2.WelcomePointerWrapperAlgorithm
        def __init__(self, installation_key: _Optional[bytes] = ..., welcome_pointer: _Optional[bytes] = ..., hpke_public_key: _Optional[bytes] = ..., wrapper_algorithm: _Optional[_Union[_message_contents_pb2.WelcomePointerWrapperAlgorithm, str]] = ...) -> None: ...
    V1_FIELD_NUMBER: _ClassVar[int]
    WELCOME_POINTER_FIELD_NUMBER: _ClassVar[int]
    v1: WelcomeMessage.V1
    welcome_pointer: WelcomeMessage.WelcomePointer
    def __init__(self, v1: _Optional[_Union[WelcomeMessage.V1, _Mapping]] = ..., welcome_pointer: _Optional[_Union[WelcomeMessage.WelcomePointer, _Mapping]] = ...) -> None: ...

class KeyPackage(_message.Message):
    __slots__ = ("key_package_tls_serialized",)
    KEY_PACKAGE_TLS_SERIALIZED_FIELD_NUMBER: _ClassVar[int]
    key_package_tls_serialized: bytes
    def __init__(self, key_package_tls_serialized: _Optional[bytes] = ...) -> None: ...

class CommitLogEntry(_message.Message):
    __slots__ = ("serialized_commit_log_entry", "signature")
    SERIALIZED_COMMIT_LOG_ENTRY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    serialized_commit_log_entry: bytes
    signature: _associations_pb2.RecoverableEd25519Signature
    def __init__(self, serialized_commit_log_entry: _Optional[bytes] = ..., signature: _Optional[_Union[_associations_pb2.RecoverableEd25519Signature, _Mapping]] = ...) -> None: ...

class ClientEnvelope(_message.Message):
    __slots__ = ("group_message", "welcome_message", "key_package", "identity_update", "commit_log_entry")
    GROUP_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KEY_PACKAGE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_UPDATE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_LOG_ENTRY_FIELD_NUMBER: _ClassVar[int]
    group_message: GroupMessage
    welcome_message: WelcomeMessage
    key_package: KeyPackage
    identity_update: _associations_pb2.IdentityUpdate
    commit_log_entry: CommitLogEntry
    def __init__(self, group_message: _Optional[_Union[GroupMessage, _Mapping]] = ..., welcome_message: _Optional[_Union[WelcomeMessage, _Mapping]] = ..., key_package: _Optional[_Union[KeyPackage, _Mapping]] = ..., identity_update: _Optional[_Union[_associations_pb2.IdentityUpdate, _Mapping]] = ..., commit_log_entry: _Optional[_Union[CommitLogEntry, _Mapping]] = ...) -> None: ...

class ServerEnvelope(_message.Message):
    __slots__ = ("meta", "envelope")
    META_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    meta: EnvelopeMeta
    envelope: ClientEnvelope
    def __init__(self, meta: _Optional[_Union[EnvelopeMeta, _Mapping]] = ..., envelope: _Optional[_Union[ClientEnvelope, _Mapping]] = ...) -> None: ...
