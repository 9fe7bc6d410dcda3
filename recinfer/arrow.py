"""Converts tables and columns of libraries with Arrow's interface to pyarrow (imported on first use), and raw rows to its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recinfer.errors import InputError, UnavailableError

__all__ = ["as_raw", "plain_array", "pyarrow_array", "pyarrow_for", "pyarrow_table", "speaks_arrow"]


def pyarrow_for(who: str) -> Any:
    """The module pyarrow. Raises UnavailableError, beginning with ``who``, if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute  # makes ``compute`` an attribute of pyarrow
    except ImportError:
        raise UnavailableError(f"{who} pyarrow; install it with: pip install 'recinfer[arrow]'") from None
    return pyarrow


def speaks_arrow(data: Any) -> bool:
    """Whether ``data`` has Arrow's interface. False for pandas, whose missing values are read differently."""
    return (hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")) and not hasattr(data, "iloc")


def pyarrow_table(field: str, data: Any) -> Any:
    """``data`` of any library as a pyarrow Table; raises InputError."""
    pa = pyarrow_for(f"{field}: a {type(data).__name__} needs")
    try:
        return pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"{field}: got a {type(data).__name__} that cannot be read as a table ({error})") from None


def pyarrow_array(field: str, column: Any) -> Any:
    """``column`` of any library as one pyarrow Array of plain layout; raises InputError."""
    pa = pyarrow_for(f"{field}: a {type(column).__name__} needs")
    try:
        return plain_array(pa, pa.chunked_array(column))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"{field}: got a {type(column).__name__} that cannot be read as a column ({error})") from None


def plain_array(pa: Any, column: Any) -> Any:
    """The chunks of ``column`` as one array without views and dictionaries, which few libraries read and which take
    extra messages in a stream."""
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


def as_raw(rows: Any) -> bytes:
    """``rows`` as the ``raw`` field of a PredictRequest: an Arrow IPC stream of one uncompressed record batch.

    Args:
        rows: a mapping of column name to values, a pandas DataFrame, a pyarrow Table or RecordBatch, a table of another
            library that lends it through Arrow's PyCapsule interface (polars), or such a stream (bytes), which is
            returned unchanged.
            Columns hold text, integers, floats, booleans or lists of them.

    Raises:
        InputError: columns of different length, or values that Arrow has no type for.
        UnavailableError: pyarrow is not installed.
    """
    if isinstance(rows, bytes):
        return rows
    pa = pyarrow_for("raw rows need")
    try:
        if isinstance(rows, Mapping):
            rows = pa.table({name: _chunks(pa, column) for name, column in rows.items()})
        elif hasattr(rows, "columns") and hasattr(rows, "iloc"):
            rows = pa.Table.from_pandas(rows, preserve_index=False)
        elif speaks_arrow(rows):
            rows = pa.table(rows)
        if not isinstance(rows, pa.Table):
            raise InputError(f"rows: got {type(rows).__name__}, expected columns of at least one row")
        if not rows.num_rows:
            raise InputError("rows: got none, expected columns of at least one row")
        batch = pa.RecordBatch.from_arrays([plain_array(pa, column) for column in rows.columns], rows.schema.names)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise error if isinstance(error, InputError) else InputError(f"rows: {error}") from None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


def _chunks(pa: Any, column: Any) -> Any:
    """Import a column of another library through Arrow's C interface; other columns stay."""
    return pa.chunked_array(column) if speaks_arrow(column) else column
