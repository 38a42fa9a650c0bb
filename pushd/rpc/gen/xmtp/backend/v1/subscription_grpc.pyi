from collections.abc import AsyncIterator
from typing import Any

from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2

class SubscriptionServiceServicer:
    @property
    def service(self) -> Any: ...
    def Subscribe(self, input_messages: AsyncIterator[subscription_pb2.SubscribeRequest]) -> AsyncIterator[subscription_pb2.SubscribeResponse]: ...
    def SubscribeStatic(self, input_message: subscription_pb2.SubscribeStaticRequest) -> AsyncIterator[subscription_pb2.SubscribeStaticResponse]: ...

class SubscriptionServiceStub:
    def __init__(self, channel: Any) -> None: ...
    Subscribe: Any
    SubscribeStatic: Any
