"""Ids and rows as callers have them, lists, numpy, pandas or pyarrow columns, made what a request holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recinfer.errors import InputError, UnavailableError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["as_dense", "as_features", "as_raw"]


def as_features(data: Any) -> KeyedJaggedTensor:
    """The features of ``data``, which is

    - a KeyedJaggedTensor, given back as it is,
    - a mapping of feature name to column,
    - a pandas DataFrame or pyarrow Table, whose columns are the features.

    A column has one entry a sample: an id, a list of ids, or None (in pandas NA and NaN too) for no ids. It is a list, a
    tensor or numpy array ``[B]`` or ``[B, n]``, a pandas Series, or a pyarrow array of integers or of lists of them.

    Raises:
        InputError: a column that holds something else or is there twice, or columns of different length.

    >>> as_features({"user": [3, 4], "clicks": [[1, 2], []]}).lengths().tolist()
    [1, 1, 2, 0]
    """
    if isinstance(data, KeyedJaggedTensor):
        return data
    columns = _columns(data)
    if not columns:
        raise InputError("features: got none, expected at least one feature with its ids")
    parts = {name: _jagged(name, column) for name, column in columns.items()}
    first, (_, lengths) = next(iter(parts.items()))
    for name, (_, own) in parts.items():
        if own.size != lengths.size:
            raise InputError(f"features[{name!r}]: got {own.size} samples, expected {lengths.size} as in {first!r}")
    ids = np.concatenate([values for values, _ in parts.values()])
    return KeyedJaggedTensor.from_parts_unchecked(
        list(parts),
        torch.from_numpy(ids),
        torch.from_numpy(np.concatenate([own for _, own in parts.values()])),
        stride=lengths.size,
    )


def as_dense(data: Any) -> Tensor:
    """``data``, a tensor, array, list of rows, DataFrame or Table of numbers, as float32 ``[B, num_dense]``.

    Raises:
        InputError: it is no matrix of numbers.
    """
    if isinstance(data, Tensor):
        return data
    if hasattr(data, "column_names"):  # a pyarrow Table or RecordBatch
        columns = [column.to_numpy(zero_copy_only=False) for column in data.columns]
        data = np.stack(columns, axis=1) if columns else []
    try:
        array = np.asarray(data, dtype=np.float32)
    except (TypeError, ValueError):
        raise InputError("dense: got something else than rows of numbers of one length") from None
    if array.ndim != 2:
        raise InputError(f"dense: got shape {list(array.shape)}, expected [batch, num_dense]")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def as_raw(rows: Any) -> bytes:
    """``rows`` as the ``raw`` field of a PredictRequest: an Arrow IPC stream of one uncompressed record batch.

    Args:
        rows: a mapping of column name to values, a pandas DataFrame, a pyarrow Table or RecordBatch, or such a stream
            (bytes), given back as it is. Columns hold text, integers, floats, booleans or lists of them.

    Raises:
        InputError: columns of different length, or values that Arrow has no type for.
        UnavailableError: pyarrow is not installed.
    """
    if isinstance(rows, bytes):
        return rows
    try:
        import pyarrow as pa
    except ImportError:
        raise UnavailableError("raw rows need pyarrow; install it with: pip install 'recinfer[arrow]'") from None
    try:
        if isinstance(rows, Mapping):
            rows = pa.Table.from_pydict(dict(rows))  # which, unlike a RecordBatch, takes columns in chunks
        elif hasattr(rows, "columns") and hasattr(rows, "iloc"):
            rows = pa.RecordBatch.from_pandas(rows, preserve_index=False)
        elif hasattr(rows, "__arrow_c_stream__"):  # a Table, a RecordBatch, or another library's
            rows = pa.table(rows)
        if isinstance(rows, pa.Table) and rows.num_rows:
            rows = rows.combine_chunks().to_batches()[0]
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"rows: {error}") from None
    if isinstance(rows, pa.Table | pa.RecordBatch) and not rows.num_rows:
        raise InputError("rows: got none, expected columns of at least one row")
    if not isinstance(rows, pa.RecordBatch):
        raise InputError(f"rows: got {type(rows).__name__}, expected columns of at least one row")
    plain = [column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in rows.columns]
    rows = pa.RecordBatch.from_arrays(plain, rows.schema.names)  # dictionaries would be messages of their own
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(memoryview(sink.getvalue()))


def _columns(data: Any) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    if hasattr(data, "column_names"):
        pairs = list(zip(data.column_names, data.columns))
    elif hasattr(data, "columns") and hasattr(data, "items"):
        pairs = list(data.items())
    else:
        raise InputError(
            f"features: got a {type(data).__name__}, expected a KeyedJaggedTensor, a mapping of columns, a DataFrame or Table"
        )
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        raise InputError(
            f"features: got column {max(names, key=names.count)!r} more than once, expected each feature once"
        )
    return columns


def _jagged(name: str, column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 ``[N]`` and lengths int32 ``[B]``."""
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if hasattr(column, "null_count"):
        return _arrow(name, column)
    if isinstance(column, Tensor):
        column = column.cpu().numpy()
    elif hasattr(column, "to_numpy"):  # a pandas Series
        missing = np.asarray(column.isna()) if hasattr(column, "isna") else np.zeros(0, bool)
        # What pandas has for a missing entry (NA, NaN, None) is no ids, as None is in a list.
        column = np.where(missing, None, column.to_numpy(dtype=object)) if missing.any() else column.to_numpy()
    if isinstance(column, np.ndarray) and column.dtype != object:
        if column.ndim not in (1, 2):
            raise InputError(f"features[{name!r}]: got shape {list(column.shape)}, expected [batch] or [batch, n]")
        each = 1 if column.ndim == 1 else column.shape[1]
        return _ids(name, column.reshape(-1)), np.full(column.shape[0], each, np.int32)
    if isinstance(column, str | bytes) or not isinstance(column, Sequence | np.ndarray):
        raise InputError(f"features[{name!r}]: got a {type(column).__name__}, expected one entry a sample")
    bags = [_bag(entry) for entry in column]
    lengths = np.fromiter(map(len, bags), np.int32, len(bags))
    flat = list(chain.from_iterable(bags))
    return _ids(name, _array(flat) if flat else np.zeros(0, np.int64)), lengths


def _array(values: list[Any]) -> np.ndarray:
    try:
        return np.array(values)
    except ValueError:
        return np.array([None])


def _bag(entry: Any) -> Any:
    if entry is None:
        return ()
    return entry if isinstance(entry, list | tuple | np.ndarray) else (entry,)


def _arrow(name: str, column: Any) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if not any(is_one(column.type) for is_one in lists):
        lengths = pc.is_valid(column).cast(pa.int32()).to_numpy(zero_copy_only=False)
        return _arrow_ids(name, column.drop_null()), lengths
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int32()).to_numpy(zero_copy_only=False)
    return _arrow_ids(name, column.flatten()), lengths


def _arrow_ids(name: str, values: Any) -> np.ndarray:
    if values.null_count:
        raise InputError(f"features[{name!r}]: got null among ids, expected integers")
    return _ids(name, values.to_numpy(zero_copy_only=False))


def _ids(name: str, values: np.ndarray) -> np.ndarray:
    if not values.size:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu" or (values.dtype == np.uint64 and values.max() >= 1 << 63):
        raise InputError(f"features[{name!r}]: got {values.dtype} values, expected integer ids or lists of them")
    return values.astype(np.int64, copy=not values.flags.writeable)
