"""Converts a V1 body, rows or columns of JSON, to recinfer's request: flat arrays of ids, lengths, weights, dense numbers.

A sample's cell of a feature is a list of ids, one id, or ``{"ids": [...], "weights": [...]}``. Ids differ from
other numbers by their JSON type: 3 is an id, 3.0 and true are not. The ids of a feature that takes strings may be strings. The cell of a named tensor is a number or nested lists; that of
a jagged input is a list of values or ``{"values": [...], "weights": [...]}``. ``context`` holds the cells of one sample that apply to
all samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays, Strings, strings_of
from recinfer.errors import InputError
from recinfer.input_arrays import InputArrays, as_input
from recinfer.serving.engine.registry import ServedModel
from recinfer.serving.engine.request import CallName
from recinfer.serving.server.v1.inputs import ModelInputs, inputs_of
from recinfer.serving.wire.arrays import encode_lookup_request, encode_predict_request
from recinfer.serving.wire.json_codec import real_numbers, text_of, whole_numbers
from recinfer.serving.wire.limits import Limits

__all__ = ["SIGNATURES", "ConvertedRequest", "to_message"]

SIGNATURES: dict[CallName, tuple[str, ...]] = {"Predict": ("serving_default", "predict"), "Lookup": ("lookup",)}
"""The allowed values of ``signature_name`` by call; an empty or absent name is allowed too."""

_TOP = {"instances", "inputs", "context", "signature_name"}
_NUMBERS, _IDS = {int, float}, {int}
_Cells = Sequence[Any]


@dataclass(frozen=True)
class ConvertedRequest:
    """A converted request: its serialized message, and whether it came as rows (``instances``)."""

    message: bytes
    in_rows: bool


def to_message(document: dict[str, Any], call: CallName, model: ServedModel, limits: Limits) -> ConvertedRequest:
    """Convert ``document`` to recinfer's request to ``model``.

    Raises:
        InputError: an input that the model lacks, values of another type, samples that do not fit each other; the message
            names the place in the document.
    """
    if unknown := [key for key in document if key not in _TOP]:
        raise InputError(
            f"body: got {text_of(unknown[0])}, expected instances or inputs, and maybe context and signature_name"
        )
    if ("instances" in document) == ("inputs" in document):
        got = "both instances and inputs" if "inputs" in document else "neither instances nor inputs"
        raise InputError(f"body: got {got}, expected one of them")
    _check_signature(document.get("signature_name", ""), call)
    inputs, with_dense = inputs_of(model.predictor), call == "Predict"
    in_rows = "instances" in document
    take = _rows if in_rows else _columns
    context = _context(document.get("context"), inputs, call)
    once = frozenset() if context is None else context.names(inputs)
    table = take(document["instances" if in_rows else "inputs"], inputs, with_dense, limits.max_batch, once)
    features = table.features(limits.max_ids, inputs.strings)
    if with_dense:
        dense = table.numbers(inputs) if table.has_dense else None
        others: dict[str, Any] = {}
        if context is not None:
            others["context"] = context.features(limits.max_ids, inputs.strings) if context.has_features else None
            others["context_inputs"] = context.inputs(inputs)
            if context.has_dense:
                others["context_inputs"][model.predictor.inputs.dense_name] = context.numbers(inputs)
        message = encode_predict_request(
            dense, features, model.name, model.version, inputs=table.inputs(inputs), **others
        )
        return ConvertedRequest(message, in_rows)
    return ConvertedRequest(encode_lookup_request(features, model.name, model.version), in_rows)


def _check_signature(name: Any, call: CallName) -> None:
    if (name and name not in SIGNATURES[call]) or not isinstance(name, str):
        raise InputError(f"signature_name: got {text_of(name)}, expected {' or '.join(map(repr, SIGNATURES[call]))}")


class _Table:
    """The cells of B samples: of each feature and named input, and a row of dense numbers per sample, if any."""

    def __init__(
        self,
        field: str,
        batch: int,
        cells: Mapping[str, _Cells],
        dense: tuple[str, ...],
        rows: _Cells,
        others: Mapping[str, _Cells],
    ) -> None:
        self._field = field
        self._features = tuple(cells)
        self._cells = list(cells.values())
        self._dense = dense
        self._rows = rows
        self._others = others
        self._batch = batch

    def names(self, inputs: ModelInputs) -> frozenset[str]:
        """The inputs of the table; ``dense`` under the name of its list."""
        return frozenset((*self._features, *self._others, *([inputs.dense] if self._dense else ())))

    @property
    def has_features(self) -> bool:
        """Whether the table has features."""
        return bool(self._features)

    @property
    def has_dense(self) -> bool:
        """Whether the request has dense numbers."""
        return bool(self._dense)

    def inputs(self, inputs: ModelInputs) -> dict[str, InputArrays]:
        """The named inputs of the request; raises InputError."""
        jagged = {info.name for info in inputs.named if info.kind == "jagged"}
        return {name: self._named(name, list(cells), name in jagged) for name, cells in self._others.items()}

    def _named(self, name: str, cells: list[Any], is_jagged: bool) -> InputArrays:
        if dict not in (kinds := list(map(type, cells))):
            return as_input(name, cells)
        if not is_jagged:
            place = self._place(name, kinds.index(dict))
            raise InputError(f"{place}: got an object, expected a number, or lists of numbers")
        values: list[Any] = []
        weights: list[Any] = []
        for at, cell in enumerate(cells):
            pair = cell if type(cell) is dict else {"values": cell}
            own = pair.get("values")
            given = pair.get("weights", [1.0] * len(own)) if type(own) is list else None
            if type(own) is not list or type(given) is not list or len(own) != len(given) or len(pair) > 2:
                raise InputError(
                    f"{self._place(name, at)}: got {text_of(cell)}, expected an object with values and as many weights"
                )
            values.append(own)
            weights.append(given)
        lengths = np.fromiter(map(len, values), np.int32, len(values))
        flat, heavy = (list(chain.from_iterable(rows)) for rows in (values, weights))
        return as_input(name, (flat, lengths, heavy))

    def features(self, most_ids: int, takes_strings: frozenset[str] = frozenset()) -> FeatureArrays:
        """The ids and weights of the request; raises InputError.

        Args:
            takes_strings: features whose ids may be strings.
        """
        lengths: list[int] = []
        ids: list[int] = []
        weights: dict[str, list[float]] = {}
        if set(map(type, chain.from_iterable(self._cells))) == {list}:  # the usual form, converted at once
            lengths = list(map(len, chain.from_iterable(self._cells)))
            ids = list(chain.from_iterable(chain.from_iterable(self._cells)))
        else:
            for name, cells in zip(self._features, self._cells):
                self._take(name, cells, lengths, ids, weights, name in takes_strings)
        if len(ids) > most_ids:
            raise InputError(f"{self._field}: got {len(ids)} ids in all, expected at most {most_ids}")
        given = None
        if weights:
            with np.errstate(over="ignore"):  # each was checked against float32's range
                given = np.concatenate([np.array(own, np.float32) for own in weights.values()])
        counts = np.array(lengths, np.int32)
        strings = None
        if takes_strings and str in set(map(type, ids)):
            ids, strings = self._split(lengths, ids, takes_strings)
        values = self._ids(ids, frozenset() if strings is None else frozenset(strings.keys), takes_strings)
        return FeatureArrays(self._features, self._batch, counts, values, given, tuple(weights), strings)

    def _split(
        self, lengths: list[int], ids: list[Any], takes_strings: frozenset[str]
    ) -> tuple[list[Any], Strings | None]:
        """The ids of features with integers, and the strings of features with strings alone."""
        numbers: list[Any] = []
        texts: dict[str, list[str]] = {}
        at = 0
        for place, name in enumerate(self._features):
            stop = at + sum(lengths[place * self._batch : (place + 1) * self._batch])
            own, at = ids[at:stop], stop
            if name in takes_strings and set(map(type, own)) == {str}:
                texts[name] = own
            else:
                numbers += own
        if not texts:
            return numbers, None
        return numbers, strings_of(self._field, list(chain.from_iterable(texts.values())), tuple(texts))

    def _take(
        self,
        name: str,
        cells: _Cells,
        lengths: list[int],
        ids: list[int],
        weights: dict[str, list[float]],
        takes_strings: bool,
    ) -> None:
        """Add the cells of one feature, of any form."""
        if set(map(type, cells)) == _IDS:
            lengths.extend(repeat(1, self._batch))
            ids.extend(cells)
            return
        own: list[float] = []
        has_weights = False
        for at, cell in enumerate(cells):
            given: Any = None
            if type(cell) is dict:
                if "ids" not in cell or not cell.keys() <= {"ids", "weights"}:
                    raise InputError(f"{self._place(name, at)}: got an object, expected one with ids and maybe weights")
                cell, given = cell["ids"], cell.get("weights")
            if type(cell) is int or (takes_strings and type(cell) is str):
                cell = [cell]
            if type(cell) is not list:
                raise self._no_id(name, at, cell, takes_strings)
            ids.extend(cell)
            lengths.append(len(cell))
            if given is None:
                own.extend(repeat(1.0, len(cell)))
                continue
            has_weights = True
            given = given if type(given) is list else [given]
            if len(given) != len(cell):
                raise InputError(
                    f"{self._place(name, at)}: got {len(given)} weights, expected {len(cell)}, one for each of its ids"
                )
            if not set(map(type, given)) <= _NUMBERS or not all(map(_is_finite, given)):
                wrong = next(weight for weight in given if type(weight) not in _NUMBERS or not _is_finite(weight))
                raise InputError(f"{self._place(name, at)}: got weight {text_of(wrong)}, expected a finite number")
            own.extend(given)
        if has_weights:
            weights[name] = own

    def _ids(self, ids: list[Any], in_strings: frozenset[str], takes_strings: frozenset[str]) -> NDArray[np.int64]:
        """The ids of the features that are not ``in_strings``."""
        if not ids:
            return np.zeros(0, np.int64)
        found = whole_numbers(ids, np.dtype(np.int64))
        if found is not None:
            return found
        beside = None  # a string, which is wrong beside integers alone
        for name, cells in zip(self._features, self._cells):
            for at, cell in enumerate(cells if name not in in_strings else ()):
                given = cell["ids"] if type(cell) is dict else cell
                for one in given if type(given) is list else [given]:
                    if type(one) is int and -(2**63) <= one < 2**63:
                        continue
                    wrong = self._no_id(name, at, one, name in takes_strings)
                    if type(one) is not str or name not in takes_strings:
                        raise wrong
                    beside = beside or wrong
        assert beside is not None, "ids that are none, and none that is wrong"
        raise beside

    def numbers(self, inputs: ModelInputs) -> NDArray[np.float32]:
        """The dense numbers ``[B, num_dense]``."""
        rows, width, is_list = self._rows, inputs.num_dense, self._dense == (inputs.dense,)
        sized = set(map(type, rows)) <= {list, tuple} and set(map(len, rows)) == {width}
        found = real_numbers(list(chain.from_iterable(rows))) if sized else None
        # One sum shows every NaN and infinity; the predictor checks the numbers of a list, and names their place.
        if found is not None and (is_list or math.isfinite(np.vdot(found, found))):
            return found.reshape(len(rows), width)
        for at, row in enumerate(rows):
            if type(row) not in (list, tuple) or len(row) != width:
                raise InputError(
                    f"{self._place(inputs.dense, at)}: got {text_of(row)}, expected a list of {width} numbers"
                )
            for column, value in enumerate(row):
                if not is_list:
                    place = self._place(self._dense[column], at)
                else:
                    place = f"{self._place(inputs.dense, at)}[{column}]"
                if type(value) not in _NUMBERS or (not _is_finite(value) and not is_list):
                    raise InputError(f"{place}: got {text_of(value)}, expected a finite number")
                if type(value) is int and not _is_finite(value):
                    raise InputError(f"{place}: got {text_of(value)}, expected a number that float32 holds")
        with np.errstate(over="ignore"):  # each number is finite; the sum of the squares overflows
            return np.array(rows, np.float32)

    def _place(self, name: str, at: int) -> str:
        if self._field == "context":
            return f"context[{name!r}]"
        return f"instances[{at}][{name!r}]" if self._field == "instances" else f"inputs[{name!r}][{at}]"

    def _no_id(self, name: str, at: int, got: Any, takes_strings: bool) -> InputError:
        expected = "an id of 64 bits" if type(got) is int else "ids, which are whole numbers: a list of them, or one"
        if takes_strings and type(got) is not int:
            expected = "ids, which are strings or whole numbers, one kind in a request: a list of them, or one"
        return InputError(f"{self._place(name, at)}: got {text_of(got)}, expected {expected}")


def _is_finite(value: float) -> bool:
    """Whether ``value`` is finite in float32, checked for each number so that an error can name the place."""
    try:
        return math.isfinite(value) and abs(value) <= 3.4028235677973366e38
    except OverflowError:
        return False


def _context(given: Any, inputs: ModelInputs, call: CallName) -> _Table | None:
    """The cells of ``context``, one of each input."""
    if given is None:
        return None
    if call == "Lookup":
        raise InputError("context: got one with a lookup, expected it with predictions alone")
    if type(given) is not dict or not given:
        raise InputError(f"context: got {text_of(given)}, expected an object with inputs by name")
    by_kind: dict[str, dict[str, list[Any]]] = {"feature": {}, "named": {}, "dense": {}}
    for name, cell in given.items():
        by_kind[inputs.kind_in_context(name)][name] = [cell]
    dense = list(by_kind["dense"].values())
    if len(dense) > 1:
        raise InputError(f"context: got {inputs.dense!r} under two names, expected one of them")
    names = (inputs.dense,) if dense else ()
    return _Table("context", 1, by_kind["feature"], names, dense[0] if dense else [], by_kind["named"])


def _rows(
    rows: Any, inputs: ModelInputs, with_dense: bool, most: int, in_context: frozenset[str] = frozenset()
) -> _Table:
    """The cells of ``instances``; every row has the inputs of the first row."""
    if type(rows) is not list:
        raise InputError(f"instances: got {text_of(rows)}, expected a list with one object a sample")
    _check_batch("instances", len(rows), most)
    if set(map(type, rows)) != {dict} or ("ids" in rows[0] and inputs.only() not in (None, "ids")):
        rows = _named(rows, inputs)
    layout = inputs.layout(tuple(rows[0]), "instances[0]", with_dense=with_dense, in_context=in_context)
    try:
        if len(set(map(len, rows))) > 1:
            raise KeyError
        cells = list(zip(*map(layout.cells, rows)))
        dense = list(map(layout.numbers, rows)) if layout.dense else []
        others = list(zip(*map(layout.others, rows))) if layout.named else []
    except KeyError:
        raise _other_inputs(rows) from None
    by_name = dict(zip(layout.features, cells))
    return _Table("instances", len(rows), by_name, layout.dense, dense, dict(zip(layout.named, others)))


def _named(rows: list[Any], inputs: ModelInputs) -> list[dict[str, Any]]:
    """The rows with the input's name, for a model of one input, whose rows may leave out the name."""
    only = inputs.only()
    if only is None:
        at = next(at for at, row in enumerate(rows) if type(row) is not dict)
        raise InputError(
            f"instances[{at}]: got {text_of(rows[at])}, expected an object with the model's inputs by name"
        )
    return [row if type(row) is dict and only in row else {only: row} for row in rows]


