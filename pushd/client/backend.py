"""What the SDK asks of the backend, and the one way in which it can fail.

The real one is `grpc_backend.GrpcBackend`; tests script one. Deadlines belong to callers: an implementation ends with
its caller's cancel scope and may send the time left along.
"""

from __future__ import annotations

from typing import Protocol

from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2, query_pb2


class Backend(Protocol):
    """One method a call. Every one raises `CallFailed` with the gRPC status and nothing else of the answer.

    An implementation that asks the app for a token raises `UnusableToken` instead when that cannot be sent.
    """

    async def register(self, request: notification_pb2.RegisterRequest) -> notification_pb2.RecipientState: ...

    async def unregister(self, request: notification_pb2.UnregisterRequest) -> None: ...

    async def update_subscriptions(
        self, request: notification_pb2.UpdateSubscriptionsRequest
    ) -> notification_pb2.RecipientState: ...

    async def publish(self, request: publish_pb2.PublishRequest) -> publish_pb2.PublishResponse: ...

    async def query(self, request: query_pb2.QueryRequest) -> query_pb2.QueryResponse: ...
