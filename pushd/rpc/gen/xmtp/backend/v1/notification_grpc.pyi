from collections.abc import AsyncIterator
from typing import Any

from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2

class NotificationServiceServicer:
    @property
    def service(self) -> Any: ...
    async def Register(self, input_message: notification_pb2.RegisterRequest) -> notification_pb2.RecipientState: ...
    async def Unregister(self, input_message: notification_pb2.UnregisterRequest) -> notification_pb2.UnregisterResponse: ...
    async def UpdateSubscriptions(self, input_message: notification_pb2.UpdateSubscriptionsRequest) -> notification_pb2.RecipientState: ...

class NotificationServiceStub:
    def __init__(self, channel: Any) -> None: ...
    Register: Any
    Unregister: Any
    UpdateSubscriptions: Any
