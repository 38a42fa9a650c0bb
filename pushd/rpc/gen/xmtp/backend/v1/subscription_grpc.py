from pushd.rpc._purerpc import purerpc
from pushd.rpc.gen.xmtp.backend.v1 import subscription_pb2 as xmtp_dot_backend_dot_v1_dot_subscription__pb2
from pushd.rpc.gen.xmtp.backend.v1 import types_pb2 as xmtp_dot_backend_dot_v1_dot_types__pb2


class SubscriptionServiceServicer(purerpc.Servicer):
    async def Subscribe(self, input_messages):
        raise NotImplementedError()

    async def SubscribeStatic(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "xmtp.backend.v1.SubscriptionService"
        )
        service_obj.add_method(
            "Subscribe",
            self.Subscribe,
            purerpc.RPCSignature(
                purerpc.Cardinality.STREAM_STREAM,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeRequest,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeResponse,
            )
        )
        service_obj.add_method(
            "SubscribeStatic",
            self.SubscribeStatic,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeStaticRequest,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeStaticResponse,
            )
        )
        return service_obj


class SubscriptionServiceStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "xmtp.backend.v1.SubscriptionService",
            channel
        )
        self.Subscribe = self._client.get_method_stub(
            "Subscribe",
            purerpc.RPCSignature(
                purerpc.Cardinality.STREAM_STREAM,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeRequest,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeResponse,
            )
        )
        self.SubscribeStatic = self._client.get_method_stub(
            "SubscribeStatic",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeStaticRequest,
                xmtp_dot_backend_dot_v1_dot_subscription__pb2.SubscribeStaticResponse,
            )
        )