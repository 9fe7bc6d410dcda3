"""Converts tables and columns of libraries with Arrow's interface to pyarrow, which is imported on first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from recinfer.errors import InputError, UnavailableError

__all__ = ["plain_array", "pyarrow_array", "pyarrow_for", "pyarrow_table", "speaks_arrow"]


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
