"""A client of the gRPC server: KeyedJaggedTensor in, KeyedTensor and tensors out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2
from torch import Tensor

from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving import codec
from recinfer.serving.proto import inference_pb2 as pb
from recinfer.serving.status import error_of
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["Embeddings", "FeatureDescription", "InferenceClient", "ModelDescription", "invoke"]

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_POLL_S = 0.05


@dataclass(frozen=True)
class Embeddings:
    """What a lookup gives.

    Attributes:
        pooled: one vector a sample and feature, ``[B, sum(dims)]``, in the model's feature order; None when only unpooled
            features were asked for.
        sequences: one vector an id, for each unpooled feature.
        model_version: the version that answered.
    """

    pooled: KeyedTensor | None
    sequences: dict[str, JaggedTensor]
    model_version: str

    def keys(self) -> list[str]:
        """Names of all embeddings, the pooled ones first."""
        return [*(self.pooled.keys() if self.pooled is not None else ()), *self.sequences]

    def __getitem__(self, key: str) -> Tensor | JaggedTensor:
        """``[B, D]`` of a pooled feature, or the JaggedTensor of an unpooled one."""
        return self.sequences[key] if key in self.sequences or self.pooled is None else self.pooled[key]


@dataclass(frozen=True)
class FeatureDescription:
    """One feature of a served model; ids run from 0 to ``rows - 1``."""

    name: str
    table: str
    rows: int
    dim: int
    pooled: bool


@dataclass(frozen=True)
class ModelDescription:
    """What a served model takes and what it is made of.

    ``contract`` makes its inputs of raw rows; None when the archive was exported without one.
    """

    name: str
    version: str
    features: tuple[FeatureDescription, ...]
    num_dense: int
    precision: str
    plan_hash: str
    contract: FeatureContract | None = None


class InferenceClient:
    """Talks to one server. Thread-safe; keeps one channel open until ``close`` (or the end of a ``with`` block).

    Args:
        target: ``"host:port"``.
        model: model of every call; empty: the server's default.
        version: version of every call; empty: the model's default.
        timeout: seconds until a call is given up.

    All calls raise InputError (the request is wrong), NotFoundError (no such model or version), UnavailableError (no
    server there, overloaded, or too slow) or, when the server fails, RecinferError.
    """

    def __init__(self, target: str, *, model: str = "", version: str = "", timeout: float = 10.0) -> None:
        self.target, self.model, self.version, self.timeout = target, model, version, timeout
        # An answer's size is bounded by the server's limits.
        self._channel = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)])
        self._lookup = self._channel.unary_unary(f"/{_SERVICE}/Lookup")
        self._predict = self._channel.unary_unary(f"/{_SERVICE}/Predict")
        self._get_model = self._channel.unary_unary(f"/{_SERVICE}/GetModel")
        self._check = self._channel.unary_unary(f"/{_HEALTH}/Check")

    def lookup(self, features: KeyedJaggedTensor, *, timeout: float | None = None) -> Embeddings:
        """Embeddings of some or all features of the model, given in any order."""
        request = codec.encode_lookup_request(features, self.model, self.version)
        pooled, sequences, version = codec.decode_lookup_response(self._call(self._lookup, request, timeout))
        return Embeddings(pooled, sequences, version)

    def predict(self, dense: Tensor, features: KeyedJaggedTensor, *, timeout: float | None = None) -> dict[str, Tensor]:
        """The model's outputs by name, from ``dense`` float32 ``[B, num_dense]`` and the features of the same samples."""
        request = codec.encode_predict_request(dense, features, self.model, self.version)
        return codec.decode_predict_response(self._call(self._predict, request, timeout))[0]

    def get_model(self, *, timeout: float | None = None) -> ModelDescription:
        """What the model takes and is made of."""
        request = pb.GetModelRequest(model=self.model, version=self.version).SerializeToString()
        info = codec.parse(pb.ModelInfo, self._call(self._get_model, request, timeout))
        features = tuple(FeatureDescription(f.name, f.table, f.rows, f.dim, f.pooled) for f in info.features)
        contract = None
        if info.feature_contract:
            from recinfer.data.contract import FeatureContract

            contract = FeatureContract.from_dict(json.loads(info.feature_contract))
        return ModelDescription(
            info.name, info.version, features, info.num_dense, info.precision, info.plan_hash, contract
        )

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers and takes requests."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE).SerializeToString()
        try:
            answer = codec.parse(health_pb2.HealthCheckResponse, self._call(self._check, request, timeout))
        except RecinferError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_ready(self, timeout: float = 30.0) -> None:
        """Return once the server takes requests.

        Raises:
            UnavailableError: it did not within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not self.is_ready(timeout=max(0.1, end - time.monotonic())):
            if time.monotonic() >= end:
                raise UnavailableError(f"the server at {self.target} is not ready after {timeout:g} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the channel; calls after it fail."""
        self._channel.close()

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Callable[..., bytes], request: bytes, timeout: float | None) -> bytes:
        seconds = self.timeout if timeout is None else timeout
        return invoke(method, request, self.target, seconds, start_with="recinfer serve ARCHIVE --port N")


def invoke(
    method: Callable[..., bytes],
    request: bytes,
    target: str,
    seconds: float,
    *,
    start_with: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Call ``method`` of a channel to ``target`` and turn what gRPC raises into an error of ours."""
    try:
        return method(request, timeout=seconds, metadata=metadata)
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
    except ValueError as error:  # gRPC's word for a closed channel
        raise UnavailableError(f"{target}: {error}; make a new client") from None
    if code is grpc.StatusCode.UNAVAILABLE:
        raise UnavailableError(
            f"no answer from {target} ({details}); is the server running? Start one with: {start_with}"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise UnavailableError(f"{target} did not answer within {seconds:g} s; send less or wait longer")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise RecinferError(f"{target} does not know this call; is it a server of another kind? ({details})")
    raise error_of(code.name, details)
