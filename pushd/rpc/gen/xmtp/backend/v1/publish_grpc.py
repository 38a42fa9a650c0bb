from pushd.rpc._purerpc import purerpc
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2 as xmtp_dot_backend_dot_v1_dot_publish__pb2
from pushd.rpc.gen.xmtp.backend.v1 import types_pb2 as xmtp_dot_backend_dot_v1_dot_types__pb2


class PublishServiceServicer(purerpc.Servicer):
    async def Publish(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "xmtp.backend.v1.PublishService"
        )
        service_obj.add_method(
            "Publish",
            self.Publish,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_publish__pb2.PublishRequest,
                xmtp_dot_backend_dot_v1_dot_publish__pb2.PublishResponse,
            )
        )
        return service_obj


class PublishServiceStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "xmtp.backend.v1.PublishService",
            channel
        )
        self.Publish = self._client.get_method_stub(
            "Publish",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_publish__pb2.PublishRequest,
                xmtp_dot_backend_dot_v1_dot_publish__pb2.PublishResponse,
            )
        )