from pushd.rpc._purerpc import purerpc
from pushd.rpc.gen.xmtp.backend.v1 import query_pb2 as xmtp_dot_backend_dot_v1_dot_query__pb2
from pushd.rpc.gen.xmtp.backend.v1 import types_pb2 as xmtp_dot_backend_dot_v1_dot_types__pb2


class QueryServiceServicer(purerpc.Servicer):
    async def Query(self, input_message):
        raise NotImplementedError()

    async def QueryNewest(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "xmtp.backend.v1.QueryService"
        )
        service_obj.add_method(
            "Query",
            self.Query,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryRequest,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryResponse,
            )
        )
        service_obj.add_method(
            "QueryNewest",
            self.QueryNewest,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryNewestRequest,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryNewestResponse,
            )
        )
        return service_obj


class QueryServiceStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "xmtp.backend.v1.QueryService",
            channel
        )
        self.Query = self._client.get_method_stub(
            "Query",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryRequest,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryResponse,
            )
        )
        self.QueryNewest = self._client.get_method_stub(
            "QueryNewest",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryNewestRequest,
                xmtp_dot_backend_dot_v1_dot_query__pb2.QueryNewestResponse,
            )
        )