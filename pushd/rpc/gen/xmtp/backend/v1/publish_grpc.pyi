from collections.abc import AsyncIterator
from typing import Any

from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2

class PublishServiceServicer:
    @property
    def service(self) -> Any: ...
    async def Publish(self, input_message: publish_pb2.PublishRequest) -> publish_pb2.PublishResponse: ...

class PublishServiceStub:
    def __init__(self, channel: Any) -> None: ...
    Publish: Any
