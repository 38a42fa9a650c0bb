from pushd.rpc._purerpc import purerpc
from pushd.rpc.gen.grpc.reflection.v1alpha import reflection_pb2 as grpc_dot_reflection_dot_v1alpha_dot_reflection__pb2


class ServerReflectionServicer(purerpc.Servicer):
    async def ServerReflectionInfo(self, input_messages):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "grpc.reflection.v1alpha.ServerReflection"
        )
        service_obj.add_method(
            "ServerReflectionInfo",
            self.ServerReflectionInfo,
            purerpc.RPCSignature(
                purerpc.Cardinality.STREAM_STREAM,
                grpc_dot_reflection_dot_v1alpha_dot_reflection__pb2.ServerReflectionRequest,
                grpc_dot_reflection_dot_v1alpha_dot_reflection__pb2.ServerReflectionResponse,
            )
        )
        return service_obj


class ServerReflectionStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "grpc.reflection.v1alpha.ServerReflection",
            channel
        )
        self.ServerReflectionInfo = self._client.get_method_stub(
            "ServerReflectionInfo",
            purerpc.RPCSignature(
                purerpc.Cardinality.STREAM_STREAM,
                grpc_dot_reflection_dot_v1alpha_dot_reflection__pb2.ServerReflectionRequest,
                grpc_dot_reflection_dot_v1alpha_dot_reflection__pb2.ServerReflectionResponse,
            )
        )