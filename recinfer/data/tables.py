"""Reads and writes text tables (csv, tsv) as columns of text."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recinfer.data.columns import column, to_text
from recinfer.errors import InputError
from recinfer.files import NOT_GZIP, create_text, naming, open_text

__all__ = ["cut_off", "first_line", "read_csv", "read_table", "write_csv"]

_CHUNK_ROWS = 1 << 16


def read_csv(
    path: str | os.PathLike[str], delimiter: str | None = None, limit: int | None = None
) -> dict[str, NDArray[Any]]:
    """The columns of a table with a header line, as text, ready for ``contract.apply``.

    Args:
        path: the file, UTF-8; one whose name ends in ``.gz`` is unpacked.
        delimiter: between the fields; None is a tab if the header has one, else a comma. Comma tables may quote.
        limit: read only the first ``limit`` rows.

    Returns:
        str objects ``[rows]`` by column name; a field with nothing in it is ``""``.

    Raises:
        InputError: no header, a name twice, a row with another number of fields, no UTF-8, or a ``.gz`` file
            that is cut off; names path and row.
        OSError: the file cannot be opened.
    """
    if delimiter is None:
        delimiter = "\t" if "\t" in first_line(path) else ","
    return read_table(path, delimiter, None, limit)


def read_table(
    path: str | os.PathLike[str], delimiter: str, names: Sequence[str] | None, limit: int | None = None
) -> dict[str, NDArray[Any]]:
    """Read a table like :func:`read_csv`; with ``names``, the table has no header line."""
    path = Path(path)
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    try:
        with open_text(path) as file:
            rows = csv.reader(file, delimiter=delimiter, quoting=quoting)
            header = list(next(rows, [])) if names is None else list(names)
            _check_header(path, header)
            parts = [_columns(path, header, chunk) for chunk in _chunks(path, rows, len(header), limit)]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise InputError(f"{path}: is not a table of text: {error}") from error
    except NOT_GZIP as error:
        raise cut_off(path, error) from error
    empty = np.empty(0, dtype=object)
    return {name: np.concatenate([p[at] for p in parts]) if parts else empty for at, name in enumerate(header)}


def write_csv(path: str | os.PathLike[str], columns: Mapping[str, Any]) -> None:
    """Write columns as a table that :func:`read_csv` reads back to the same values; missing values are empty. A file whose
    name ends in ``.gz`` is packed.

    Raises:
        InputError: columns of different lengths, or values that are neither text nor numbers.
        OSError: the file cannot be written; names ``path``.
    """
    text = {str(name): to_text(column(columns, name, "write_csv"), str(name)) for name in columns}
    sizes = {name: len(values) for name, values in text.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"columns differ in rows: {sizes}; expected the same number")
    with naming(path), create_text(path) as file:
        # A lone empty field must be quoted, or its line would read as no row at all.
        writer = csv.writer(file, quoting=csv.QUOTE_ALL if len(text) == 1 else csv.QUOTE_MINIMAL)
        writer.writerow(text)
        writer.writerows(zip(*text.values()))


def first_line(path: str | os.PathLike[str]) -> str:
    """The first line of a text file (``.gz``: unpacked) without its line end; raises InputError if it is not UTF-8 text."""
    try:
        with open_text(path) as file:
            return file.readline(1 << 20).rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except NOT_GZIP as error:
        raise cut_off(path, error) from error


def cut_off(path: str | os.PathLike[str], error: Exception) -> InputError:
    """The error for a ``.gz`` file whose data ends too early or is damaged."""
    return InputError(f"{path}: the compressed data is cut off or damaged: {error}; copy the file again")


def _check_header(path: Path, header: list[str]) -> None:
    if not header or not all(header):
        raise InputError(f"{path}: the header line is {header}; expected a name for each column")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice and all(name.replace(".", "", 1).isdigit() for name in twice):
        raise InputError(
            f"{path}: the first line is {','.join(header)[:80]!r}, which looks like data; expected a header"
        )
    if twice:
        raise InputError(f"{path}: duplicate columns {', '.join(twice)}; expected each name once")


def _chunks(path: Path, rows: Any, num_fields: int, limit: int | None) -> Iterator[list[list[str]]]:
    left, done = limit, 0
    while left is None or left > 0:
        chunk = list(islice(rows, _CHUNK_ROWS if left is None else min(left, _CHUNK_ROWS)))
        if not chunk:
            return
        if set(map(len, chunk)) != {num_fields}:
            chunk = [row for row in chunk if row]  # blank lines
            odd = next(((at, row) for at, row in enumerate(chunk, done) if len(row) != num_fields), None)
            if odd is not None:
                at, row = odd
                raise InputError(f"{path}: row {at} has {len(row)} fields, expected {num_fields}: {','.join(row):.80}")
        done += len(chunk)
        if left is not None:
            left -= len(chunk)
        if chunk:
            yield chunk


def _columns(path: Path, header: list[str], chunk: list[list[str]]) -> list[NDArray[Any]]:
    found = []
    for values in zip(*chunk):
        array = np.empty(len(values), dtype=object)
        array[:] = values
        found.append(array)
    return found
