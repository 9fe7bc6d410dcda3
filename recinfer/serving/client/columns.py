"""Converts a caller's raw rows to the ``raw`` field of a request; recinfer.columns reads ids and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recinfer.arrow import plain_array, pyarrow_for, speaks_arrow
from recinfer.errors import InputError

__all__ = ["as_raw"]


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
