"""Descriptions of models in the V1 protocol: the status of their versions, and metadata in TensorFlow Serving's form."""

from __future__ import annotations

from typing import Any

from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.v1.inputs import inputs_of

__all__ = ["metadata", "status"]

_DTYPES = {
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "float16": "DT_HALF",
    "bfloat16": "DT_BFLOAT16",
    "int64": "DT_INT64",
    "int32": "DT_INT32",
    "int16": "DT_INT16",
    "int8": "DT_INT8",
    "uint8": "DT_UINT8",
    "bool": "DT_BOOL",
}


def status(registry: ModelRegistry, name: str, version: str, is_ready: bool) -> dict[str, Any]:
    """The state of the loaded versions (or of ``version`` alone), with KServe's ``name`` and ``ready``: whether the server can
    answer now. A version with a fault is UNKNOWN, since it may answer wrongly. Raises NotFoundError."""
    versions = [registry.get(name, version).version] if version else list(registry.versions(name))
    faults, found = registry.faults(name), []
    for each in versions:
        state, code = ("UNKNOWN", "DATA_LOSS") if each in faults else ("AVAILABLE", "OK")
        why = {"error_code": code, "error_message": faults.get(each, "")}
        found.append({"version": each, "state": state, "status": why})
    return {"name": name, "ready": is_ready, "model_version_status": found}


def metadata(model: ServedModel) -> dict[str, Any]:
    """Signatures of a model: ``serving_default`` predicts, ``lookup`` returns vectors."""
    predictor = model.predictor
    inputs = inputs_of(predictor)
    features = {name: _tensor(name, "DT_INT64", -1, -1) for name in inputs.features}
    dense = {inputs.dense: _tensor(inputs.dense, "DT_FLOAT", -1, inputs.num_dense)} if inputs.num_dense else {}
    for info in inputs.named:
        sizes = [-1 if isinstance(size, str) else size for size in info.shape]
        dense[info.name] = _tensor(info.name, _DTYPES[info.dtype], *([-1] if info.kind == "jagged" else []), *sizes)
    signatures = {}
    if predictor.manifest.dense is not None:
        outputs = {
            output.name: _tensor(output.name, "DT_FLOAT", -1, *output.shape)
            for output in predictor.manifest.dense.outputs
        }
        signatures["serving_default"] = _signature(features | dense, outputs)
    vectors = {
        spec.name: _tensor(spec.name, "DT_FLOAT", -1, *([] if spec.pooled else [-1]), spec.dim)
        for spec in predictor.features
    }
    signatures["lookup"] = _signature(features, vectors)
    return {
        "model_spec": {"name": model.name, "signature_name": "", "version": model.version},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def _signature(inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs, "method_name": "tensorflow/serving/predict"}


def _tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    # Sizes are text: protobuf's JSON, and TensorFlow Serving with it, writes 64-bit integers as text.
    dim = [{"size": str(size), "name": ""} for size in shape]
    return {"dtype": dtype, "tensor_shape": {"dim": dim, "unknown_rank": False}, "name": name}
