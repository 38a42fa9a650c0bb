from collections.abc import AsyncIterator
from typing import Any

from pushd.rpc.gen.xmtp.backend.v1 import query_pb2

class QueryServiceServicer:
    @property
    def service(self) -> Any: ...
    async def Query(self, input_message: query_pb2.QueryRequest) -> query_pb2.QueryResponse: ...
    async def QueryNewest(self, input_message: query_pb2.QueryNewestRequest) -> query_pb2.QueryNewestResponse: ...

class QueryServiceStub:
    def __init__(self, channel: Any) -> None: ...
    Query: Any
    QueryNewest: Any
