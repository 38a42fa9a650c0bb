"""Server reflection v1 and v1alpha (gRPC doc/server-reflection.md), so that generic clients can call without protos."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from google.protobuf.descriptor import FileDescriptor

from pushd.errors import Code
from pushd.rpc.gen._pool import POOL
from pushd.rpc.gen.grpc.reflection.v1 import reflection_pb2 as v1
from pushd.rpc.gen.grpc.reflection.v1.reflection_grpc import ServerReflectionServicer as V1Servicer
from pushd.rpc.gen.grpc.reflection.v1alpha import reflection_pb2 as v1alpha
from pushd.rpc.gen.grpc.reflection.v1alpha.reflection_grpc import ServerReflectionServicer as V1AlphaServicer


def reflection_services(names: Iterable[str]) -> list[Any]:
    """Both versions of the service. `names` are the other services; the reflection services list themselves too."""
    listed = sorted({*names, *(f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha"))})
    return [_V1(listed), _V1Alpha(listed)]


class _V1(V1Servicer):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    async def ServerReflectionInfo(
        self, input_messages: AsyncIterator[v1.ServerReflectionRequest]
    ) -> AsyncIterator[v1.ServerReflectionResponse]:
        async for request in input_messages:
            yield _answer(request, v1.ServerReflectionResponse, self._names)


class _V1Alpha(V1AlphaServicer):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    async def ServerReflectionInfo(
        self, input_messages: AsyncIterator[v1alpha.ServerReflectionRequest]
    ) -> AsyncIterator[v1alpha.ServerReflectionResponse]:
        async for request in input_messages:
            yield _answer(request, v1alpha.ServerReflectionResponse, self._names)


def _answer(request: Any, response_type: Any, names: list[str]) -> Any:
    """One question, one answer; the two versions differ in their package name alone."""
    response = response_type(valid_host=request.host, original_request=request)
    question = request.WhichOneof("message_request")
    try:
        match question:
            case "list_services":
                for name in names:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _put_files(response, POOL.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _put_files(response, _file_of_symbol(request.file_containing_symbol))
            case "all_extension_numbers_of_type":
                POOL.FindMessageTypeByName(request.all_extension_numbers_of_type)  # proto3: known types have none
                numbers = response.all_extension_numbers_response
                numbers.base_type_name = request.all_extension_numbers_of_type
            case _:
                raise KeyError(question)
    except KeyError:
        response.error_response.error_code = Code.NOT_FOUND
        response.error_response.error_message = "not found"
    return response


def _file_of_symbol(symbol: str) -> FileDescriptor:
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:  # the pool does not know methods by name
        service, _, method = symbol.rpartition(".")
        return POOL.FindServiceByName(service).methods_by_name[method].containing_service.file


def _put_files(response: Any, file: FileDescriptor) -> None:
    """The file and everything it imports, each once, imports after what needs them."""
    files = {file.name: file}
    waiting = [file]
    while waiting:
        for imported in waiting.pop().dependencies:
            if imported.name not in files:
                files[imported.name] = imported
                waiting.append(imported)
    response.file_descriptor_response.file_descriptor_proto.extend(one.serialized_pb for one in files.values())
