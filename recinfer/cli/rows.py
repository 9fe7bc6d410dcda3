"""Streams rows of ids from CSV, JSON lines or parquet files for :meth:`InferenceClient.predict_many`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from recinfer.errors import ConfigError, InputError
from recinfer.serving.client.bulk import DENSE

__all__ = ["read_rows"]

_READ_ROWS = 4096  # of a parquet file at a time


def read_rows(path: Path) -> Iterator[Any]:
    """Yields the rows of ``path``, and an InputError in place of each row that cannot be read.

    Raises:
        ConfigError: a suffix that names no format, or a parquet file where pyarrow is not installed.
        InputError: a CSV file without a header, or with a column twice.
        OSError: the file cannot be opened.
    """
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {
        ".csv": _csv,
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"--rows {path}: unknown suffix {path.suffix!r}, expected {', '.join(readers)}")
    path.stat()  # fails now for a missing file, not at the first row
    return reader(path)


def _opened(path: Path) -> TextIO:
    """``path`` as text. Spreadsheets write a byte order mark; bytes that are no UTF-8 fail their row, not the file."""
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _csv(path: Path) -> Iterator[Any]:
    """Read one column per feature, with ids separated by spaces (``3 7``, with weights ``3:0.5 7:2``), and ``dense``,
    numbers."""
    file = _opened(path)
    reader = csv.DictReader(file, strict=True)
    try:
        names = list(reader.fieldnames or ())
    except csv.Error as error:
        raise InputError(f"--rows {path}: line 1: {error}") from None
    if not names:
        raise InputError(f"--rows {path}: the first line is empty, expected the names of the columns")
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise InputError(f"--rows {path}: got column {twice!r} more than once, expected each feature once")
    return _csv_rows(file, reader)


def _csv_rows(file: TextIO, reader: csv.DictReader[str]) -> Iterator[Any]:
    with file:
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield InputError(f"line {reader.line_num}: {error}")
                continue
            if cells is None:
                return
            try:
                if None in cells or None in cells.values():
                    raise ValueError(f"got another number of cells than the header has, {len(reader.fieldnames or ())}")
                yield {name: _cell(name, text) for name, text in cells.items()}
            except ValueError as error:
                yield InputError(f"line {reader.line_num}: {error}")


def _cell(name: str, text: str) -> Any:
    words = text.split()
    if name == DENSE:
        return [_number(word) for word in words]
    pairs = [word.partition(":") for word in words]
    try:
        ids = [int(_plain(id_)) for id_, _, _ in pairs]
        if not any(colon for _, colon, _ in pairs):
            return ids
        return ids, [_number(weight) if colon else 1.0 for _, colon, weight in pairs]
    except ValueError:
        expected = "ids separated by spaces, as in 3 7, or with weights 3:0.5 7:2"
        raise ValueError(f"column {name!r}: got {text[:60]!r}, expected {expected}") from None


def _number(text: str) -> float:
    return float(_plain(text))


def _plain(text: str) -> str:
    """``text`` unless it has what only Python reads as part of a number: ``1_0``, or digits of other scripts."""
    if "_" in text or not text.isascii():
        raise ValueError(f"got {text[:60]!r}, expected a number")
    return text


def _json_lines(path: Path) -> Iterator[Any]:
    """Read one object per line: ``{"user": 3, "clicks": [1, 2], "tags": {"ids": [4], "weights": [0.5]}, "dense":
    [0.1]}``."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line.rstrip("\n"))
                if not isinstance(found, dict):
                    raise ValueError(f"got {type(found).__name__}, expected an object")
                yield {name: _weighted(name, value) for name, value in found.items()}
            except json.JSONDecodeError as error:
                yield InputError(f"line {number}: got text that is not JSON ({error.msg}, character {error.colno})")
            except (ValueError, RecursionError) as error:
                yield InputError(f"line {number}: {error}")


def _weighted(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) != {"ids", "weights"}:
        raise ValueError(f"{name!r}: got an object with {sorted(value)}, expected ids and weights")
    return value["ids"], value["weights"]


def _parquet(path: Path) -> Iterator[Any]:
    """Read one column per feature (integers or lists of integers), ``dense``, and ``tags.weights`` for the weights of
    ``tags``."""
    from recinfer.arrow import pyarrow_for
    from recinfer.columns import WEIGHTS_SUFFIX

    pa = pyarrow_for(f"--rows {path}: parquet needs")
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_READ_ROWS):
            for row in batch.to_pylist():
                for name in [name for name in row if f"{name}{WEIGHTS_SUFFIX}" in row]:
                    row[name] = (row[name], row.pop(f"{name}{WEIGHTS_SUFFIX}"))
                yield row
    except pa.ArrowException as error:
        raise InputError(f"--rows {path}: {error}") from None
