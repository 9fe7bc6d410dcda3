"""The metadata of a server and its models in the Open Inference Protocol: the tensors that each model takes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recinfer.columns import dense_name
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.open_inference import DATATYPES, EMBEDDING, LENGTHS
from recinfer.version import __version__

if TYPE_CHECKING:
    from recinfer.inference.specs import InputSpec

__all__ = ["model_metadata", "server_metadata"]


def server_metadata() -> dict[str, Any]:
    """The protocol's server metadata in its JSON form."""
    return {"name": "recinfer", "version": __version__, "extensions": ["binary_tensor_data"]}


def model_metadata(model: ServedModel, registry: ModelRegistry) -> dict[str, Any]:
    """The protocol's metadata of ``model`` in its JSON form; embeddings are among the outputs.

    Inputs of features that a prediction may leave out have the parameter ``missing``: "empty", or the id that stands for it.
    Features that take strings have the datatype BYTES; INT64 and INT32 are taken too, as rows.
    Inputs with a number of values that forward relies on have the parameter ``facts``: "exactly 3 per sample".
    """
    predictor = model.predictor
    manifest = predictor.manifest
    dense = dense_name(predictor.intake.names)
    inputs = [_tensor(dense, "FP32", -1, predictor.num_dense)] if predictor.num_dense else []
    weighted, facts = predictor.intake.weighted, {spec.name: spec.facts for spec in predictor.inputs.specs}
    missing: dict[str, str | int] = dict.fromkeys(predictor.intake.names, "reject")
    missing |= {feature.name: feature.missing for feature in manifest.features if feature.name in missing}
    looked_up = [feature for module in manifest.modules for feature in module.features if feature in missing]
    for feature in dict.fromkeys([*looked_up, *missing]):
        datatype = "BYTES" if feature in manifest.string_features else "INT64"
        tensors = [_tensor(f"{feature}.values", datatype, -1), _tensor(f"{feature}.lengths", "INT32", -1)]
        if feature in weighted:
            tensors.append(_tensor(f"{feature}.weights", "FP32", -1))
        if missing[feature] != "reject":
            tensors = [tensor | {"parameters": {"missing": str(missing[feature])}} for tensor in tensors]
        inputs += _with_facts(tensors, facts.get(feature, ""))
    for info in predictor.inputs.infos:
        inputs += _with_facts(_named(info), info.facts)
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


def _named(info: InputSpec) -> list[dict[str, Any]]:
    """The tensors of a named input."""
    shape = [-1 if isinstance(size, str) else size for size in info.shape]
    datatype = DATATYPES[info.dtype]
    if info.kind == "tensor":
        return [_tensor(info.name, datatype, *shape)]
    tensors = [_tensor(f"{info.name}.values", datatype, *shape), _tensor(f"{info.name}.lengths", "INT32", -1)]
    return [*tensors, _tensor(f"{info.name}.weights", "FP32", -1)] if info.weighted else tensors


def _with_facts(tensors: list[dict[str, Any]], facts: str) -> list[dict[str, Any]]:
    if not facts:
        return tensors
    return [tensor | {"parameters": tensor.get("parameters", {}) | {"facts": facts}} for tensor in tensors]


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}
