from pushd.rpc._purerpc import purerpc
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as xmtp_dot_backend_dot_v1_dot_notification__pb2


class NotificationServiceServicer(purerpc.Servicer):
    async def Register(self, input_message):
        raise NotImplementedError()

    async def Unregister(self, input_message):
        raise NotImplementedError()

    async def UpdateSubscriptions(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "xmtp.backend.v1.NotificationService"
        )
        service_obj.add_method(
            "Register",
            self.Register,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.RegisterRequest,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.RecipientState,
            )
        )
        service_obj.add_method(
            "Unregister",
            self.Unregister,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.UnregisterRequest,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.UnregisterResponse,
            )
        )
        service_obj.add_method(
            "UpdateSubscriptions",
            self.UpdateSubscriptions,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.UpdateSubscriptionsRequest,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.RecipientState,
            )
        )
        return service_obj


class NotificationServiceStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "xmtp.backend.v1.NotificationService",
            channel
        )
        self.Register = self._client.get_method_stub(
            "Register",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.RegisterRequest,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.RecipientState,
            )
        )
        self.Unregister = self._client.get_method_stub(
            "Unregister",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.UnregisterRequest,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.UnregisterResponse,
            )
        )
        self.UpdateSubscriptions = self._client.get_method_stub(
            "UpdateSubscriptions",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.UpdateSubscriptionsRequest,
                xmtp_dot_backend_dot_v1_dot_notification__pb2.RecipientState,
            )
        )