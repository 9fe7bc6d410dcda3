"""Converts JSON bodies to the protobuf messages, so that the same code checks both.

Predict takes ``{"dense": [[...], ...], "features": {"C1": [[3, 7], [5]], "C2": [4, 9]}}`` and gives
``{"outputs": {name: [[...], ...]}, "model_version": "..."}``. A feature is a list with one list of ids, or one id, per
sample. ``"weights"``, if present, holds weights of some features in the same form (an id without one weighs 1).
``"context"`` holds features of one sample that go with all samples; ``"inputs"`` holds other inputs by name, each a list with one
entry per sample: a number, or lists of numbers, which may differ in length by sample. Lookup takes the same without ``dense`` and gives
``{"embeddings": {"C1": [[...], ...]}, "sequences": {...}, "model_version": "..."}``. Both may name ``model`` and
``version``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.input_arrays import InputArrays, as_input, batch_of_inputs
from recinfer.serving.wire.arrays import decode_lookup, decode_predict, encode_input
from recinfer.serving.wire.proto import inference_pb2 as pb

__all__ = [
    "json_pieces",
    "json_text",
    "lookup_request",
    "lookup_response",
    "named_inputs",
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
_COMMON_KEYS = {"features", "weights", "model", "version"}


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


def predict_request(body: Mapping[str, Any]) -> bytes:
    """A serialized PredictRequest of a JSON object."""
    _check_keys(body, _COMMON_KEYS | {"dense", "context", "inputs"})
    inputs = named_inputs(body)
    if inputs and "features" not in body:
        features = pb.JaggedFeatures(batch_size=batch_of_inputs(inputs))
    else:
        features = _features(body)
    dense = np.zeros(0, np.float32)
    if body.get("dense"):
        dense = _rows(body["dense"])
        if dense.ndim != 2 or dense.shape[0] != features.batch_size:
            raise InputError(
                f"dense: got shape {list(dense.shape)}, "
                f"expected one list of numbers for each of {features.batch_size} samples"
            )
    names = _names(body)
    context = None if body.get("context") is None else _features({"features": body["context"]}, "context")
    request = pb.PredictRequest(
        model=names.get("model"),
        version=names.get("version"),
        features=features,
        dense=dense.tobytes(),
        context=context,
    )
    parts = [part for name, given in inputs.items() for part in encode_input(name, given)]
    return b"".join([request.SerializeToString(), *parts])


def named_inputs(body: Mapping[str, Any]) -> dict[str, InputArrays]:
    """The named inputs of a JSON object, from its ``inputs``."""
    if body.get("inputs") is None:
        return {}
    found = _object("inputs", body["inputs"])
    return {valid_text("inputs", name): as_input(name, value) for name, value in found.items()}


def lookup_request(body: Mapping[str, Any]) -> bytes:
    """A serialized LookupRequest of a JSON object."""
    _check_keys(body, _COMMON_KEYS)
    return pb.LookupRequest(**_names(body), features=_features(body)).SerializeToString()


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_keys(body: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(body) - known):
        raise InputError(f"body: got unknown fields {unknown[:5]}, expected some of {sorted(known)}")


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for key in ("model", "version"):
        value = body.get(key, "")
        if not isinstance(value, str):
            raise InputError(f"{key}: got {type(value).__name__}, expected a string")
        names[key] = valid_text(key, value)
    return names


def valid_text(field: str, value: str) -> str:
    """``value``; raises InputError where no message can hold it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{field}: got text with a lone surrogate, expected valid Unicode") from None
    return value


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{field}: got {type(value).__name__}, expected a JSON object")
    return value


def _features(body: Mapping[str, Any], field: str = "features") -> pb.JaggedFeatures:
    columns = _object(field, body.get("features"))
    if not columns:
        raise InputError(f"{field}: got none, expected at least one feature with its ids")
    bags = {valid_text(field, key): _bags(f"{field}[{key!r}]", column) for key, column in columns.items()}
    batch = len(next(iter(bags.values())))
    for key, column in bags.items():
        if len(column) != batch:
            raise InputError(
                f"{field}[{key!r}]: got {len(column)} samples, expected {batch} as in {next(iter(bags))!r}"
            )
    lengths = np.fromiter((len(bag) for column in bags.values() for bag in column), np.int32)
    ids = whole_numbers(_flat(bags), np.dtype(np.int64))
    if ids is None:
        raise InputError(f"{field}: got an id that is not a 64-bit integer, expected lists of integer ids")
    weighted, weights = _weights(body, bags)
    return pb.JaggedFeatures(
        keys=list(bags),
        batch_size=batch,
        lengths=lengths.tobytes(),
        values=ids.tobytes(),
        weights=weights.tobytes(),
        weighted_keys=weighted,
    )


def _weights(body: Mapping[str, Any], bags: dict[str, list[list[Any]]]) -> tuple[list[str], np.ndarray]:
    """The features that have weights, in the order of ``bags``, and their weights."""
    if body.get("weights") is None:
        return [], np.zeros(0, np.float32)
    columns = _object("weights", body["weights"])
    if strange := sorted(set(columns) - set(bags)):
        raise InputError(f"weights: got {strange[0]!r}, expected some of the features: {sorted(bags)[:10]}")
    weights = {key: _bags(f"weights[{key!r}]", columns[key]) for key in bags if key in columns}
    for key, column in weights.items():
        if list(map(len, column)) != list(map(len, bags[key])):
            raise InputError(f"weights[{key!r}]: got another form than features[{key!r}], expected one weight an id")
    values = _flat(weights)
    flat = real_numbers(values)
    if flat is None:
        raise InputError("weights: got values that are not numbers, expected one number an id")
    return list(weights), flat


def _bags(field: str, column: Any) -> list[list[Any]]:
    if not isinstance(column, list):
        raise InputError(f"{field}: got {type(column).__name__}, expected a list with one entry a sample")
    return [bag if isinstance(bag, list) else [bag] for bag in column]


def _flat(bags: dict[str, list[list[Any]]]) -> list[Any]:
    return list(chain.from_iterable(chain.from_iterable(bags.values())))


def _rows(dense: Any) -> NDArray[np.float32]:
    """A list of numbers as a vector, or a list of equally long lists of numbers as a matrix; raises InputError for other
    values."""
    in_rows = isinstance(dense, list) and set(map(type, dense)) == {list}
    flat = None
    if in_rows and len(set(map(len, dense))) == 1:
        flat = real_numbers(list(chain.from_iterable(dense)))
    elif isinstance(dense, list) and not in_rows:
        flat = real_numbers(dense)
    if flat is None:
        raise InputError("dense: got values that are not numbers or rows of different length, expected numbers")
    return flat.reshape(len(dense), len(dense[0])) if in_rows else flat


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
