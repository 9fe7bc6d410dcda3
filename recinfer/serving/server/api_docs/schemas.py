"""JSON Schemas and examples of one served model's requests and answers, in the forms of V1 and V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server import open_inference as oip
from recinfer.serving.server.v1.inputs import DENSE, inputs_of
from recinfer.serving.server.v1.requests import SIGNATURES
from recinfer.serving.wire.limits import Limits

__all__ = ["ModelSchemas", "schemas_of"]

_FLOAT = {"type": "number", "format": "float"}
_MISSING_RANKS = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "Ranks that did not answer, so that their rows are zero; only there when some did not.",
}

Schema = dict[str, Any]


@dataclass(frozen=True)
class ModelSchemas:
    """What one model takes and gives.

    Attributes:
        components: JSON Schemas by name.
        examples: requests that the model answers, by the schema of their request and a name of their own.
    """

    components: dict[str, Schema]
    examples: dict[str, dict[str, Any]]


def schemas_of(model: ServedModel, registry: ModelRegistry, limits: Limits) -> ModelSchemas:
    """Of the calls that ``model`` answers: ``Predict`` (with a dense part) and ``Lookup`` of V1, ``Infer`` of V2."""
    made = _Model(model, limits)
    components, examples = made.infer(registry)
    if model.predictor.manifest.dense is not None:
        components |= made.predict()
        examples["PredictRequest"] = made.examples(with_dense=True)
    components |= made.lookup()
    examples["LookupRequest"] = made.examples(with_dense=False)
    return ModelSchemas(components, examples)


class _Model:
    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self._model, self._limits = model, limits
        predictor = model.predictor
        self._manifest, self._inputs = predictor.manifest, inputs_of(predictor)
        self._weighted = {f for module in self._manifest.modules if module.is_weighted for f in module.features}
        self._tables = self._manifest.feature_tables
        self._info = {feature.name: feature for feature in self._manifest.features}

    # -- V1

    def predict(self) -> dict[str, Schema]:
        """The request and the answer of a prediction."""
        dense = self._manifest.dense
        assert dense is not None
        needed = [name for name in self._inputs.features if self._info[name].missing == "reject"]
        shapes = {output.name: output.shape for output in dense.outputs}
        row = {name: _array(_FLOAT, *shape) for name, shape in shapes.items()}
        column = {name: _array(_FLOAT, None, *shape) for name, shape in shapes.items()}
        return {
            "PredictRequest": self._request("Predict", needed, with_dense=True),
            "PredictResponse": _response(_bare_or_named(row), _bare_or_named(column)),
        }

    def lookup(self) -> dict[str, Schema]:
        """The request and the answer of a lookup."""
        row, column = {}, {}
        for spec in self._model.predictor.features:
            shape = (spec.dim,) if spec.pooled else (None, spec.dim)
            row[spec.name], column[spec.name] = _array(_FLOAT, *shape), _array(_FLOAT, None, *shape)
        return {
            "LookupRequest": self._request("Lookup", [], with_dense=False),
            "LookupResponse": _response(_object(row, []), _object(column, [])),
        }

    def _request(self, call: Any, needed: list[str], *, with_dense: bool) -> Schema:
        row = {name: self._cell(name) for name in self._inputs.features}
        column: dict[str, Schema] = {name: _array(cell, None) for name, cell in row.items()}
        for name in self._weighted:
            ids, weights = _array(_array(self._id(name), None), None), _array(_array(_FLOAT, None), None)
            column[name] = {"anyOf": [column[name], _object({"ids": ids, "weights": weights}, ["ids", "weights"])]}
        signature = {"type": "string", "enum": [*SIGNATURES[call], ""]}
        forms = []
        for field, properties in (("instances", row), ("inputs", column)):
            whole = _object(properties, needed)
            whole["minProperties"] = 1
            if with_dense and self._inputs.num_dense:
                self._add_dense(whole, is_row=field == "instances")
            rows = _array(whole, None) | {"minItems": 1, "maxItems": self._limits.max_batch}
            given = rows if field == "instances" else whole
            forms.append(_object({field: given, "signature_name": signature}, [field]))
            forms[-1]["title"] = "rows" if field == "instances" else "columns"
        return {"oneOf": forms}

    def _add_dense(self, whole: Schema, *, is_row: bool) -> None:
        numbers = _array(_FLOAT, self._inputs.num_dense) | {
            "description": "All dense columns, as the model takes them."
        }
        whole["properties"][DENSE] = numbers if is_row else _array(numbers, None)
        if not self._inputs.columns:
            whole["required"].append(DENSE)
            return
        # The contract's transforms (fill, clip, log, scale) make this number from the raw one.
        one = _FLOAT | {
            "description": "A dense column, as the model takes it: after the feature contract's transforms."
        }
        for name in self._inputs.columns:
            whole["properties"][name] = one if is_row else _array(one, None)
        whole["oneOf"] = [{"required": [DENSE]}, {"required": list(self._inputs.columns)}]

    def _id(self, name: str) -> Schema:
        if self._info[name].out_of_range == "default_row":
            return {"type": "integer", "format": "int64"}
        rows = min(table.rows for table in self._tables[name])
        return {"type": "integer", "format": "int64", "minimum": 0, "maximum": rows - 1}

    def _cell(self, name: str) -> Schema:
        info, one = self._info[name], self._id(name)
        tables = ", ".join(dict.fromkeys(table.name for table in self._tables[name]))
        text = f"Ids of table {tables}."
        if info.missing != "reject":
            text += " May be left out: " + ("no ids." if info.missing == "empty" else f"the id {info.missing}.")
        forms: list[Schema] = [_array(one, None), one]
        if name in self._weighted:
            forms.append(_object({"ids": forms[0], "weights": _array(_FLOAT, None)}, ["ids", "weights"]))
        return {"description": text, "anyOf": forms}

    def examples(self, *, with_dense: bool) -> dict[str, Any]:
        """Requests of two samples, as rows and as columns."""
        rows = []
        for at in range(2):
            row: dict[str, Any] = {}
            for name in self._inputs.features:
                ids = [(at + 1) % min(table.rows for table in self._tables[name])]
                row[name] = {"ids": ids, "weights": [1.0]} if name in self._weighted else ids
            if with_dense and self._inputs.num_dense:
                row[DENSE] = [0.5] * self._inputs.num_dense
            rows.append(row)
        found = {
            "rows": {"instances": rows},
            "columns": {"inputs": {name: [row[name] for row in rows] for name in rows[0]}},
        }
        if with_dense and self._inputs.columns:
            named = {name: cell for name, cell in rows[0].items() if name != DENSE}
            found["named columns"] = {"instances": [named | dict.fromkeys(self._inputs.columns, 0.5)]}
        return found

    # -- V2

    def infer(self, registry: ModelRegistry) -> tuple[dict[str, Schema], dict[str, dict[str, Any]]]:
        """The request and the answer of a ModelInfer, and an example."""
        described = oip.model_metadata(registry, self._model.name, self._model.version)
        inputs = [tensor["name"] for tensor in described["inputs"]]
        outputs = [tensor["name"] for tensor in described["outputs"]]
        # A feature with the same number of ids in every sample may come as one tensor of its own name.
        names = list(dict.fromkeys([*inputs, *self._inputs.features]))
        types = {"type": "string", "enum": ["INT64", "INT32", "FP32"]}
        shape = _array({"type": "integer", "minimum": 0}, None) | {"minItems": 1, "maxItems": 2}
        parameters = {"type": "object", "additionalProperties": True}
        data = _array({"anyOf": [{"type": "number"}, _array({"type": "number"}, None)]}, None)

        def tensor(known: list[str]) -> Schema:
            name = {"type": "string", "enum": known}
            properties = {"name": name, "datatype": types, "shape": shape, "data": data, "parameters": parameters}
            return _object(properties, ["name", "datatype", "shape"])

        wanted = _object({"name": {"type": "string", "enum": outputs}, "parameters": parameters}, ["name"])
        request: dict[str, Schema] = {
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "additionalProperties": True,
                "properties": {"method": {"type": "string", "enum": ["predict", "lookup"]}},
            },
            "inputs": _array(tensor(names), None),
            "outputs": _array(wanted, None),
        }
        answer: dict[str, Schema] = {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "parameters": parameters,
            "outputs": _array(tensor(outputs), None),
        }
        components = {
            "InferRequest": _object(request, ["inputs"]),
            "InferResponse": _object(answer, ["model_name", "model_version", "outputs"]),
        }
        return components, {"InferRequest": {"one sample": {"inputs": self._infer_inputs()}}}

    def _infer_inputs(self) -> list[dict[str, Any]]:
        found = []
        for name in self._inputs.features:
            one = 1 % min(table.rows for table in self._tables[name])
            found.append(_tensor(f"{name}.values", "INT64", [1], [one]))
            found.append(_tensor(f"{name}.lengths", "INT32", [1], [1]))
            if name in self._weighted:
                found.append(_tensor(f"{name}.weights", "FP32", [1], [1.0]))
        if self._inputs.num_dense:
            found.append(_tensor(DENSE, "FP32", [1, self._inputs.num_dense], [0.5] * self._inputs.num_dense))
        return found


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _array(items: Schema, *sizes: int | None) -> Schema:
    """Lists in lists of these sizes, the outermost first; None is any."""
    for size in reversed(sizes):
        items = {"type": "array", "items": items} | ({} if size is None else {"minItems": size, "maxItems": size})
    return items


def _object(properties: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}


def _bare_or_named(outputs: dict[str, Schema]) -> Schema:
    """The only output as it is, several by name."""
    return next(iter(outputs.values())) if len(outputs) == 1 else _object(outputs, list(outputs))


def _response(row: Schema, columns: Schema) -> Schema:
    rows = _object({"predictions": _array(row, None), "missing_ranks": _MISSING_RANKS}, ["predictions"])
    return {"oneOf": [rows, _object({"outputs": columns, "missing_ranks": _MISSING_RANKS}, ["outputs"])]}
