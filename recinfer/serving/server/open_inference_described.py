"""The metadata of a server and its models in the Open Inference Protocol: the tensors that each model takes and returns."""

from __future__ import annotations

from typing import Any

from recinfer.columns import dense_name
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.server.open_inference import EMBEDDING, LENGTHS
from recinfer.version import __version__

__all__ = ["model_metadata", "server_metadata"]


def server_metadata() -> dict[str, Any]:
    """The protocol's server metadata in its JSON form."""
    return {"name": "recinfer", "version": __version__, "extensions": ["binary_tensor_data"]}


def model_metadata(registry: ModelRegistry, name: str, version: str) -> dict[str, Any]:
    """The protocol's model metadata in its JSON form; embeddings are among the outputs.

    Inputs of features that a prediction may leave out have the parameter ``missing``: "empty", or the id that stands for it.

    Raises:
        NotFoundError: no such model or version.
    """
    model = registry.get(name, version)
    predictor = model.predictor
    manifest = predictor.manifest
    dense = dense_name(predictor.intake.names)
    inputs = [_tensor(dense, "FP32", -1, predictor.num_dense)] if predictor.num_dense else []
    weighted = predictor.intake.weighted
    missing = {feature.name: feature.missing for feature in manifest.features}
    for feature in dict.fromkeys(feature for module in manifest.modules for feature in module.features):
        tensors = [_tensor(f"{feature}.values", "INT64", -1), _tensor(f"{feature}.lengths", "INT32", -1)]
        if feature in weighted:
            tensors.append(_tensor(f"{feature}.weights", "FP32", -1))
        if missing[feature] != "reject":
            tensors = [tensor | {"parameters": {"missing": str(missing[feature])}} for tensor in tensors]
        inputs += tensors
    outputs = []
    if manifest.dense is not None:
        outputs = [_tensor(output.name, "FP32", -1, *output.shape) for output in manifest.dense.outputs]
    for spec in predictor.features:
        outputs.append(_tensor(spec.name + EMBEDDING, "FP32", -1, spec.dim))
        if not spec.pooled:
            outputs.append(_tensor(spec.name + LENGTHS, "INT32", -1))
    return {
        "name": model.name,
        "versions": list(registry.versions(model.name)),
        "platform": "recinfer",
        "inputs": inputs,
        "outputs": outputs,
    }


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}
