"""Converts a named input of a prediction from lists, tensors, numpy, pandas or pyarrow to arrays; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.arrow import pyarrow_array, speaks_arrow
from recinfer.columns import as_float32, bag_of, without_torch
from recinfer.errors import InputError

__all__ = ["InputArrays", "as_input", "batch_of_inputs"]

_WIDER = {"uint16": "int32", "uint32": "int64", "longdouble": "float64"}
_NUMBERS = "a tensor, an array, or lists of numbers, which may differ in length by sample"


@dataclass(frozen=True, slots=True)
class InputArrays:
    """One named input.

    Attributes:
        values: the tensor ``[B, ...]``; of a jagged input the values of all samples ``[N, ...]``.
        lengths: int32 ``[B]``, the number of values of each sample of a jagged input; None for a tensor.
        weights: float32 ``[N]`` of a jagged input, or None.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int32] | None = None
    weights: NDArray[np.float32] | None = None

    def rows(self, start: int, stop: int, batch: int) -> InputArrays:
        """The samples ``start`` to ``stop`` of ``batch``; a tensor without a row per sample stays whole."""
        if self.batch != batch:
            return self
        if self.lengths is None:
            return InputArrays(self.values[start:stop])
        first, last = int(self.lengths[:start].sum()), int(self.lengths[:stop].sum())
        weights = None if self.weights is None else self.weights[first:last]
        return InputArrays(self.values[first:last], self.lengths[start:stop], weights)

    @property
    def batch(self) -> int:
        """Number of samples, if the first axis of a tensor counts samples."""
        if self.lengths is not None:
            return self.lengths.size
        return self.values.shape[0] if self.values.ndim else 0


def as_input(name: str, data: Any) -> InputArrays:
    """The arrays of the input ``name``. ``data`` is

    - a tensor, an array, a pandas or Arrow column, or a list of numbers or of nested lists of them,
    - a list with a list of numbers per sample, of any lengths; None is a sample without values,
    - a pair (a tuple) of values and lengths ``[B]``, with weights as a third part,
    - a JaggedTensor,
    - InputArrays, returned as they are.

    Raises:
        InputError: values that are not numbers, or that form no array; names the input.

    >>> as_input("price", [[0.5], [1.0, 2.0]]).lengths.tolist()
    [1, 2]
    """
    if isinstance(data, InputArrays):
        return data
    if hasattr(data, "weights_or_none"):
        data = (data.values(), data.lengths(), data.weights_or_none())
    if type(data) is tuple and 2 <= len(data) <= 3:
        values, lengths, *weights = data
        given = None if not weights or weights[0] is None else as_float32(_array(name, weights[0]))
        counts = _array(name, lengths)
        if counts.size and (counts.dtype.kind not in "iu" or not 0 <= int(counts.min()) <= int(counts.max()) < 1 << 31):
            got = f"a length of {counts.min()}" if counts.dtype.kind in "iu" else f"{counts.dtype} lengths"
            raise InputError(f"input {name!r}: got {got}; expected a number of values of 0 or more per sample")
        return InputArrays(_array(name, values), counts.astype(np.int32, copy=False), given)
    if speaks_arrow(data):
        data = _of_arrow(name, data)
    if isinstance(data, list):
        return _of_list(name, data)
    if str(getattr(data, "dtype", "")) == "object":  # numpy's and pandas' form of rows of different lengths
        return _of_list(name, list(data))
    return InputArrays(_array(name, data))


def batch_of_inputs(inputs: Mapping[str, InputArrays]) -> int:
    """The number of samples of requests without features: that of the first input that has samples; 0 without one."""
    return next((found for given in inputs.values() if (found := given.batch)), 0)


def _of_list(name: str, rows: list[Any]) -> InputArrays:
    try:
        found = np.array(rows)
    except (ValueError, TypeError):  # rows of different lengths, or of a type that numpy lacks
        found = None
    except OverflowError:
        raise _no_numbers(name, "an integer of more than 64 bits") from None
    if found is not None and found.dtype.kind in "biuf":
        return InputArrays(_plain(name, found))
    if found is not None and found.dtype != object:
        raise _no_numbers(name, f"{found.dtype} values")
    listed = [bag_of(row) for row in rows]
    lengths = np.fromiter(map(len, listed), np.int32, len(listed))
    try:
        values = np.array(list(chain.from_iterable(listed)))
    except (ValueError, OverflowError, TypeError):
        raise _no_numbers(name, "lists that form no array") from None
    return InputArrays(_plain(name, values), lengths)


def _array(name: str, data: Any) -> NDArray[Any]:
    if isinstance(data, str | bytes | Mapping) or data is None:
        raise _no_numbers(name, type(data).__name__)
    try:
        found = np.asarray(without_torch(data))
    except (TypeError, ValueError, OverflowError):
        raise _no_numbers(name, type(data).__name__) from None
    return _plain(name, found)


def _plain(name: str, found: NDArray[Any]) -> NDArray[Any]:
    """``found`` in a dtype that the wire has."""
    if found.dtype.kind not in "biuf":
        raise _no_numbers(name, f"{found.dtype} values")
    if found.dtype == np.uint64:
        if found.size and int(found.max()) >= 1 << 63:
            raise _no_numbers(name, "an integer of more than 63 bits")
        return found.astype(np.int64)
    wider = _WIDER.get(found.dtype.name if found.dtype.itemsize <= 8 else "longdouble")
    return found if wider is None else found.astype(wider)


def _of_arrow(name: str, column: Any) -> Any:
    where = f"inputs[{name!r}]"
    found = pyarrow_array(where, column)
    if str(found.type).startswith(("list", "large_list", "fixed_size_list")):
        return found.to_pylist()
    if found.null_count:
        raise _no_numbers(name, "null")
    return found.to_numpy(zero_copy_only=False)


def _no_numbers(name: str, got: str) -> InputError:
    return InputError(f"input {name!r}: got {got}; expected {_NUMBERS}")
