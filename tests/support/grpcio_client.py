"""A client that shares nothing with pushd but `protos/`: grpcio (C core), code generated on the spot, own process.

As a program, `python tests/support/grpcio_client.py PORT` answers one JSON line on standard output for each on standard
input. A line names the method by its short name and gives the request in protobuf's JSON form (bytes in base64), or
`raw`: the body in hexadecimal, sent as it is. The answer has `code`, `details`, and `response` in JSON form.

`GrpcioClient` is the other end of those pipes, for tests.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
SERVICE = "xmtp.backend.v1.NotificationService"


def generate(into: Path) -> Any:
    """Generate messages and stubs of the notification service into a folder; the message module."""
    from grpc_tools import protoc

    argv = ["protoc", f"-I{PROTOS}", f"--python_out={into}", str(PROTOS / "xmtp/backend/v1/notification.proto")]
    if protoc.main(argv) != 0:
        raise SystemExit("protoc failed")
    sys.path.insert(0, str(into))
    return importlib.import_module("xmtp.backend.v1.notification_pb2")


def main() -> None:
    import grpc
    from google.protobuf import json_format

    with tempfile.TemporaryDirectory() as folder:
        messages = generate(Path(folder))
        service = messages.DESCRIPTOR.services_by_name["NotificationService"]
        channel = grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}")
        for line in sys.stdin:
            order = json.loads(line)
            method = service.methods_by_name[order["method"]]
            response_class = getattr(messages, method.output_type.name)
            if "raw" in order:
                body = bytes.fromhex(order["raw"])
            else:
                request = json_format.ParseDict(order["request"], getattr(messages, method.input_type.name)())
                body = request.SerializeToString()
            call = channel.unary_unary(f"/{SERVICE}/{method.name}", None, response_class.FromString)
            compression = grpc.Compression.Gzip if order.get("gzip") else None
            try:
                response = call(body, timeout=60, compression=compression)
                answer = {"code": "OK", "details": "", "response": json_format.MessageToDict(response)}
            except grpc.RpcError as error:
                answer = {"code": error.code().name, "details": error.details()}
            print(json.dumps(answer), flush=True)


class GrpcioClient:
    """Sends orders to the client process, one at a time."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._buffer = b""

    async def call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """Call with a request in JSON form."""
        return await self._order({"method": method, "request": request})

    async def send(self, method: str, body: bytes, *, gzip: bool = False) -> dict[str, Any]:
        """Call with a body as it is."""
        return await self._order({"method": method, "raw": body.hex(), "gzip": gzip})

    async def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        await self._process.stdin.send_all(json.dumps(order).encode() + b"\n")
        while b"\n" not in self._buffer:
            chunk = await self._process.stdout.receive_some()
            if not chunk:
                raise AssertionError("the client process ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def grpcio_client(port: int) -> AsyncIterator[GrpcioClient]:
    """A client process connected to `port` of this machine; it ends with the block."""
    import trio

    process = await trio.lowlevel.open_process(
        [sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield GrpcioClient(process)
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(5):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()


if __name__ == "__main__":
    main()