def _other_inputs(rows: list[dict[str, Any]]) -> InputError:
    first = rows[0].keys()
    for at, row in enumerate(rows):
        for missing in first - row.keys():
            return InputError(
                f"instances[{at}]: got no {text_of(missing)}, expected the same inputs as in instances[0]"
            )
        for extra in row.keys() - first:
            return InputError(f"instances[{at}]: got {text_of(extra)}, expected the same inputs as in instances[0]")
    raise AssertionError("rows that differ, and none that does")


def _columns(
    columns: Any, inputs: ModelInputs, with_dense: bool, most: int, in_context: frozenset[str] = frozenset()
) -> _Table:
    """The cells of ``inputs``: by name a list with one cell per sample, or ``{"ids": [...], "weights": [...]}``, of an input that is
    no feature ``{"values": [...], "weights": [...]}``."""
    only = inputs.only()
    if only is not None and (type(columns) is list or (type(columns) is dict and "ids" in columns and only != "ids")):
        columns = {only: columns}
    if type(columns) is not dict:
        raise InputError(f"inputs: got {text_of(columns)}, expected an object with the model's inputs by name")
    layout = inputs.layout(tuple(columns), "inputs", with_dense=with_dense, in_context=in_context)
    given = {inputs.dense: inputs.dense_in_forward} if inputs.dense not in columns else {}
    names = (*layout.features, *layout.dense, *layout.named)
    lists = {name: _cells(name, columns[given.get(name, name)]) for name in names}
    first = names[0]
    batch = len(lists[first])
    for name in names:
        if len(lists[name]) != batch and (name not in layout.named or name in inputs.by_sample):
            raise InputError(f"inputs[{name!r}]: got {len(lists[name])} samples, expected {batch} as in {first!r}")
    _check_batch("inputs", batch, most)
    cells = {name: lists[name] for name in layout.features}
    if layout.dense == (inputs.dense,):
        rows: _Cells = lists[inputs.dense]
    else:
        rows = list(zip(*(_singles(lists[name]) for name in layout.dense)))
    others = {name: lists[name] for name in layout.named}
    return _Table("inputs", batch, cells, layout.dense, rows, others)


def _cells(name: str, column: Any) -> list[Any]:
    if type(column) is list:
        return column
    if type(column) is dict and len(column) == 2 and "weights" in column and ("ids" in column or "values" in column):
        what = "ids" if "ids" in column else "values"
        rows, weights = column[what], column["weights"]
        if type(rows) is list and type(weights) is list and len(rows) == len(weights):
            return [{what: own, "weights": given} for own, given in zip(rows, weights)]
        raise InputError(
            f"inputs[{name!r}]: got {what} and weights that are not lists of one length, one entry a sample"
        )
    raise InputError(f"inputs[{name!r}]: got {text_of(column)}, expected a list with one entry a sample")


def _singles(cells: list[Any]) -> list[Any]:
    """The numbers of a column; also of a column of lists with one number each, TensorFlow's shape [B, 1]."""
    return [cell[0] if type(cell) is list and len(cell) == 1 else cell for cell in cells]


def _check_batch(field: str, batch: int, most: int) -> None:
    if not 1 <= batch <= most:
        raise InputError(f"{field}: got {batch} samples, expected 1 to {most}")
