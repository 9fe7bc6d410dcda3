"""Calls of a service from its descriptor alone, as a client in another language would make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from recinfer.serving.wire.proto import admin_pb2, inference_pb2

__all__ = ["admin_stub", "inference_stub"]


def _stub(channel: grpc.Channel, service: ServiceDescriptor) -> Any:
    """An object with a method for each call of the service."""
    return SimpleNamespace(
        **{
            call.name: channel.unary_unary(
                f"/{service.full_name}/{call.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(call.output_type).FromString,
            )
            for call in service.methods
        }
    )


def admin_stub(channel: grpc.Channel) -> Any:
    """recinfer.v1.Admin."""
    return _stub(channel, admin_pb2.DESCRIPTOR.services_by_name["Admin"])


def inference_stub(channel: grpc.Channel) -> Any:
    """recinfer.v1.Inference."""
    return _stub(channel, inference_pb2.DESCRIPTOR.services_by_name["Inference"])
