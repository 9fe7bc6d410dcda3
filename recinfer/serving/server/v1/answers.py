"""Converts recinfer's answers to the V1 protocol: ``predictions`` of rows, ``outputs`` of columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.serving.engine.request import CallName
from recinfer.serving.wire.arrays import decode_lookup, decode_predict
from recinfer.serving.wire.json_codec import json_pieces, json_text

__all__ = ["to_json"]

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
