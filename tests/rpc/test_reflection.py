"""Reflection's questions and answers; that generic clients get along with it is tested with grpcio."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from pushd.errors import Code
from pushd.rpc.client import open_channel
from pushd.rpc.gen.grpc.reflection.v1 import reflection_pb2 as v1
from pushd.rpc.gen.grpc.reflection.v1alpha import reflection_pb2 as v1alpha
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2, publish_pb2
from tests.rpc.harness import SERVICE, serving

FILES = notification_pb2.DESCRIPTOR.name, publish_pb2.DESCRIPTOR.name  # imported, and so known to the pool


async def ask(port: int, wire: Any, **question: Any) -> Any:
    path = f"/{wire.DESCRIPTOR.package}.ServerReflection/ServerReflectionInfo"
    async with open_channel("127.0.0.1", port) as channel:
        async with channel.stream(path, wire.ServerReflectionResponse, deadline_s=10) as call:
            request = wire.ServerReflectionRequest(host="h", **question)
            await call.send(request)
            answer = await call.receive()
            assert answer.original_request == request
            assert answer.valid_host == "h"
            return answer


@pytest.mark.parametrize("wire", [v1, v1alpha], ids=["v1", "v1alpha"])
async def test_each_question_has_its_answer(wire: Any) -> None:
    with trio.fail_after(20):
        async with serving() as server:
            listed = await ask(server.port, wire, list_services="")
            assert SERVICE in [one.name for one in listed.list_services_response.service]
            for question in (
                {"file_containing_symbol": "xmtp.backend.v1.NotificationService.Register"},
                {"file_containing_symbol": "xmtp.backend.v1.RegisterRequest"},
                {"file_by_filename": FILES[0]},
            ):
                found = await ask(server.port, wire, **question)
                files = map(FileDescriptorProto.FromString, found.file_descriptor_response.file_descriptor_proto)
                assert [file.name for file in files] == [FILES[0]]
            found = await ask(server.port, wire, file_by_filename=FILES[1])
            files = [*map(FileDescriptorProto.FromString, found.file_descriptor_response.file_descriptor_proto)]
            assert len(files) == len({file.name for file in files}) == 4
            assert {name for file in files for name in file.dependency} < {file.name for file in files}
            numbers = await ask(server.port, wire, all_extension_numbers_of_type="xmtp.backend.v1.Topic")
            assert numbers.all_extension_numbers_response.base_type_name == "xmtp.backend.v1.Topic"
            for question in (
                {"file_by_filename": "no/such.proto"},
                {"file_containing_symbol": "no.Such"},
                {"all_extension_numbers_of_type": "no.Such"},
                {"file_containing_extension": wire.ExtensionRequest(containing_type="x", extension_number=1)},
                {},
            ):
                missing = await ask(server.port, wire, **question)
                assert missing.error_response.error_code == Code.NOT_FOUND
