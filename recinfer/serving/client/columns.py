"""Ids and rows as callers have them, lists, numpy, pandas, pyarrow or polars columns, made what a request holds."""

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
    - a pandas DataFrame, a pyarrow Table, or a table of another library that lends it through Arrow's PyCapsule interface
      (polars), whose columns are the features.

    A column has one entry a sample: an id, a list of ids, or None (in pandas NA and NaN, what numpy masks) for no ids. It is a list, a
    tensor or numpy array ``[B]`` or ``[B, n]``, a pandas Series, or an Arrow array (of pyarrow, polars) of integers or of lists
    of them. Where pandas has made floats of ids because some are missing, they are ids again.

    Raises:
        InputError: a column that holds something else or is there twice, or columns of different length.
        UnavailableError: a column or table of another library, and pyarrow is not installed.

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
    if _speaks_arrow(data) and not hasattr(data, "__array__"):
        data = _table("dense", data)
    if hasattr(data, "column_names"):  # a pyarrow Table or RecordBatch
        columns = [column.to_numpy(zero_copy_only=False) for column in data.columns]
        data = np.stack(columns, axis=1) if columns else []
    try:
        array = np.asarray(data)
        if array.dtype.kind not in "biufO" or isinstance(data, np.ma.MaskedArray):
            raise TypeError  # numpy would make numbers of text, drop imaginary parts, and show what is masked
        array = array.astype(np.float32, copy=False)
    except (TypeError, ValueError):
        raise InputError("dense: got something else than rows of numbers of one length") from None
    if array.ndim != 2:
        raise InputError(f"dense: got shape {list(array.shape)}, expected [batch, num_dense]")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def as_raw(rows: Any) -> bytes:
    """``rows`` as the ``raw`` field of a PredictRequest: an Arrow IPC stream of one uncompressed record batch.

    Args:
        rows: a mapping of column name to values, a pandas DataFrame, a pyarrow Table or RecordBatch, a table of another
            library that lends it through Arrow's PyCapsule interface (polars), or such a stream (bytes), given back as it is.
            Columns hold text, integers, floats, booleans or lists of them.

    Raises:
        InputError: columns of different length, or values that Arrow has no type for.
        UnavailableError: pyarrow is not installed.
    """
    if isinstance(rows, bytes):
        return rows
    pa = _pyarrow("raw rows need")
    try:
        if isinstance(rows, Mapping):
            rows = pa.table({name: _chunks(pa, column) for name, column in rows.items()})
        elif hasattr(rows, "columns") and hasattr(rows, "iloc"):
            rows = pa.Table.from_pandas(rows, preserve_index=False)
        elif _speaks_arrow(rows):
            rows = pa.table(rows)
        if not isinstance(rows, pa.Table):
            raise InputError(f"rows: got {type(rows).__name__}, expected columns of at least one row")
        if not rows.num_rows:
            raise InputError("rows: got none, expected columns of at least one row")
        batch = pa.RecordBatch.from_arrays([_plain_array(pa, column) for column in rows.columns], rows.schema.names)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise error if isinstance(error, InputError) else InputError(f"rows: {error}") from None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


# -- Arrow ---------------------------------------------------------------------------------------------------------


def _pyarrow(who: str) -> Any:
    try:
        import pyarrow
        import pyarrow.compute  # which makes it an attribute
    except ImportError:
        raise UnavailableError(f"{who} pyarrow; install it with: pip install 'recinfer[arrow]'") from None
    return pyarrow


def _speaks_arrow(data: Any) -> bool:
    """Whether it is pyarrow's, or of a library that lends it, pandas left out: what pandas has for missing is read otherwise."""
    return (hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")) and not hasattr(data, "iloc")


def _table(field: str, data: Any) -> Any:
    """``data`` of any library as a pyarrow Table; raises InputError."""
    pa = _pyarrow(f"{field}: a {type(data).__name__} needs")
    try:
        return pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"{field}: got a {type(data).__name__} that is no table ({error})") from None


