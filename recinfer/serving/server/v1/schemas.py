"""JSON Schemas and examples of one served model's requests and answers, in the form of V1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recinfer.inference.specs import values_per_sample
from recinfer.serving.engine.registry import ServedModel
from recinfer.serving.engine.request import CallName
from recinfer.serving.server.api_docs.schemas import FLOAT, ModelSchemas, Schema, array_of, object_of
from recinfer.serving.server.v1.inputs import inputs_of
from recinfer.serving.server.v1.requests import SIGNATURES
from recinfer.serving.wire.limits import Limits

if TYPE_CHECKING:
    from recinfer.inference.specs import InputSpec

__all__ = ["add_schemas"]

_STRING: Schema = {"type": "string"}
_MISSING_RANKS = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "Ranks that did not answer, so that their rows are zero; only there when some did not.",
}


def add_schemas(model: ServedModel, limits: Limits, schemas: ModelSchemas) -> None:
    """Add the schemas of the calls that ``model`` answers: ``Predict`` with a dense part, ``Lookup`` of given ids."""
    made = _Model(model, limits, schemas)
    if model.predictor.manifest.dense is not None:
        made.predict()
        schemas.examples["PredictRequest"] = made.examples(with_dense=True)
    if made.has_lookups():
        made.lookup()
        schemas.examples["LookupRequest"] = made.examples(with_dense=False)


class _Model:
    def __init__(self, model: ServedModel, limits: Limits, schemas: ModelSchemas) -> None:
        self._model = model
        self._limits = limits
        self._add = schemas.add
        predictor = model.predictor
        self._manifest, self._inputs = predictor.manifest, inputs_of(predictor)
        self._weighted = predictor.intake.weighted
        self._raw = predictor.manifest.raw_features
        self._tables = self._manifest.feature_tables
        self._info = {feature.name: feature for feature in self._manifest.features}
        self._computed = {spec.name.split("@")[0] for spec in predictor.features if spec.computed}
        self._specs = {spec.name: spec for spec in predictor.inputs.specs}
        self._examples = self._manifest.string_examples
        if self._weighted:
            one: Schema = {"type": "integer", "format": "int64"}
            if self._inputs.strings & self._weighted:
                one = {"anyOf": [one, _STRING]}
            ids, weights = array_of(one, None), array_of(FLOAT, None)
            self._bag = self._add("WeightedIds", object_of({"ids": ids, "weights": weights}, ["ids", "weights"]))
            ids, weights = array_of(ids, None), array_of(weights, None)
            self._bags = self._add("WeightedColumn", object_of({"ids": ids, "weights": weights}, ["ids", "weights"]))

    def predict(self) -> None:
        """The request and the answer of a prediction."""
        dense = self._manifest.dense
        assert dense is not None
        needed = [name for name in self._inputs.features if self._missing(name) == "reject"]
        needed += [info.name for info in self._inputs.named]
        shapes = {output.name: output.shape for output in dense.outputs}
        row = {name: array_of(FLOAT, *shape) for name, shape in shapes.items()}
        column = {name: array_of(FLOAT, None, *shape) for name, shape in shapes.items()}
        self._request("Predict", needed, with_dense=True)
        if len(shapes) == 1:  # the only output stands as it is, several by name
            ((_, one), (_, many)) = (*row.items(), *column.items())
            self._response("Predict", one, many)
        else:
            self._named_response("Predict", row, column)

    def has_lookups(self) -> bool:
        """Whether tables read the ids of any feature as requests have them."""
        return any(map(self._is_looked_up, self._inputs.features))

    def lookup(self) -> None:
        """The request and the answer of a lookup."""
        row, column = {}, {}
        for spec in self._model.predictor.features:
            shape = (spec.dim,) if spec.pooled else (None, spec.dim)
            row[spec.name], column[spec.name] = array_of(FLOAT, *shape), array_of(FLOAT, None, *shape)
        self._request("Lookup", [], with_dense=False)
        self._named_response("Lookup", row, column)

    def _context(self, row: dict[str, Schema]) -> Schema:
        """The schema of a context: any inputs of a row."""
        properties = dict(row)
        if self._inputs.num_dense:
            properties[self._inputs.dense] = array_of(FLOAT, self._inputs.num_dense)
        about = {"description": "Inputs of one sample that apply to all samples.", "minProperties": 1}
        return self._add("PredictContext", object_of(properties, []) | about)

    def _request(self, call: CallName, needed: list[str], *, with_dense: bool) -> None:
        features = [name for name in self._inputs.features if with_dense or self._is_looked_up(name)]
        row = {name: self._cell(name) for name in features}
        if with_dense:
            row |= {info.name: self._named(info) for info in self._inputs.named}
        column: dict[str, Schema] = {name: array_of(cell, None) for name, cell in row.items()}
        for name in self._weighted.intersection(column):
            column[name] = {"anyOf": [column[name], self._bags]}
        signature = {"type": "string", "enum": [*SIGNATURES[call], ""]}
        forms = []
        context = self._context(row) if with_dense else None
        for field, properties in (("instances", row), ("inputs", column)):
            whole = object_of(properties, needed) | {"minProperties": 1}
            if with_dense and self._inputs.num_dense:
                self._add_dense(whole, is_row=field == "instances")
            if field == "instances":
                given = array_of(self._add(f"{call}Row", whole), None) | {
                    "minItems": 1,
                    "maxItems": self._limits.max_batch,
                }
            else:
                given = self._add(f"{call}Inputs", whole)
            form = object_of({field: given, "signature_name": signature}, [field])
            name = f"{call}{'Rows' if field == 'instances' else 'Columns'}"
            forms.append(self._add(name, form))
            if context is not None:
                rest = self._add(f"{name}Rest", object_of(whole["properties"], []) | {"minProperties": 1})
                given = array_of(rest, None) if field == "instances" else rest
                form = object_of({field: given, "context": context, "signature_name": signature}, [field, "context"])
                forms.append(self._add(f"{name}InContext", form))
        self._add(f"{call}Request", {"oneOf": forms})

    def _add_dense(self, whole: Schema, *, is_row: bool) -> None:
        numbers = array_of(FLOAT, self._inputs.num_dense) | {
            "description": "All dense columns, as the model takes them."
        }
        whole["properties"][self._inputs.dense] = numbers if is_row else array_of(numbers, None)
        if not self._inputs.columns:
            whole["required"].append(self._inputs.dense)
            return
        # The contract's transforms (fill, clip, log, scale) make this number from the raw one.
        one = FLOAT | {"description": "A dense column, as the model takes it: after the feature contract's transforms."}
        for name in self._inputs.columns:
            whole["properties"][name] = one if is_row else array_of(one, None)
        whole["description"] = (
            f"With either {self._inputs.dense!r} or all of the columns {', '.join(self._inputs.columns)}."
        )

    def _named_response(self, call: CallName, row: dict[str, Schema], column: dict[str, Schema]) -> None:
        needed = list(row) if call == "Predict" else []
        one = self._add(f"{call}Prediction", object_of(row, needed))
        self._response(call, one, self._add(f"{call}Outputs", object_of(column, needed)))

    def _response(self, call: CallName, row: Schema, columns: Schema) -> None:
        found = {"missing_ranks": _MISSING_RANKS}
        rows = object_of({"predictions": array_of(row, None), **found}, ["predictions"])
        forms = [self._add(f"{call}RowsAnswer", rows)]
        forms.append(self._add(f"{call}ColumnsAnswer", object_of({"outputs": columns, **found}, ["outputs"])))
        self._add(f"{call}Response", {"oneOf": forms})

    def _is_looked_up(self, name: str) -> bool:
        """Whether tables read the ids of the feature as requests have them."""
        return name in self._tables and name not in self._computed

    def _missing(self, name: str) -> str | int:
        return self._info[name].missing if name in self._info else "reject"

    def _named(self, info: InputSpec) -> Schema:
        """A sample's cell of a named input."""
        one = FLOAT if "float" in info.dtype else {"type": "boolean" if info.dtype == "bool" else "integer"}
        sizes = [None if isinstance(size, str) else size for size in info.shape[1:]]
        text = f"{info.path}, {info.expected()}"
        if info.kind == "jagged":
            sizes = [None, *sizes]
        return array_of(one, *sizes) | {"description": f"{text}; {info.facts}." if info.facts else f"{text}."}

    def _id(self, name: str) -> Schema:
        takes_any = name in self._raw or (name in self._info and self._info[name].out_of_range == "default_row")
        if not self._is_looked_up(name) or takes_any:
            return {"type": "integer", "format": "int64"}
        rows = min(table.rows for table in self._tables[name])
        return {"type": "integer", "format": "int64", "minimum": 0, "maximum": rows - 1}

    def _cell(self, name: str) -> Schema:
        one, missing = self._id(name), self._missing(name)
        text = "Ids, from which the model computes others."
        if self._is_looked_up(name):
            tables = ", ".join(dict.fromkeys(table.name for table in self._tables[name]))
            text = f"Ids of table {tables}."
        if missing != "reject":
            text += " May be left out: " + ("no ids." if missing == "empty" else f"the id {missing}.")
        if name in self._specs and self._specs[name].facts:
            text += f" Forward relies on {self._specs[name].facts}."
        forms: list[Schema] = [array_of(one, None), one]
        if name in self._inputs.strings:
            text += " As strings, of which the archive has the rows; or the rows themselves."
            forms = [array_of(_STRING, None), _STRING, *forms]
        if name in self._weighted:
            forms.append(self._bag)
        return {"description": text, "anyOf": forms}

    def examples(self, *, with_dense: bool) -> dict[str, Any]:
        """Requests of two samples, as rows and as columns."""
        rows = []
        for at in range(2):
            row: dict[str, Any] = {}
            for name in self._inputs.features:
                if not with_dense and not self._is_looked_up(name):
                    continue
                rows_of = min((table.rows for table in self._tables.get(name, ())), default=3)
                counts = name in self._specs and self._specs[name].counts
                ids: list[Any] = [1 if counts else (at + 1) % rows_of] * values_per_sample(self._specs, name)
                if name in self._examples:
                    ids = [self._examples[name][at % len(self._examples[name])]] * len(ids)
                if name in self._weighted:
                    row[name] = {"ids": ids, "weights": [1.0] * len(ids)}
                    continue
                row[name] = ids
            if with_dense and self._inputs.num_dense:
                row[self._inputs.dense] = [0.5] * self._inputs.num_dense
            for info in self._inputs.named if with_dense else ():
                one: Any = 0.5 if "float" in info.dtype else at == 1 if info.dtype == "bool" else at
                for size in reversed(info.shape[1:]):
                    one = [one] * (size if isinstance(size, int) else 1)
                count = values_per_sample(self._specs, info.name)
                row[info.name] = [one] * count if info.kind == "jagged" else one
            rows.append(row)
        found = {
            "rows": {"instances": rows},
            "columns": {"inputs": {name: [row[name] for row in rows] for name in rows[0]}},
        }
        if with_dense and self._inputs.columns:
            named = {name: cell for name, cell in rows[0].items() if name != self._inputs.dense}
            found["named columns"] = {"instances": [named | dict.fromkeys(self._inputs.columns, 0.5)]}
        return found
