"""The gRPC form of the Open Inference Protocol: serialized messages in and out, raw and typed contents."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import Message

from recinfer.columns import Strings, strings_of
from recinfer.errors import InputError, NotFoundError, RecinferError
from recinfer.serving.engine.memory_budget import Ticket, ticket_of_task
from recinfer.serving.engine.request import served_of_task
from recinfer.serving.server import open_inference as oip
from recinfer.serving.server.open_inference_described import model_metadata, server_metadata
from recinfer.serving.wire import codec
from recinfer.serving.wire._wire import split
from recinfer.serving.wire.arrays import Buffer, bytes_field
from recinfer.serving.wire.loop import off_loop
from recinfer.serving.wire.proto import open_inference_pb2 as pb

if TYPE_CHECKING:
    from recinfer.serving.engine.registry import ModelRegistry, ServedModel
    from recinfer.serving.engine.request import AnswerCall
    from recinfer.serving.wire.limits import Limits

__all__ = ["SERVICE_NAME", "OpenInference", "raw_array", "raw_tensor"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_CONTENTS = {
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "UINT8": "uint_contents",
    "FP64": "fp64_contents",
}
_PARSED, _TYPED = 8, 24  # bytes per byte of a message: of parsed integers, and of integers as objects


class OpenInference:
    """The calls of GRPCInferenceService.

    Args:
        registry: the models.
        limits: bounds on requests.
        answer: answers recinfer's serialized request, by the call's name ("Lookup", "Predict"); raises RecinferErrors.
        is_ready: whether the server takes requests.
    """

    def __init__(
        self, registry: ModelRegistry, limits: Limits, answer: AnswerCall, is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.registry = registry
        self.limits = limits
        self._answer = answer
        self.is_ready = is_ready

    def calls(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """Method name -> serialized request to serialized answer."""
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }

    def model_is_ready(self, name: str, version: str = "") -> bool:
        """Whether the model takes requests; False for an unknown model."""
        try:
            self.choose(name, version)
        except RecinferError:
            return False
        return self.is_ready()

    def choose(self, name: str, version: str) -> ServedModel:
        """Choose the version for a call and count the call for it; raises NotFoundError."""
        model = self.registry.get(name, version)
        served_of_task.set(model)
        return model

    async def infer(self, request: oip.InferRequest, model: ServedModel) -> oip.InferAnswer:
        """The outputs of the version ``model`` for ``request``, with the version that answered."""
        size = sum(tensor.num_bytes for tensor in request.inputs)
        ticket_of_task.get().grow_to_answer(size)
        try:
            return await self._infer(request, size, model)
        except NotFoundError:
            if request.version:
                raise
            # The chosen version may be unloaded by now; the second try chooses another.
            return await self._infer(request, size, self.choose(request.model, ""))

    async def _infer(self, request: oip.InferRequest, size: int, model: ServedModel) -> oip.InferAnswer:
        call, message = await off_loop(size, oip.to_call, request, model, self.limits)
        answer = await self._answer(call, message)
        return await off_loop(len(answer), oip.read_answer, call, answer, request.outputs)

    async def _server_live(self, data: bytes) -> bytes:
        codec.parse(pb.ServerLiveRequest, data)
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def _server_ready(self, data: bytes) -> bytes:
        codec.parse(pb.ServerReadyRequest, data)
        return pb.ServerReadyResponse(ready=self.is_ready()).SerializeToString()

    async def _server_metadata(self, data: bytes) -> bytes:
        codec.parse(pb.ServerMetadataRequest, data)
        return pb.ServerMetadataResponse(**server_metadata()).SerializeToString()

    async def _model_ready(self, data: bytes) -> bytes:
        request = codec.parse(pb.ModelReadyRequest, data)
        return pb.ModelReadyResponse(ready=self.model_is_ready(request.name, request.version)).SerializeToString()

    async def _model_metadata(self, data: bytes) -> bytes:
        request = codec.parse(pb.ModelMetadataRequest, data)
        found = model_metadata(self.choose(request.name, request.version), self.registry)
        for tensor in found["inputs"]:
            given = tensor.get("parameters", {})
            tensor["parameters"] = {key: pb.InferParameter(string_param=text) for key, text in given.items()}
        return pb.ModelMetadataResponse(**found).SerializeToString()

    async def _model_infer(self, data: bytes) -> bytes:
        ticket = ticket_of_task.get()
        ticket.grow_to_answer(_PARSED * len(data))
        message = await off_loop(len(data), codec.parse, pb.ModelInferRequest, data)
        model = self.choose(message.model_name, message.model_version)
        request = await off_loop(len(data), _read, message, len(data), ticket)
        answer = await self.infer(request, model)
        return _write(request.model or self.registry.names()[0], request.id, answer)


def _read(message: Any, num_bytes: int, ticket: Ticket) -> oip.InferRequest:
    raws = message.raw_input_contents
    if not raws:
        ticket.grow_to_answer(_TYPED * num_bytes)
    if raws and len(raws) != len(message.inputs):
        raise InputError(f"raw_input_contents: got {len(raws)} entries, expected {len(message.inputs)}, one an input")
    parameters = _parameters("", message)
    for output in message.outputs:
        _parameters(f"output {output.name!r}", output)
    inputs = []
    for index, tensor in enumerate(message.inputs):
        _parameters(f"input {tensor.name!r}", tensor)
        if raws and tensor.HasField("contents"):
            raise InputError(f"input {tensor.name!r}: got contents and raw_input_contents, expected one of them")
        shape = tuple(tensor.shape)
        if raws:
            inputs.append(raw_tensor(tensor.name, tensor.datatype, shape, raws[index]))
        elif tensor.datatype == oip.BYTES:
            _check_contents(tensor, "bytes_contents")
            strings = strings_of(f"input {tensor.name!r}", list(tensor.contents.bytes_contents))
            inputs.append(oip.string_tensor(tensor.name, shape, strings))
        else:
            inputs.append(oip.InputTensor(tensor.name, tensor.datatype, shape, _typed(tensor)))
    ticket.resize(2 * num_bytes + sum(tensor.num_bytes for tensor in inputs))
    return oip.InferRequest(
        message.model_name,
        message.model_version,
        message.id,
        inputs,
        [output.name for output in message.outputs],
        parameters.get("method", ""),
    )


def _parameters(place: str, message: Any) -> dict[str, Any]:
    """The checked parameters of a request, an input or an output by name; None for a parameter without a value."""
    if not message.parameters:
        return {}
    found = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    oip.check_parameters(place, found)
    return found


def raw_tensor(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> oip.InputTensor:
    """An input from its bytes in the protocol's binary form; raises InputError."""
    if datatype != oip.BYTES:
        return oip.InputTensor(name, datatype, shape, raw_array(name, datatype, raw))
    count = math.prod(shape)
    found = split(raw, count) if 0 <= count <= len(raw) // 4 else None
    if found is None:
        raise InputError(
            f"input {name!r}: got {len(raw)} bytes, expected {list(shape)} strings of BYTES, each behind its length in 4 bytes, "
            "little-endian"
        )
    data, lengths = found
    return oip.string_tensor(name, shape, Strings((), data, np.frombuffer(lengths, np.int32)))


