"""JSON Schemas and an example of one served model's requests and answers, in the form of the Open Inference Protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recinfer.columns import dense_name
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.api_docs.schemas import ModelSchemas, Schema, array_of, object_of
from recinfer.serving.server.open_inference import BYTES, DATATYPES
from recinfer.serving.server.open_inference_described import model_metadata

if TYPE_CHECKING:
    from recinfer.inference.specs import InputSpec

__all__ = ["add_schemas"]


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
        count = _count(specs, name)
        if name in strings:
            found.append(_tensor(f"{name}.values", BYTES, [count], strings[name][:1] * count))
        else:
            found.append(_tensor(f"{name}.values", "INT64", [count], [one] * count))
        found.append(_tensor(f"{name}.lengths", "INT32", [1], [count]))
        if name in predictor.intake.weighted:
            found.append(_tensor(f"{name}.weights", "FP32", [count], [1.0] * count))
    for info in predictor.inputs.infos:
        found += _named(info, _count(specs, info.name))
    if num_dense := predictor.num_dense:
        found.append(_tensor(dense_name(features), "FP32", [1, num_dense], [0.5] * num_dense))
    return found


def _count(specs: Mapping[str, InputSpec], name: str) -> int:
    """The number of values of a sample that forward relies on; 1 for any number."""
    name = next((counts.name for counts in specs.values() if counts.counts == name), name)
    spec = specs.get(name)
    if spec is None:
        return 1
    return spec.per_sample or specs.get(spec.as_long_as, spec).per_sample or 1


def _named(info: InputSpec, count: int) -> list[dict[str, Any]]:
    """The tensors of one sample of a named input, with ``count`` values of a jagged one."""
    one: Any = 0.5 if "float" in info.dtype else info.dtype == "bool" or 1
    datatype = "FP32" if info.dtype == "bfloat16" else DATATYPES[info.dtype]
    shape = [count if info.kind == "jagged" else 1, *info.shape[1:]] if info.shape else []
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    flat = [one] * math.prod(sizes)
    if info.kind == "tensor":
        return [_tensor(info.name, datatype, sizes, flat)]
    return [
        _tensor(f"{info.name}.values", datatype, sizes, flat),
        _tensor(f"{info.name}.lengths", "INT32", [1], [count]),
    ]


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}
