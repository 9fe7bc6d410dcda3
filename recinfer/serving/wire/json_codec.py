"""JSON of TorchServe's handler and of ``recinfer predict --format json``: bodies to requests, and answers to JSON.

Predict takes ``{"dense": [[...], ...], "features": {"C1": [[3, 7], [5]], "C2": [4, 9]}}`` and gives
``{"outputs": {name: [[...], ...]}, "model_version": "..."}``. A feature is a list with one list of ids, or one id, per
sample. ``"weights"``, if present, holds weights of some features in the same form (an id without one weighs 1), also of those in the
context, and of other inputs with a list per sample.
``"context"`` holds features of one sample that go with all samples; ``"inputs"`` holds other inputs by name, each a list with one
entry per sample: a number, or lists of numbers, which may differ in length by sample. Lookup takes the same without ``dense`` and gives
``{"embeddings": {"C1": [[...], ...]}, "sequences": {...}, "model_version": "..."}``. Both may name ``model`` and
``version``. Columns are converted as those of Python's clients are, and the servers' code checks the messages.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays, as_features, as_float32, as_matrix, bag_of
from recinfer.errors import InputError
from recinfer.input_arrays import InputArrays, as_input
from recinfer.serving.wire.arrays import (
    decode_lookup,
    decode_predict,
    encode_lookup_request,
    encode_predict_request,
    no_features,
)

__all__ = [
    "JsonRows",
    "json_pieces",
    "json_rows",
    "json_text",
    "lookup_request",
    "lookup_response",
    "parse_json",
    "predict_request",
    "predict_response",
    "real_numbers",
    "text_of",
    "valid_text",
    "whole_numbers",
]

_PIECE = 1 << 14
_FLOAT32 = np.dtype(np.float32)
_COMMON_KEYS = frozenset({"features", "weights", "model", "version"})
_PREDICT_KEYS = _COMMON_KEYS | {"dense", "context", "inputs"}


def parse_json(body: bytes | bytearray | str) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        InputError: ``body`` holds no JSON object, or an object in it has a key twice.
    """
    try:
        value = json.loads(body, object_pairs_hook=_once)
    except InputError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise InputError(f"body: got text that is not JSON ({reason}), expected a JSON object") from None
    if type(value) is not dict:
        raise InputError(f"body: got {text_of(value)}, expected a JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise InputError(f"body: got the key {text_of(twice)} more than once in one object, expected each once")
    return found


def whole_numbers(values: Sequence[Any], dtype: np.dtype) -> NDArray[Any] | None:
    """``values``, parsed from JSON, as a 1-D array of an integer dtype; None if a value is no integer or is beyond the dtype.

    The types are compared before numpy sees them: numpy takes true for 1 where another value is a number.
    """
    if not set(map(type, values)) <= {int}:
        return None
    try:
        return np.array(values, dtype)
    except OverflowError:
        return None


def real_numbers(values: Sequence[Any], dtype: np.dtype = _FLOAT32) -> NDArray[Any] | None:
    """``values``, parsed from JSON, as a 1-D array of floats; None if a value is no number, or an integer beyond float64.

    An integer of any size is a number: JavaScript writes 1e20 as 100000000000000000000. A number beyond float32 becomes
        infinite,
    which the predictor refuses.
    """
    if not set(map(type, values)) <= {int, float}:
        return None
    try:
        with np.errstate(over="ignore"):
            return np.array(values, dtype)
    except OverflowError:
        return None


def json_text(value: Any) -> str:
    """``value`` as JSON. NaN and infinity become null: JSON has neither, and clients fail on the whole answer."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def json_pieces(entries: int, numbers: int) -> Iterator[slice]:
    """Slices of ``entries`` that hold ``numbers`` numbers in all, so that each becomes text within some milliseconds.

    The interpreter runs no other thread while one call of ``json`` or ``tolist`` runs: a million numbers take half a second.
    """
    step = max(1, _PIECE * entries // max(1, numbers))
    for start in range(0, entries, step):
        yield slice(start, start + step)


@dataclass(frozen=True)
class JsonRows:
    """A parsed request: its samples, and the names of the model and the version (empty: not named).

    Attributes:
        dense: float32 ``[B, num_dense]``; None without dense numbers.
        context: columns of one sample that go with all samples.
        inputs: other inputs by name.
    """

    dense: NDArray[np.float32] | None
    features: FeatureArrays
    context: Mapping[str, Any] | None
    model: str
    version: str
    inputs: Mapping[str, InputArrays]


def json_rows(body: Mapping[str, Any], known: frozenset[str] = _PREDICT_KEYS) -> JsonRows:
    """The samples of a JSON object.

    Raises:
        InputError: an unknown field, or values of another form than :func:`recinfer.columns.as_features` and ``as_matrix``
            take.
    """
    if unknown := sorted(set(body) - known):
        raise InputError(f"body: got unknown fields {unknown[:5]}, expected some of {sorted(known)}")
    named = {} if body.get("inputs") is None else _columns("inputs", body["inputs"])
    features = {} if named and "features" not in body else _columns("features", body.get("features"))
    context: dict[str, Any] | None = None if body.get("context") is None else dict(_columns("context", body["context"]))
    weights = {} if body.get("weights") is None else _columns("weights", body["weights"])
    if strange := sorted(set(weights) - {*features, *named, *(context or ())}):
        raise InputError(f"weights: got {strange[0]!r}, expected some of the features: {sorted(features)[:10]}")
    pairs = {name: (ids, weights[name]) if name in weights else ids for name, ids in features.items()}
    inputs = {
        name: _weighted_input(name, values, weights[name]) if name in weights else as_input(name, values)
        for name, values in named.items()
    }
    if context is not None:
        context |= {name: _weighted(name, context[name], weights[name]) for name in weights if name in context}
    dense = as_matrix(body["dense"]) if body.get("dense") else None
    found = as_features(pairs) if pairs or not inputs else no_features(inputs)
    return JsonRows(dense, found, context, _name(body, "model"), _name(body, "version"), inputs)


def predict_request(body: Mapping[str, Any]) -> bytes:
    """A serialized PredictRequest of a JSON object."""
    rows = json_rows(body)
    return encode_predict_request(
        rows.dense, rows.features, rows.model, rows.version, context=rows.context, inputs=rows.inputs
    )


def lookup_request(body: Mapping[str, Any]) -> bytes:
    """A serialized LookupRequest of a JSON object."""
    rows = json_rows(body, _COMMON_KEYS)
    return encode_lookup_request(rows.features, rows.model, rows.version)


def predict_response(data: bytes) -> dict[str, Any]:
    """The JSON object of a serialized PredictResponse."""
    outputs, version, _ = decode_predict(data)
    return {"outputs": {name: array.tolist() for name, array in outputs.items()}, "model_version": version}


def lookup_response(data: bytes) -> dict[str, Any]:
    """The JSON object of a serialized LookupResponse."""
    found = decode_lookup(data)
    return {
        "embeddings": {key: block.tolist() for key, block in found.pooled().items()},
        "sequences": {key: [bag.tolist() for bag in bags] for key, bags in found.bags().items()},
        "model_version": found.version,
    }


def _weighted(name: str, values: list[Any], weights: list[Any]) -> Any:
    """A column of a context with its weights: ids and weights, or another input."""
    _check_weights(name, values, weights)
    if all(type(value) in (int, str) for row in values for value in bag_of(row)):
        return values, weights
    return _weighted_input(name, values, weights)


def _weighted_input(name: str, values: list[Any], weights: list[Any]) -> InputArrays:
    """An input with a list of values per sample, and their weights."""
    _check_weights(name, values, weights)
    own = _jagged(name, values)
    return InputArrays(own.values, own.lengths, as_float32(_jagged(name, weights).values))


def _check_weights(name: str, values: list[Any], weights: list[Any]) -> None:
    if [len(bag_of(row)) for row in values] != [len(bag_of(row)) for row in weights]:
        raise InputError(f"weights[{name!r}]: got lists of other lengths, expected one weight for each value")


def _jagged(name: str, rows: list[Any]) -> InputArrays:
    found = as_input(name, rows)
    if found.lengths is not None:
        return found
    each = found.values.shape[1] if found.values.ndim > 1 else 1
    values = found.values.reshape(-1, *found.values.shape[2:])
    return InputArrays(values, np.full(len(rows), each, np.int32))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _name(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field, "")
    if not isinstance(value, str):
        raise InputError(f"{field}: got {type(value).__name__}, expected a string")
    return valid_text(field, value)


def _columns(field: str, value: Any) -> dict[str, list[Any]]:
    if not isinstance(value, dict):
        raise InputError(f"{field}: got {type(value).__name__}, expected a JSON object")
    for name, column in value.items():
        if not isinstance(column, list):
            raise InputError(
                f"{field}[{valid_text(field, name)!r}]: got {type(column).__name__}, expected a list with one entry a sample"
            )
        valid_text(field, name)
    return value


def valid_text(field: str, value: str) -> str:
    """``value``; raises InputError where no message can hold it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{field}: got text with a lone surrogate, expected valid Unicode") from None
    return value


def text_of(value: object) -> str:
    """``value`` for an error message: as JSON, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 80 else "a number of more than 24 digits"
    text = repr(value[:61]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
