"""JSON Schemas and examples of one served model's requests and answers, in the forms of V1 and V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.request import CallName
from recinfer.serving.server.open_inference_described import model_metadata
from recinfer.serving.server.v1.inputs import inputs_of
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
    """Schemas and examples of one model's requests and answers.

    Attributes:
        components: JSON Schemas by name.
        examples: requests that the model answers, by the schema of their request (without the prefix) and a name of their own.
    """

    components: dict[str, Schema]
    examples: dict[str, dict[str, Any]]


def schemas_of(model: ServedModel, registry: ModelRegistry, limits: Limits, prefix: str) -> ModelSchemas:
    """The schemas of the calls that ``model`` answers: ``Predict`` (with a dense part) and ``Lookup`` of V1, ``Infer`` of V2.

    The names of all components begin with ``prefix``. Every object is a component: tools that write clients name a class after
    each component, and find no good names for objects within objects.
    """
    made = _Model(model, limits, prefix)
    examples = {"InferRequest": made.infer(registry), "LookupRequest": made.examples(with_dense=False)}
    if model.predictor.manifest.dense is not None:
        made.predict()
        examples["PredictRequest"] = made.examples(with_dense=True)
    made.lookup()
    return ModelSchemas(made.components, examples)


class _Model:
    def __init__(self, model: ServedModel, limits: Limits, prefix: str) -> None:
        self._model = model
        self._limits = limits
        self._prefix = prefix
        predictor = model.predictor
        self._manifest = predictor.manifest
        self._inputs = inputs_of(predictor)
        self._weighted = {f for module in self._manifest.modules if module.is_weighted for f in module.features}
        self._tables = self._manifest.feature_tables
        self._info = {feature.name: feature for feature in self._manifest.features}
        self.components: dict[str, Schema] = {}
        if self._weighted:
            ids, weights = _array({"type": "integer", "format": "int64"}, None), _array(_FLOAT, None)
            self._bag = self._add("WeightedIds", _object({"ids": ids, "weights": weights}, ["ids", "weights"]))
            ids, weights = _array(ids, None), _array(weights, None)
            self._bags = self._add("WeightedColumn", _object({"ids": ids, "weights": weights}, ["ids", "weights"]))

    def _add(self, name: str, schema: Schema) -> Schema:
        """Make ``schema`` a component; returns a reference to it."""
        self.components[self._prefix + name] = schema
        return {"$ref": f"#/components/schemas/{self._prefix}{name}"}

    # -- V1

    def predict(self) -> None:
        """Add the components of a prediction's request and answer."""
        dense = self._manifest.dense
        assert dense is not None
        needed = [name for name in self._inputs.features if self._info[name].missing == "reject"]
        shapes = {output.name: output.shape for output in dense.outputs}
        row = {name: _array(_FLOAT, *shape) for name, shape in shapes.items()}
        column = {name: _array(_FLOAT, None, *shape) for name, shape in shapes.items()}
        self._request("Predict", needed, with_dense=True)
        if len(shapes) == 1:  # a single output has no name, several have
            ((_, one), (_, many)) = (*row.items(), *column.items())
            self._response("Predict", one, many)
        else:
            self._named_response("Predict", row, column)

    def lookup(self) -> None:
        """Add the components of a lookup's request and answer."""
        row, column = {}, {}
        for spec in self._model.predictor.features:
            shape = (spec.dim,) if spec.pooled else (None, spec.dim)
            row[spec.name], column[spec.name] = _array(_FLOAT, *shape), _array(_FLOAT, None, *shape)
        self._request("Lookup", [], with_dense=False)
        self._named_response("Lookup", row, column)

    def _request(self, call: CallName, needed: list[str], *, with_dense: bool) -> None:
        row = {name: self._cell(name) for name in self._inputs.features}
        column: dict[str, Schema] = {name: _array(cell, None) for name, cell in row.items()}
        for name in self._weighted:
            column[name] = {"anyOf": [column[name], self._bags]}
        signature = {"type": "string", "enum": [*SIGNATURES[call], ""]}
        forms = []
        for field, properties in (("instances", row), ("inputs", column)):
            whole = _object(properties, needed) | {"minProperties": 1}
            if with_dense and self._inputs.num_dense:
                self._add_dense(whole, is_row=field == "instances")
            if field == "instances":
                given = _array(self._add(f"{call}Row", whole), None) | {
                    "minItems": 1,
                    "maxItems": self._limits.max_batch,
                }
            else:
                given = self._add(f"{call}Inputs", whole)
            form = _object({field: given, "signature_name": signature}, [field])
            forms.append(self._add(f"{call}{'Rows' if field == 'instances' else 'Columns'}", form))
        self._add(f"{call}Request", {"oneOf": forms})

    def _add_dense(self, whole: Schema, *, is_row: bool) -> None:
        numbers = _array(_FLOAT, self._inputs.num_dense) | {
            "description": "All dense columns, as the model takes them."
        }
        whole["properties"][self._inputs.dense] = numbers if is_row else _array(numbers, None)
        if not self._inputs.columns:
            whole["required"].append(self._inputs.dense)
            return
        # The contract's transforms (fill, clip, log, scale) make this number from the raw one.
        one = _FLOAT | {
            "description": "A dense column, as the model takes it: after the feature contract's transforms."
        }
        for name in self._inputs.columns:
            whole["properties"][name] = one if is_row else _array(one, None)
        whole["description"] = (
            f"With either {self._inputs.dense!r} or all of the columns {', '.join(self._inputs.columns)}."
        )

    def _named_response(self, call: CallName, row: dict[str, Schema], column: dict[str, Schema]) -> None:
        needed = list(row) if call == "Predict" else []
        one = self._add(f"{call}Prediction", _object(row, needed))
        self._response(call, one, self._add(f"{call}Outputs", _object(column, needed)))

    def _response(self, call: CallName, row: Schema, columns: Schema) -> None:
        found = {"missing_ranks": _MISSING_RANKS}
        rows = _object({"predictions": _array(row, None), **found}, ["predictions"])
        forms = [self._add(f"{call}RowsAnswer", rows)]
        forms.append(self._add(f"{call}ColumnsAnswer", _object({"outputs": columns, **found}, ["outputs"])))
        self._add(f"{call}Response", {"oneOf": forms})

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
            forms.append(self._bag)
        return {"description": text, "anyOf": forms}

    def examples(self, *, with_dense: bool) -> dict[str, Any]:
        """Example requests of two samples, as rows and as columns."""
        rows = []
        for at in range(2):
            row: dict[str, Any] = {}
            for name in self._inputs.features:
                ids = [(at + 1) % min(table.rows for table in self._tables[name])]
                row[name] = {"ids": ids, "weights": [1.0]} if name in self._weighted else ids
            if with_dense and self._inputs.num_dense:
                row[self._inputs.dense] = [0.5] * self._inputs.num_dense
            rows.append(row)
        found = {
            "rows": {"instances": rows},
            "columns": {"inputs": {name: [row[name] for row in rows] for name in rows[0]}},
        }
        if with_dense and self._inputs.columns:
            named = {name: cell for name, cell in rows[0].items() if name != self._inputs.dense}
            found["named columns"] = {"instances": [named | dict.fromkeys(self._inputs.columns, 0.5)]}
        return found

    # -- V2

    def infer(self, registry: ModelRegistry) -> dict[str, Any]:
        """Add the components of a ModelInfer's request and answer; returns an example request by name."""
        described = model_metadata(registry, self._model.name, self._model.version)
        inputs = [tensor["name"] for tensor in described["inputs"]]
        outputs = [tensor["name"] for tensor in described["outputs"]]
        types = {"type": "string", "enum": ["INT64", "INT32", "FP32"]}
        shape = _array({"type": "integer", "minimum": 0}, None) | {"minItems": 1, "maxItems": 2}
        parameters = self._add("InferParameters", {"type": "object", "additionalProperties": True})
        data = _array({"anyOf": [{"type": "number"}, _array({"type": "number"}, None)]}, None)

        def tensor(kind: str, known: list[str]) -> Schema:
            name = {"type": "string", "enum": known}
            properties = {"name": name, "datatype": types, "shape": shape, "data": data, "parameters": parameters}
            return _array(self._add(kind, _object(properties, ["name", "datatype", "shape"])), None)

        name = {"type": "string", "enum": outputs}
        wanted = self._add("InferWanted", _object({"name": name, "parameters": parameters}, ["name"]))
        # A feature with the same number of ids in every sample may come as one tensor of its own name.
        given = tensor("InferInput", list(dict.fromkeys([*inputs, *self._inputs.features])))
        text, whole = {"type": "string"}, {"parameters": parameters, "id": {"type": "string"}}
        self._add("InferRequest", _object({**whole, "inputs": given, "outputs": _array(wanted, None)}, ["inputs"]))
        answer = {"model_name": text, "model_version": text, **whole, "outputs": tensor("InferOutput", outputs)}
        self._add("InferResponse", _object(answer, ["model_name", "model_version", "outputs"]))
        return {"one sample": {"inputs": self._infer_inputs()}}

    def _infer_inputs(self) -> list[dict[str, Any]]:
        found = []
        for name in self._inputs.features:
            one = 1 % min(table.rows for table in self._tables[name])
            found.append(_tensor(f"{name}.values", "INT64", [1], [one]))
            found.append(_tensor(f"{name}.lengths", "INT32", [1], [1]))
            if name in self._weighted:
                found.append(_tensor(f"{name}.weights", "FP32", [1], [1.0]))
        if self._inputs.num_dense:
            found.append(
                _tensor(self._inputs.dense, "FP32", [1, self._inputs.num_dense], [0.5] * self._inputs.num_dense)
            )
        return found


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _array(items: Schema, *sizes: int | None) -> Schema:
    """The schema of nested lists of these sizes, the outermost first; None: any size."""
    for size in reversed(sizes):
        items = {"type": "array", "items": items} | ({} if size is None else {"minItems": size, "maxItems": size})
    return items


def _object(properties: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}
