"""JSON Schemas and an example of one served model's requests and answers, in the form of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

from recinfer.columns import dense_name
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.api_docs.schemas import ModelSchemas, Schema, array_of, object_of
from recinfer.serving.server.open_inference_described import model_metadata

__all__ = ["add_schemas"]


def add_schemas(model: ServedModel, registry: ModelRegistry, schemas: ModelSchemas) -> None:
    """Add the request and the answer of a ModelInfer, and an example of one sample."""
    described = model_metadata(registry, model.name, model.version)
    inputs = [tensor["name"] for tensor in described["inputs"]]
    outputs = [tensor["name"] for tensor in described["outputs"]]
    types = {"type": "string", "enum": ["INT64", "INT32", "FP32"]}
    shape = array_of({"type": "integer", "minimum": 0}, None) | {"minItems": 1, "maxItems": 2}
    parameters = schemas.add("InferParameters", {"type": "object", "additionalProperties": True})
    data = array_of({"anyOf": [{"type": "number"}, array_of({"type": "number"}, None)]}, None)

    def tensors(kind: str, known: list[str]) -> Schema:
        name = {"type": "string", "enum": known}
        properties = {"name": name, "datatype": types, "shape": shape, "data": data, "parameters": parameters}
        return array_of(schemas.add(kind, object_of(properties, ["name", "datatype", "shape"])), None)

    name = {"type": "string", "enum": outputs}
    wanted = schemas.add("InferWanted", object_of({"name": name, "parameters": parameters}, ["name"]))
    # A feature with the same number of ids in every sample may come as one tensor of its own name.
    given = tensors("InferInput", list(dict.fromkeys([*inputs, *model.predictor.intake.names])))
    text, whole = {"type": "string"}, {"parameters": parameters, "id": {"type": "string"}}
    schemas.add("InferRequest", object_of({**whole, "inputs": given, "outputs": array_of(wanted, None)}, ["inputs"]))
    answer = {"model_name": text, "model_version": text, **whole, "outputs": tensors("InferOutput", outputs)}
    schemas.add("InferResponse", object_of(answer, ["model_name", "model_version", "outputs"]))
    schemas.examples["InferRequest"] = {"one sample": {"inputs": _example(model)}}


def _example(model: ServedModel) -> list[dict[str, Any]]:
    """The tensors of one sample with one id per feature."""
    predictor = model.predictor
    features, tables = predictor.intake.names, predictor.manifest.feature_tables
    found = []
    for name in features:
        one = 1 % min(table.rows for table in tables[name])
        found.append(_tensor(f"{name}.values", "INT64", [1], [one]))
        found.append(_tensor(f"{name}.lengths", "INT32", [1], [1]))
        if name in predictor.intake.weighted:
            found.append(_tensor(f"{name}.weights", "FP32", [1], [1.0]))
    if num_dense := predictor.num_dense:
        found.append(_tensor(dense_name(features), "FP32", [1, num_dense], [0.5] * num_dense))
    return found


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}
