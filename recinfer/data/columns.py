"""Converts raw columns (text, numbers, None, nan) to columns of text or numbers.

A missing value is None, nan or the empty text. A number and its text are the same value: 7, 7.0 and "7" all become "7".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError
from recinfer.excerpts import some

__all__ = ["Column", "Columns", "column", "num_rows", "require", "to_numbers", "to_text"]

Column = Sequence[Any] | NDArray[Any]
Columns = Mapping[str, Any]
"""Column name to values; anything with ``in`` and ``[]`` that gives sequences or arrays (a pandas DataFrame too)."""

_NUMBERS = (bool, int, float, np.number, np.bool_)


def column(columns: Columns, name: str, needed_by: str) -> NDArray[Any]:
    """The column ``name`` as a 1-D array (dtype object for mixed values).

    Raises:
        InputError: no such column, or not one value per row.
    """
    require(columns, [name], needed_by)
    values = columns[name]
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise InputError(
            f"column {name!r}: got one {type(values).__name__}, expected a list or array with one value per row"
        )
    if isinstance(values, list | tuple):
        kinds = set(map(type, values))
        nested = [k.__name__ for k in kinds if issubclass(k, list | tuple | dict | set | np.ndarray)]
        if nested:
            raise InputError(
                f"column {name!r}: holds values of type {nested[0]}; expected text or numbers. For several values "
                f"per row, write them as one text and set the separator in the feature contract"
            )
        if kinds == {int} or kinds == {float}:
            try:
                return np.array(values)
            except OverflowError:  # integers beyond 64 bits become text of digits
                pass
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"column {name!r}: has shape {array.shape}, expected one value per row")
    return array


def require(columns: Columns, names: Sequence[str], needed_by: str, advice: str = "") -> None:
    """Raise InputError, ending with ``advice``, if some of the columns ``names`` are missing."""
    missing = [repr(name) for name in names if name not in columns]
    if missing:
        which = f"column {missing[0]}, which is" if len(missing) == 1 else f"columns {some(missing, 12)}, which are"
        raise InputError(
            f"{needed_by} reads {which} missing; the input has {some([str(k) for k in columns], 12, none='no columns')}{advice}"
        )


def num_rows(columns: Columns, names: Sequence[str]) -> int:
    """Rows of the columns ``names``; raises InputError if they differ. 0 without names."""
    sizes = {name: len(columns[name]) for name in names}
    if len(set(sizes.values())) > 1:
        odd = {size: next(n for n, s in sizes.items() if s == size) for size in sorted(set(sizes.values()))}
        raise InputError(
            "columns differ in rows: " + ", ".join(f"{name!r} has {size}" for size, name in odd.items())
            + "; expected the same number"
        )  # fmt: skip
    return next(iter(sizes.values()), 0)


def to_text(values: NDArray[Any], name: str) -> list[str]:
    """The column as text, ``""`` for missing values; whole floats become integers (``7.0`` becomes ``"7"``).

    Raises:
        InputError: values that are neither text nor numbers; names the column and a row.
    """
    kind = values.dtype.kind
    if kind in "UT":
        return values.tolist()
    if kind == "S":
        return np.char.decode(values, "utf-8").tolist()
    if kind == "b":
        return values.astype(np.int64).astype(str).tolist()
    if kind in "iu":
        return values.astype(str).tolist()
    if kind == "f":
        return _floats_to_text(values)
    if kind != "O":
        raise InputError(f"column {name!r}: dtype {values.dtype}; expected text or numbers")
    present = ~_missing(values)
    given = values[present]
    is_text = np.fromiter(map(isinstance, given, repeat(str)), bool, given.size)
    is_number = np.fromiter(map(isinstance, given, repeat(_NUMBERS)), bool, given.size)
    _refuse(name, values, present, ~(is_text | is_number), "expected text or a number")
    text = np.full(values.shape, "", dtype=object)
    if is_number.any():
        given = given.copy()
        given[is_number] = to_text(_as_numbers(given[is_number]), name)
    text[present] = given
    return text.tolist()


def to_numbers(values: NDArray[Any], name: str) -> NDArray[np.float64]:
    """The column as float64, nan for missing values.

    Raises:
        InputError: text that is not a number; names the column, the row and the text.
    """
    kind = values.dtype.kind
    if kind in "biuf":
        return values.astype(np.float64)
    if kind in "UTS":
        values = np.array(to_text(values, name), dtype=object)
    elif kind != "O":
        raise InputError(f"column {name!r}: dtype {values.dtype}; expected numbers")
    numbers = np.full(values.shape, np.nan)
    present = ~_missing(values)
    try:
        numbers[present] = values[present].astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        # Only the error path checks values one by one, to name the first wrong value.
        bad = np.array([not _is_number(v) for v in values[present]], dtype=bool)
        _refuse(name, values, present, bad, "expected a number or nothing")
        raise
    return numbers


def _missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask of None, nan and empty text in an object array."""
    return np.asarray((values == None) | (values != values) | (values == ""), dtype=bool)  # noqa: E711


def _as_numbers(values: NDArray[Any]) -> NDArray[Any]:
    """An object array of numbers as a numeric array; unchanged if some numbers have more than 64 bits."""
    kinds = set(map(type, values))
    if any(issubclass(k, float | np.floating) for k in kinds) and len(kinds) > 1:
        try:
            return values.astype(np.float64)
        except OverflowError:  # an integer beyond float64
            return values.astype(str)
    found = np.array(values.tolist())
    return values.astype(str) if found.dtype.kind == "O" else found


def _floats_to_text(values: NDArray[Any]) -> list[str]:
    values = values.astype(np.float64)
    text = np.full(values.shape, "", dtype=object)
    # Above 2^53 a float no longer determines an integer, so the float's own text is used.
    whole = (np.abs(values) <= 2.0**53) & (values == np.floor(values))
    text[whole] = values[whole].astype(np.int64).astype(str)
    rest = ~whole & ~np.isnan(values)
    text[rest] = values[rest].astype(str)
    return text.tolist()


def _refuse(name: str, values: NDArray[Any], present: NDArray[np.bool_], bad: NDArray[np.bool_], expected: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(present)[bad][0])
        raise InputError(
            f"column {name!r}, row {row}: got {values[row]!r} ({type(values[row]).__name__}), {expected} "
            f"({int(bad.sum())} such rows)"
        )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):  # the last for an integer beyond float64
        return False
    return True
