"""Prints jagged and keyed tensors: ``str`` in TorchRec's layout with one key per line, ``repr`` as one line of
shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["format_jagged", "format_keyed", "format_keyed_jagged", "summary"]


def summary(kind: str, keys: Sequence[str] | None = None, **tensors: Tensor | None) -> str:
    """Keys, dtypes, shapes and devices in one line; reads no values, so it never waits for a device."""
    parts = [] if keys is None else [f"keys={list(keys)}"]
    parts += [f"{n}={t.dtype}{list(t.shape)} on {t.device}" for n, t in tensors.items() if t is not None]
    return f"{kind}({', '.join(parts)})"


def _rows(values: Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [run.tolist() for run in values.split(list(lengths))] if lengths else []


def format_jagged(values: Tensor, weights: Tensor | None, lengths: Tensor) -> str:
    """A JaggedTensor as text; on the meta device the summary."""
    if values.is_meta or lengths.is_meta:
        return summary("JaggedTensor", values=values, weights=weights, lengths=lengths)
    sizes = lengths.tolist()
    if weights is None:
        return f"JaggedTensor({{\n    {_rows(values, sizes)}\n}})\n"
    return f'JaggedTensor({{\n    "values": {_rows(values, sizes)},\n    "weights": {_rows(weights, sizes)}\n}})\n'


def format_keyed_jagged(
    keys: Sequence[str], values: Tensor, weights: Tensor | None, lengths: Tensor, strides: Sequence[int]
) -> str:
    """A KeyedJaggedTensor as text; on the meta device the summary."""
    if values.is_meta or lengths.is_meta:
        return summary("KeyedJaggedTensor", keys, values=values, weights=weights, lengths=lengths)
    if not keys:
        return "KeyedJaggedTensor()\n"
    sizes = lengths.tolist()
    value_rows = _rows(values, sizes)
    weight_rows = _rows(weights, sizes) if weights is not None else None
    lines, at = [], 0
    for key, stride in zip(keys, strides):
        line = str(value_rows[at : at + stride])
        if weight_rows is not None:
            line = f'{{\n        "values": {line},\n        "weights": {weight_rows[at : at + stride]}\n    }}'
        lines.append(f'    "{key}": {line}')
        at += stride
    return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"


def format_keyed(keys: Sequence[str], parts: Sequence[Tensor], values: Tensor) -> str:
    """A KeyedTensor as text; on the meta device the summary."""
    if values.is_meta:
        return summary("KeyedTensor", keys, values=values)
    if not keys:
        return "KeyedTensor()\n"
    return "KeyedTensor({\n" + ",\n".join(f'    "{k}": {p.tolist()}' for k, p in zip(keys, parts)) + "\n})\n"
