"""Our answers as the V1 protocol has them: ``predictions`` of rows, ``outputs`` of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from recinfer.errors import InputError
from recinfer.serving.engine.request import CallName
from recinfer.serving.wire import codec
from recinfer.serving.wire.json_codec import json_text
from recinfer.serving.wire.proto import inference_pb2 as pb

__all__ = ["to_json"]


def to_json(call: CallName, data: bytes, in_rows: bool) -> bytes:
    """The JSON of a serialized answer: of a prediction the only output bare, or all by name; of a lookup all by name.

    Raises:
        InputError: rows were asked for, and an output has none.
    """
    if call == "Predict":
        answer = codec.parse(pb.PredictResponse, data)
        columns = {item.name: np.frombuffer(item.values, "<f4").reshape(item.shape).tolist() for item in answer.outputs}
        missing, is_bare = tuple(answer.missing_ranks), len(columns) == 1
    else:
        pooled, sequences, _, missing = codec.decode_lookup_answer(data)
        columns = {} if pooled is None else {key: block.tolist() for key, block in pooled.to_dict().items()}
        for key, sequence in sequences.items():
            columns[key] = [part.tolist() for part in sequence.values().split(sequence.lengths().tolist())]
        is_bare = False
    found: dict[str, Any] = {}
    if not in_rows:
        found["outputs"] = next(iter(columns.values())) if is_bare else columns
    elif is_bare:
        ((name, values),) = columns.items()
        found["predictions"] = _rows_of(name, values)
    else:
        lists = [_rows_of(name, values) for name, values in columns.items()]
        if len(set(map(len, lists))) > 1:
            raise InputError("instances: this model's outputs have no row for each sample; send inputs in their place")
        found["predictions"] = [dict(zip(columns, row)) for row in zip(*lists)]
    if missing:
        found["missing_ranks"] = list(missing)
    return json_text(found).encode()


def _rows_of(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise InputError(f"instances: output {name!r} of this model is one number for all samples; send inputs instead")
    return values