def raw_array(name: str, datatype: str, raw: bytes | memoryview) -> np.ndarray:
    """``raw`` as a 1-D array of ``datatype`` that shares its memory; raises InputError."""
    dtype = oip.dtype_of(name, datatype)
    if len(raw) % dtype.itemsize:
        raise InputError(f"input {name!r}: got {len(raw)} bytes, expected a multiple of {dtype.itemsize} ({datatype})")
    return np.frombuffer(raw, dtype) if len(raw) else np.zeros(0, dtype)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> np.ndarray:
    dtype = oip.dtype_of(tensor.name, tensor.datatype)
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise InputError(f"input {tensor.name!r}: got {tensor.datatype} contents, expected raw_input_contents")
    _check_contents(tensor, field)
    try:
        return np.array(getattr(tensor.contents, field), dtype)
    except OverflowError:
        raise InputError(f"input {tensor.name!r}: got a number beyond {tensor.datatype}") from None


def _check_contents(tensor: pb.ModelInferRequest.InferInputTensor, field: str) -> None:
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            raise InputError(f"input {tensor.name!r}: got {other.name}, expected {field} as {tensor.datatype} has")


def _write(model: str, request_id: str, answer: oip.InferAnswer) -> bytes:
    head: Message = pb.ModelInferResponse(
        model_name=model,
        model_version=answer.version,
        id=request_id,
        outputs=[
            {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape} for tensor in answer.outputs
        ],
        parameters={name: pb.InferParameter(string_param=text) for name, text in answer.parameters.items()},
    )
    parts: list[Buffer] = [head.SerializeToString()]
    for tensor in answer.outputs:
        parts += bytes_field(6, tensor.data)
    return b"".join(parts)
