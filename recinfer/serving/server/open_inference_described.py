"""The tensors that models take and return in the Open Inference Protocol: its metadata, JSON Schemas and an example request."""

from __future__ import annotations

import math
from typing import Any

from recinfer.columns import dense_name
from recinfer.inference.specs import InputSpec, values_per_sample
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.api_docs.schemas import ModelSchemas, Schema, array_of, object_of
from recinfer.serving.server.open_inference import BYTES, DATATYPES, EMBEDDING, LENGTHS
from recinfer.version import __version__

__all__ = ["add_schemas", "model_metadata", "server_metadata"]


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


def add_schemas(model: ServedModel, registry: ModelRegistry, schemas: ModelSchemas) -> None:
    """Add the request and the answer of a ModelInfer, and an example of one sample."""
    described = model_metadata(model, registry)
    inputs = [tensor["name"] for tensor in described["inputs"]]
    outputs = [tensor["name"] for tensor in described["outputs"]]
    named = model.predictor.inputs.infos
    datatypes = dict.fromkeys(["INT64", "INT32", "FP32", *(DATATYPES[info.dtype] for info in named)])
    if model.predictor.manifest.string_features:
        datatypes[BYTES] = None
    types = {"type": "string", "enum": list(datatypes)}
    sizes = {"maxItems": 8} if named else {"minItems": 1, "maxItems": 2}
    shape = array_of({"type": "integer", "minimum": 0}, None) | sizes
    parameters = schemas.add("InferParameters", {"type": "object", "additionalProperties": True})
    kinds = ["number", *(kind for key, kind in (("BOOL", "boolean"), (BYTES, "string")) if key in datatypes)]
    one: Schema = {"type": kinds if len(kinds) > 1 else "number"}
    rank = max([2, *(len(info.shape) + (info.kind == "jagged") for info in named)])
    data = one
    for _ in range(rank - 1):
        data = {"anyOf": [one, array_of(data, None)]}
    data = array_of(data, None)

    def tensors(kind: str, known: list[str]) -> Schema:
        name = {"type": "string", "enum": known}
        properties = {"name": name, "datatype": types, "shape": shape, "data": data, "parameters": parameters}
        return array_of(schemas.add(kind, object_of(properties, ["name", "datatype", "shape"])), None)

    name = {"type": "string", "enum": outputs}
    wanted = schemas.add("InferWanted", object_of({"name": name, "parameters": parameters}, ["name"]))
    # A feature with the same number of ids in every sample may come as one tensor of its own name.
    jagged = [info.name for info in named if info.kind == "jagged"]
    given = tensors("InferInput", list(dict.fromkeys([*inputs, *model.predictor.intake.names, *jagged])))
    text, whole = {"type": "string"}, {"parameters": parameters, "id": {"type": "string"}}
    schemas.add("InferRequest", object_of({**whole, "inputs": given, "outputs": array_of(wanted, None)}, ["inputs"]))
    answer = {"model_name": text, "model_version": text, **whole, "outputs": tensors("InferOutput", outputs)}
    schemas.add("InferResponse", object_of(answer, ["model_name", "model_version", "outputs"]))
    schemas.examples["InferRequest"] = {"one sample": {"inputs": _example(model)}}


def _example(model: ServedModel) -> list[dict[str, Any]]:
    """The tensors of one sample with one id per feature."""
    predictor = model.predictor
    features, tables = predictor.intake.names, predictor.manifest.feature_tables
    specs = {spec.name: spec for spec in predictor.inputs.specs}
    strings = predictor.manifest.string_examples
    found = []
    for name in features:
        one = 1 % min((table.rows for table in tables.get(name, ())), default=2)
        count = values_per_sample(specs, name)
        if name in strings:
            found.append(_given(f"{name}.values", BYTES, [count], strings[name][:1] * count))
        else:
            found.append(_given(f"{name}.values", "INT64", [count], [one] * count))
        found.append(_given(f"{name}.lengths", "INT32", [1], [count]))
        if name in predictor.intake.weighted:
            found.append(_given(f"{name}.weights", "FP32", [count], [1.0] * count))
    for info in predictor.inputs.infos:
        found += _example_of(info, values_per_sample(specs, info.name))
    if num_dense := predictor.num_dense:
        found.append(_given(dense_name(features), "FP32", [1, num_dense], [0.5] * num_dense))
    return found


def _example_of(info: InputSpec, count: int) -> list[dict[str, Any]]:
    """The tensors of one sample of a named input, with ``count`` values of a jagged one."""
    one: Any = 0.5 if "float" in info.dtype else info.dtype == "bool" or 1
    datatype = "FP32" if info.dtype == "bfloat16" else DATATYPES[info.dtype]
    shape = [count if info.kind == "jagged" else 1, *info.shape[1:]] if info.shape else []
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    flat = [one] * math.prod(sizes)
    if info.kind == "tensor":
        return [_given(info.name, datatype, sizes, flat)]
    return [
        _given(f"{info.name}.values", datatype, sizes, flat),
        _given(f"{info.name}.lengths", "INT32", [1], [count]),
    ]


def _given(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return _tensor(name, datatype, *shape) | {"data": data}
