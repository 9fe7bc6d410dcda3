"""Streams rows of ids from CSV, JSON lines or parquet files for :meth:`InferenceClient.predict_many`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from recinfer.columns import DENSE
from recinfer.errors import ConfigError, InputError
from recinfer.files import NOT_GZIP, open_text, without_gz

__all__ = ["read_context", "read_rows"]

_READ_ROWS = 4096  # rows of a parquet file that are read at a time


def read_rows(
    path: Path,
    as_text: Sequence[str] = (),
    dense: str = DENSE,
    numbers: Collection[str] = (),
    strings: Collection[str] = (),
) -> Iterator[Any]:
    """Yields the rows of ``path``, and an InputError in place of each row that cannot be read.

    Args:
        path: ``.csv``, ``.jsonl``, ``.ndjson``, each also with ``.gz`` behind it, or ``.parquet``.
        as_text: columns of a CSV file that hold no ids: their cells stay text.
        dense: the column of a CSV file with the dense numbers.
        numbers: other columns of a CSV file that hold numbers, a single one or several; read with the first row.
        strings: columns of a CSV file whose cells are strings: one each, an empty cell none.

    Raises:
        ConfigError: a suffix that names no format, ``strings`` for another format than CSV, or a parquet file where pyarrow is not
            installed.
        InputError: a CSV file without a header, with one that no row can fit, or without a column of ``as_text``.
        OSError: the file cannot be opened.
    """
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {
        ".csv": partial(_csv, as_text=as_text, dense=dense, numbers=numbers, strings=frozenset(strings)),
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".parquet": _parquet,
    }
    inner = without_gz(path)
    suffix = inner.suffix.lower()
    reader = readers.get(suffix)
    if reader is None or (reader is _parquet and inner != path):
        raise ConfigError(
            f"--rows {path}: unknown suffix {path.name.removeprefix(inner.stem)!r}, expected {', '.join(readers)}, or "
            f".gz behind one of text"
        )
    if strings and suffix != ".csv":
        raise ConfigError(f"--strings: {path} has strings where its values are strings; give the option for CSV alone")
    path.stat()  # fails now for a missing file, not at the first row
    return reader(path)


def read_context(path: Path) -> dict[str, Any]:
    """The row in the JSON file ``path``: one object, in the form of a line of a ``.jsonl`` file.

    Raises:
        InputError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text("utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError(f"got {type(found).__name__}, expected an object")
        return {name: _weighted(name, value) for name, value in found.items()}
    except json.JSONDecodeError as error:
        raise InputError(f'--context {path}: no JSON ({error}); expected one row, as in {{"user": 3}}') from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--context {path}: {error}") from None


def _opened(path: Path) -> IO[str]:
    """``path`` as text. Spreadsheets write a byte order mark; bytes that are no UTF-8 fail their row, not the file."""
    return open_text(path, errors="replace")


def _cut_off(path: Path, line: int, error: Exception) -> InputError:
    return InputError(f"--rows {path}: line {line}: the compressed data ends or is damaged here: {error}")


def _csv(
    path: Path, as_text: Sequence[str], dense: str, numbers: Collection[str], strings: frozenset[str]
) -> Iterator[Any]:
    """Read one column per feature, with ids separated by spaces (``3 7``, with weights ``3:0.5 7:2``), and numbers in
    the column ``dense``."""
    file = _opened(path)
    reader = csv.DictReader(file, strict=True)
    try:
        names = list(reader.fieldnames or ())
    except csv.Error as error:
        raise InputError(f"--rows {path}: line 1: {error}") from None
    except NOT_GZIP as error:
        raise _cut_off(path, 1, error) from None
    if not names:
        raise InputError(f"--rows {path}: the first line is empty, expected the names of the columns")
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise InputError(f"--rows {path}: got column {twice!r} more than once, expected each feature once")
    if not all(names):
        at = names.index("") + 1
        raise InputError(
            f"--rows {path}: column {at} of the header has no name (a comma too many?), expected a name for each"
        )
    if len(names) == 1 and (other := next((mark for mark in "\t;" if mark in names[0]), "")):
        mark = "tabs" if other == "\t" else "semicolons"
        raise InputError(f"--rows {path}: the header is separated by {mark}, expected commas")
    absent = [name for name in as_text if name not in names]
    if absent:
        raise InputError(
            f"--rows {path}: no column {absent[0]!r} to keep or ignore; the header has {', '.join(names)[:200]}"
        )
    if absent := sorted(strings.difference(names)):
        raise InputError(
            f"--rows {path}: no column {absent[0]!r} of --strings; the header has {', '.join(names)[:200]}"
        )
    return _csv_rows(path, file, reader, frozenset(as_text), dense, numbers, strings)


def _csv_rows(
    path: Path,
    file: IO[str],
    reader: csv.DictReader[str],
    as_text: frozenset[str],
    dense: str,
    numbers: Collection[str],
    strings: frozenset[str],
) -> Iterator[Any]:
    def value_of(name: str, text: str) -> Any:
        if name in as_text:
            return text
        if name in strings:
            return [text] if text else []
        return _numbers(text) if name in numbers else _cell(name, text, dense)

    with file:
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield InputError(f"line {reader.line_num}: {error}")
                continue
            except NOT_GZIP as error:  # the rows before it are whole
                yield _cut_off(path, reader.line_num + 1, error)
                return
            if cells is None:
                return
            try:
                if None in cells or None in cells.values():
                    raise ValueError(f"got another number of cells than the header has, {len(reader.fieldnames or ())}")
                yield {name: value_of(name, text) for name, text in cells.items()}
            except ValueError as error:
                yield InputError(f"line {reader.line_num}: {error}")


def _cell(name: str, text: str, dense: str) -> Any:
    words = text.split()
    if name == dense:
        return [_number(word) for word in words]
    pairs = [word.partition(":") for word in words]
    try:
        ids = [int(_plain(id_)) for id_, _, _ in pairs]
        if not any(colon for _, colon, _ in pairs):
            return ids
        return ids, _weights(pairs)
    except ValueError:
        expected = "ids separated by spaces, as in 3 7, or with weights 3:0.5 7:2"
        raise ValueError(f"column {name!r}: got {text[:60]!r}, expected {expected}") from None


def _numbers(text: str) -> Any:
    """A cell of a named input: one number, or the list of several, maybe with weights; whole numbers stay whole."""
    pairs = [word.partition(":") for word in text.split()]
    found = [
        int(word) if word.lstrip("-").isdecimal() else _number(word) for word in (_plain(one) for one, _, _ in pairs)
    ]
    if any(colon for _, colon, _ in pairs):
        return found, _weights(pairs)
    return found[0] if len(found) == 1 else found


def _weights(pairs: list[tuple[str, str, str]]) -> list[float]:
    return [_number(weight) if colon else 1.0 for _, colon, weight in pairs]


def _number(text: str) -> float:
    return float(_plain(text))


def _plain(text: str) -> str:
    """``text``, unless Python alone would read it as a number: ``1_0``, or digits of other scripts."""
    if "_" in text or not text.isascii():
        raise ValueError(f"got {text[:60]!r}, expected a number")
    return text


def _json_lines(path: Path) -> Iterator[Any]:
    """Read one object per line: ``{"user": 3, "clicks": [1, 2], "tags": {"ids": [4], "weights": [0.5]}, "dense":
    [0.1]}``."""
    number = 0
    with _opened(path) as file:
        while True:
            number += 1
            try:
                line = file.readline()
            except NOT_GZIP as error:
                yield _cut_off(path, number, error)
                return
            if not line:
                return
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
    what = "ids" if "ids" in value else "values"
    if set(value) != {what, "weights"}:
        raise ValueError(f"{name!r}: got an object with {sorted(value)}, expected ids (or values) and weights")
    return value[what], value["weights"]


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
