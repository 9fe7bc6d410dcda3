"""Answers of the V1 protocol: ``predictions`` of rows, ``outputs`` of columns, the status and the metadata of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.request import CallName
from recinfer.serving.server.v1.inputs import inputs_of
from recinfer.serving.wire.arrays import decode_lookup, decode_predict
from recinfer.serving.wire.json_codec import json_pieces, json_text

__all__ = ["metadata", "status", "to_json"]

_DTYPES = {
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "float16": "DT_HALF",
    "bfloat16": "DT_BFLOAT16",
    "int64": "DT_INT64",
    "int32": "DT_INT32",
    "int16": "DT_INT16",
    "int8": "DT_INT8",
    "uint8": "DT_UINT8",
    "bool": "DT_BOOL",
}

_Column = NDArray[Any] | Sequence[NDArray[Any]]
"""An array with one entry per sample, or one array per sample."""


def to_json(call: CallName, data: bytes, in_rows: bool) -> bytes:
    """The JSON of a serialized answer: a prediction's single output without a name, several outputs and embeddings by name.

    Raises:
        InputError: ``in_rows``, and an output has no rows.
    """
    columns: dict[str, _Column]
    if call == "Predict":
        outputs, _, missing = decode_predict(data)
        columns, is_bare = {**outputs}, len(outputs) == 1
    else:
        found = decode_lookup(data)
        columns, is_bare, missing = {**found.pooled(), **found.bags()}, False, found.missing
    if in_rows:
        for name, column in columns.items():
            if _is_number(column):
                raise InputError(
                    f"instances: output {name!r} of this model is one number for all samples; send inputs instead"
                )
        if len(set(map(len, columns.values()))) > 1:
            raise InputError("instances: this model's outputs have no row for each sample; send inputs in their place")
        text = f'"predictions": {_list(columns, is_bare)}'
    elif is_bare:
        text = f'"outputs": {_value(next(iter(columns.values())))}'
    else:
        named = (f"{json.dumps(name)}: {_value(column)}" for name, column in columns.items())
        text = f'"outputs": {{{", ".join(named)}}}'
    ranks = f', "missing_ranks": {list(missing)}' if missing else ""
    return f"{{{text}{ranks}}}".encode()


def _is_number(column: _Column) -> TypeGuard[NDArray[Any]]:
    return isinstance(column, np.ndarray) and column.ndim == 0


def _value(column: _Column) -> str:
    return json_text(column.tolist()) if _is_number(column) else _list({"": column}, is_bare=True)


def _list(columns: Mapping[str, _Column], is_bare: bool) -> str:
    """A JSON list with one entry per sample: the value of the only column, or the values of all columns by name."""
    entries = len(next(iter(columns.values())))
    numbers = sum(c.size if isinstance(c, np.ndarray) else sum(part.size for part in c) for c in columns.values())
    texts = []
    for piece in json_pieces(entries, numbers):
        lists = [
            c[piece].tolist() if isinstance(c, np.ndarray) else [part.tolist() for part in c[piece]]
            for c in columns.values()
        ]
        rows = lists[0] if is_bare else [dict(zip(columns, row)) for row in zip(*lists)]
        texts.append(json_text(rows)[1:-1])
    return f"[{', '.join(texts)}]"


def status(registry: ModelRegistry, name: str, version: str, is_ready: bool) -> dict[str, Any]:
    """The state of the loaded versions, or of one, with KServe's ``name`` and ``ready``. Raises NotFoundError."""
    versions = [registry.get(name, version).version] if version else list(registry.versions(name))
    faults, found = registry.faults(name), []
    for each in versions:
        state, code = ("UNKNOWN", "DATA_LOSS") if each in faults else ("AVAILABLE", "OK")
        why = {"error_code": code, "error_message": faults.get(each, "")}
        found.append({"version": each, "state": state, "status": why})
    return {"name": name, "ready": is_ready, "model_version_status": found}


def metadata(model: ServedModel) -> dict[str, Any]:
    """Signatures of a model: ``serving_default`` predicts, ``lookup`` returns vectors."""
    predictor = model.predictor
    inputs = inputs_of(predictor)
    features = {name: _tensor(name, "DT_INT64", -1, -1) for name in inputs.features}
    dense = {inputs.dense: _tensor(inputs.dense, "DT_FLOAT", -1, inputs.num_dense)} if inputs.num_dense else {}
    for info in inputs.named:
        sizes = [-1 if isinstance(size, str) else size for size in info.shape]
        dense[info.name] = _tensor(info.name, _DTYPES[info.dtype], *([-1] if info.kind == "jagged" else []), *sizes)
    signatures = {}
    if predictor.manifest.dense is not None:
        outputs = {
            output.name: _tensor(output.name, "DT_FLOAT", -1, *output.shape)
            for output in predictor.manifest.dense.outputs
        }
        signatures["serving_default"] = _signature(features | dense, outputs)
    vectors = {
        spec.name: _tensor(spec.name, "DT_FLOAT", -1, *([] if spec.pooled else [-1]), spec.dim)
        for spec in predictor.features
    }
    signatures["lookup"] = _signature(features, vectors)
    return {
        "model_spec": {"name": model.name, "signature_name": "", "version": model.version},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def _signature(inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs, "method_name": "tensorflow/serving/predict"}


def _tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    # Sizes are text: protobuf's JSON, and TensorFlow Serving with it, writes 64-bit integers as text.
    dim = [{"size": str(size), "name": ""} for size in shape]
    return {"dtype": dtype, "tensor_shape": {"dim": dim, "unknown_rank": False}, "name": name}
