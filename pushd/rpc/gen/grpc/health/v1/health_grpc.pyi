from collections.abc import AsyncIterator
from typing import Any

from pushd.rpc.gen.grpc.health.v1 import health_pb2

class HealthServicer:
    @property
    def service(self) -> Any: ...
    async def Check(self, input_message: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse: ...
    async def List(self, input_message: health_pb2.HealthListRequest) -> health_pb2.HealthListResponse: ...
    def Watch(self, input_message: health_pb2.HealthCheckRequest) -> AsyncIterator[health_pb2.HealthCheckResponse]: ...

class HealthStub:
    def __init__(self, channel: Any) -> None: ...
    Check: Any
    List: Any
    Watch: Any
