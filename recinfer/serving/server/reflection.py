"""gRPC's server reflection in both of its versions, v1 and v1alpha, whose messages have the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from recinfer.serving.server.grpc_core import CoreServer

__all__ = ["add_reflection"]

_METHOD = "ServerReflectionInfo"
_ALPHA, _V1 = ".v1alpha.", ".v1."


def add_reflection(server: CoreServer, services: Sequence[str], files: Sequence[FileDescriptor]) -> None:
    """Add both versions of the reflection service to ``server``.

    Args:
        services: services that reflection lists, besides its own.
        files: describe ``services``.
    """
    alpha = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    pool = DescriptorPool()  # a new pool: recinfer's files and the Open Inference Protocol's are in different pools
    for file in files:
        pool.AddSerializedFile(file.serialized_pb)
    pool.Add(alpha)
    pool.Add(_as_v1(alpha))
    own = (reflection.SERVICE_NAME, reflection.SERVICE_NAME.replace(_ALPHA, _V1))
    shown = reflection.aio.ReflectionServicer((*services, *own), pool=pool)
    method = grpc.stream_stream_rpc_method_handler(
        shown.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(service, {_METHOD: method}) for service in own]
    server.add_generic_rpc_handlers(handlers)


def _as_v1(alpha: FileDescriptorProto) -> FileDescriptorProto:
    """The file of v1, which grpcio-reflection lacks: v1alpha's under another package name."""
    file = FileDescriptorProto()
    file.CopyFrom(alpha)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = file.package.removesuffix("alpha")
    file.ClearField("options")
    for field in (field for message in file.message_type for field in message.field):
        if field.type_name:
            field.type_name = field.type_name.replace(_ALPHA, _V1)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(_ALPHA, _V1)
        method.output_type = method.output_type.replace(_ALPHA, _V1)
    return file