def _chunks(pa: Any, column: Any) -> Any:
    """``column``, as pyarrow has it where it is of a library that lends it."""
    return pa.chunked_array(column) if _speaks_arrow(column) else column


def _plain_array(pa: Any, column: Any) -> Any:
    """The chunks of ``column`` as one array without views and dictionaries: few libraries read those, and in a stream a dictionary
    is a message of its own."""
    found = [_plain(pa, chunk) for chunk in column.chunks]
    return pa.concat_arrays(found) if found else pa.nulls(0)


def _plain(pa: Any, array: Any) -> Any:
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return _plain(pa, array.dictionary).take(array.indices)
    if types.is_string_view(kind):
        return array.cast(pa.string())
    if any(is_one(kind) for is_one in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        inner = kind.value_type
        if not (inner.num_fields or types.is_dictionary(inner) or types.is_string_view(inner)):
            return array
    elif not (types.is_list_view(kind) or types.is_large_list_view(kind)):
        return array
    # By hand: pyarrow 26 casts the list view [[1]] to the list [[]].
    lengths = pa.compute.fill_null(pa.compute.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return pa.LargeListArray.from_arrays(offsets, _plain(pa, array.flatten()), mask=array.is_null())


# -- features ------------------------------------------------------------------------------------------------------


def _columns(data: Any) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    if _speaks_arrow(data):
        data = _table("features", data)
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
    if _speaks_arrow(column):
        return _arrow(name, column)
    if isinstance(column, Tensor):
        column = column.cpu().numpy()
    elif hasattr(column, "to_numpy"):
        column = _pandas(name, column)
    if isinstance(column, np.ma.MaskedArray):
        column = [np.ma.compressed(row) for row in column.reshape(len(column), -1)]
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
    return entry if isinstance(entry, list | tuple) or (isinstance(entry, np.ndarray) and entry.ndim) else (entry,)


def _pandas(name: str, column: Any) -> np.ndarray:
    """The values of a Series. What it has for a missing entry (NA, NaN, None) becomes None, which is no ids, as in a list."""
    missing = np.asarray(column.isna()) if hasattr(column, "isna") else np.zeros(0, bool)
    if not missing.any():
        return np.asarray(column.to_numpy())
    found = column.to_numpy(dtype=object).copy()
    dtype = getattr(column.dtype, "numpy_dtype", column.dtype)  # that of pandas' own Float64
    if getattr(dtype, "kind", "") == "f":
        found[~missing] = _whole(name, found[~missing].astype(dtype))
    found[missing] = None
    return found


def _whole(name: str, floats: np.ndarray) -> np.ndarray:
    """``floats`` as the integers that they were; as they are where they cannot have been, which is refused later."""
    if not np.array_equal(floats, np.floor(floats)) or not np.isfinite(floats).all():
        return floats
    exact = 2 ** (np.finfo(floats.dtype).nmant + 1)  # from it on several integers became the same float
    if np.abs(floats).max(initial=0) >= exact:
        raise InputError(
            f"features[{name!r}]: got {floats.dtype} with ids from {exact} on, which are not exact any more; "
            "give the column pandas' dtype 'Int64'"
        )
    return floats.astype(np.int64)


def _arrow(name: str, column: Any) -> tuple[np.ndarray, np.ndarray]:
    pa = _pyarrow(f"features[{name!r}]: a {type(column).__name__} needs")
    try:
        array = _plain_array(pa, pa.chunked_array(column))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"features[{name!r}]: got a {type(column).__name__} that is no column ({error})") from None
    types, compute = pa.types, pa.compute
    if not any(is_one(array.type) for is_one in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        lengths = compute.is_valid(array).cast(pa.int32()).to_numpy(zero_copy_only=False)
        return _arrow_ids(name, array.drop_null()), lengths
    lengths = compute.fill_null(compute.list_value_length(array), 0).cast(pa.int32()).to_numpy(zero_copy_only=False)
    return _arrow_ids(name, array.flatten()), lengths


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
