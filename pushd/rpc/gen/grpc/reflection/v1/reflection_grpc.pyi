from collections.abc import AsyncIterator
from typing import Any

from pushd.rpc.gen.grpc.reflection.v1 import reflection_pb2

class ServerReflectionServicer:
    @property
    def service(self) -> Any: ...
    def ServerReflectionInfo(self, input_messages: AsyncIterator[reflection_pb2.ServerReflectionRequest]) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]: ...

class ServerReflectionStub:
    def __init__(self, channel: Any) -> None: ...
    ServerReflectionInfo: Any
