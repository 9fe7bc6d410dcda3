"""Answers serialized requests with serialized responses; knows no network, so every door (gRPC, TorchServe) uses it."""

from __future__ import annotations

import json

from recinfer.errors import InputError
from recinfer.serving import codec
from recinfer.serving.limits import Limits
from recinfer.serving.proto import inference_pb2 as pb
from recinfer.serving.registry import ModelRegistry, ServedModel
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["InferenceService"]

_FLOAT_BYTES = 4


class InferenceService:
    """The three calls of the wire over the models of a registry: bytes in, bytes out. Thread-safe.

    Each method raises InputError or NotFoundError for what the caller did wrong; recinfer.serving.status maps errors
    to codes.
    """

    def __init__(self, registry: ModelRegistry, limits: Limits | None = None) -> None:
        self.registry = registry
        self.limits = limits or Limits()

    def lookup(self, data: bytes) -> bytes:
        """LookupRequest -> LookupResponse."""
        request = self._parse(pb.LookupRequest, data)
        model = self.registry.get(request.model, request.version)
        features = codec.decode_features(request.features, self.limits)
        self._check_response_size(model, features)
        result = model.predictor.lookup(features)
        return codec.encode_lookup_response(result.pooled, result.sequences, features.stride(), model.version)

    def predict(self, data: bytes) -> bytes:
        """PredictRequest -> PredictResponse."""
        request = self._parse(pb.PredictRequest, data)
        model = self.registry.get(request.model, request.version)
        features = codec.decode_features(request.features, self.limits)
        dense = codec.decode_dense(request.dense, features.stride(), model.predictor.num_dense)
        return codec.encode_predict_response(model.predictor.predict(dense, features), model.version)

    def get_model(self, data: bytes) -> bytes:
        """GetModelRequest -> ModelInfo."""
        request = self._parse(pb.GetModelRequest, data)
        model = self.registry.get(request.model, request.version)
        predictor = model.predictor
        contract = predictor.manifest.contract
        features = [
            pb.FeatureInfo(name=f.name, table=f.table, rows=f.rows, dim=f.dim, pooled=f.pooled)
            for f in predictor.features
        ]
        return pb.ModelInfo(
            name=model.name,
            version=model.version,
            features=features,
            num_dense=predictor.num_dense,
            precision=predictor.manifest.precision,
            plan_hash=predictor.manifest.plan_hash,
            feature_contract=json.dumps(contract) if contract is not None else "",
        ).SerializeToString()

    def _parse(self, kind: type[codec.M], data: bytes) -> codec.M:
        if len(data) > self.limits.max_message_bytes:
            raise InputError(f"request: got {len(data)} bytes, expected at most {self.limits.max_message_bytes}")
        return codec.parse(kind, data)

    def _check_response_size(self, model: ServedModel, features: KeyedJaggedTensor) -> None:
        limit = self.limits.max_response_bytes // _FLOAT_BYTES
        ids, batch = features.values().numel(), features.stride()
        if batch * model.pooled_width + ids * model.sequence_width <= limit:
            return
        pooled, sequence = model.widths_of(features.keys())
        most = batch * pooled + ids * sequence
        if most > limit:
            raise InputError(
                f"features.batch_size: got {batch} samples with {ids} ids, whose embeddings may take "
                f"{most * _FLOAT_BYTES} bytes; expected at most {self.limits.max_response_bytes}: "
                "send fewer samples a request"
            )
