"""grpcio in a process of its own; imports nothing of pushd.

`client PORT [CA_PEM]` plays a list of scenarios against the echo server and prints one JSON object.
`drain PORT [CA_PEM]` opens a stream and a slow call, and says what a drain does to them and to a new call.
`server` serves an echo on a free port, prints it, and on each line of standard input does what the line says.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent import futures
from typing import Any

import grpc

ECHO = "/xmtp.backend.v1.Echo/"


def message(data: bytes) -> bytes:
    """One `bytes` field of number 1."""
    length, n = b"", len(data)
    while n >= 128:
        length += bytes((n % 128 + 128,))
        n //= 128
    return b"\x0a" + length + bytes((n,)) + data


def outcome(call: Any) -> Any:
    """The result of a blocking call, or its status."""
    try:
        return call().hex()
    except grpc.RpcError as exc:
        return [exc.code().name, exc.details()]


def channel_to(port: str, ca_pem: str | None) -> grpc.Channel:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if ca_pem is None:
        return grpc.insecure_channel(f"127.0.0.1:{port}", options)
    with open(ca_pem, "rb") as pem:
        credentials = grpc.ssl_channel_credentials(pem.read())
    return grpc.secure_channel(f"localhost:{port}", credentials, options)


def play(port: str, ca_pem: str | None) -> dict[str, Any]:
    with channel_to(port, ca_pem) as channel:
        unary = channel.unary_unary(ECHO + "Unary")
        hang = channel.unary_unary(ECHO + "Hang")
        said: dict[str, Any] = {}
        said["unary"] = outcome(lambda: unary(message(b"hello"), timeout=10))
        said["server"] = [r.hex() for r in channel.unary_stream(ECHO + "Server")(message(b"abc"), timeout=10)]
        said["client"] = outcome(
            lambda: channel.stream_unary(ECHO + "Client")(iter([message(b"a"), message(b"b")]), timeout=10)
        )
        said["bidi"] = [
            r.hex() for r in channel.stream_stream(ECHO + "Bidi")(iter([message(b"1"), message(b"2")]), timeout=10)
        ]
        said["deadline"] = outcome(lambda: hang(message(b""), timeout=0.2))
        pending = hang.future(message(b""), timeout=10)
        time.sleep(0.1)
        said["cancelled"] = pending.cancel()
        said["gzip"] = outcome(lambda: unary(message(b"x" * 1_000), timeout=10, compression=grpc.Compression.Gzip))
        said["unknown"] = outcome(lambda: channel.unary_unary("/a.B/C")(b"", timeout=10))
        said["garbage"] = outcome(lambda: unary(b"\xff", timeout=10))
        large = message(b"L" * 5_000_000)
        said["large"] = unary(large, timeout=60) == large
        many = [unary.future(message(b"%d" % n), timeout=30) for n in range(300)]
        said["many"] = sum(f.result() == message(b"%d" % n) for n, f in enumerate(many))
        _, call = unary.with_call(message(b""), timeout=10)
        said["request id"] = len(dict(call.initial_metadata())["x-request-id"])
        said["health"] = outcome(lambda: channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10))
        said["reflection"] = reflect(channel)
        return said


def watch_drain(port: str, ca_pem: str | None) -> dict[str, Any]:
    with channel_to(port, ca_pem) as channel:
        stream = channel.unary_stream(ECHO + "HangStream")(message(b"x"), timeout=60)
        next(stream)
        slow = channel.unary_unary(ECHO + "Hang").future(message(b"slow"), timeout=60)
        print("ready", flush=True)
        said: dict[str, Any] = {"stream": outcome(lambda: next(stream))}
        said["new"] = outcome(lambda: channel.unary_unary(ECHO + "Unary")(message(b"late"), timeout=60))
        print("drained", flush=True)
        said["slow"] = outcome(slow.result)
        return said


def reflect(channel: grpc.Channel) -> Any:
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    database = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(database)
    service = pool.FindServiceByName("xmtp.backend.v1.NotificationService")
    return {
        "services": sorted(database.get_services()),
        "methods": [method.name for method in service.methods],
        "field": service.methods_by_name["Register"].input_type.fields_by_name["http"].number,
    }


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        match name:
            case "Unary":
                return grpc.unary_unary_rpc_method_handler(lambda request, _: request)
            case "Metadata":
                return grpc.unary_unary_rpc_method_handler(
                    lambda _, context: message(dict(context.invocation_metadata())["authorization"].encode())
                )
            case "Refuse":
                return grpc.unary_unary_rpc_method_handler(
                    lambda _, context: context.abort(grpc.StatusCode.NOT_FOUND, "no ünicorn")
                )
            case "Hang":
                return grpc.unary_unary_rpc_method_handler(lambda request, context: self._hang(request, context))
            case "Server":
                return grpc.unary_stream_rpc_method_handler(lambda request, _: iter([request] * 3))
            case "Bidi":
                return grpc.stream_stream_rpc_method_handler(lambda requests, _: requests)
        return None

    @staticmethod
    def _hang(request: bytes, context: Any) -> bytes:
        gone = threading.Event()
        context.add_callback(gone.set)
        print("hanging", flush=True)
        if gone.wait(2.0):
            print("released", flush=True)
        return request


def serve() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers([_Handler()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    for line in sys.stdin:
        if line.strip() == "stop":  # GOAWAY, running calls finish
            server.stop(10).wait()
            return


if __name__ == "__main__":
    if sys.argv[1] == "client":
        print(json.dumps(play(sys.argv[2], sys.argv[3] if sys.argv[3:] else None)))
    elif sys.argv[1] == "drain":
        print(json.dumps(watch_drain(sys.argv[2], sys.argv[3] if sys.argv[3:] else None)))
    else:
        serve()
