"""Streams rows of csv, tsv (also gzip) and parquet files in blocks, for data larger than memory.

All ranks of a training see the same blocks. A rank converts only its own rows of a block to ids, and parses only these
if the format allows (tab-separated text, parquet).
"""

from __future__ import annotations

import abc
import csv
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from recinfer.data.criteo import header_of
from recinfer.data.movielens import join_sides, read_sides, strip_types
from recinfer.data.tables import cut_off
from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.files import NOT_GZIP, open_text

__all__ = ["RowStream", "held_out_mask"]

Columns = dict[str, NDArray[Any]]
_PARQUET = (".parquet", ".pq")
_TEXT = (".csv", ".tsv", ".txt", ".inter", ".log")


@dataclass
class RowStream:
    """The rows of ``path`` in order, read once for each :meth:`blocks`.

    Args:
        path: a file, or a folder whose files (not the hidden ones) are read in the order of their names. A name that
            ends in ``.gz`` is unpacked on the way; ``.parquet`` and ``.pq`` need pyarrow.
        format: ``"criteo"`` or ``"movielens"``.
        limit: read only the first ``limit`` rows.

    Raises:
        ConfigError: an unknown format.
        InputError: no file, or a folder without one.
    """

    path: str | os.PathLike[str]
    format: str = "criteo"
    limit: int | None = None
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.format not in ("criteo", "movielens"):
            raise ConfigError(f"format {self.format!r}: rows in files are one of criteo, movielens")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit is {self.limit}; expected at least 1 row")
        path = Path(self.path)
        if path.is_dir():
            self.files = tuple(sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "_"))))
        else:
            self.files = (path,)
        if not self.files or not self.files[0].exists():
            raise InputError(f"{path}: found no file to read; expected a file or a folder with files")

    @property
    def bytes(self) -> int:
        """Size of the files in bytes, compressed or not."""
        return sum(file.stat().st_size for file in self.files)

    def blocks(self, rows: int, keep: Callable[[int, int], NDArray[np.int64]] | None = None) -> Iterator[Columns]:
        """Yields blocks of ``rows`` rows; the last one may be smaller, and a block may span files.

        Args:
            rows: rows of a block.
            keep: ``keep(first row of the block, rows there are in it)`` gives the places in the block to return, in
                any order; None returns all.

        Raises:
            InputError: rows that cannot be read, or files with different columns; names the file.
        """
        sides = read_sides(self.files[0]) if self.format == "movielens" else []
        first, header = 0, None
        pending: _Block | None = None
        for file in self.files:
            for piece in self._pieces(file, rows, first if pending is None else first + len(pending)):
                if header is None:
                    header = piece.names
                elif piece.names != header:
                    raise InputError(
                        f"{file}: columns {', '.join(piece.names)}; the files before have {', '.join(header)}"
                    )
                pending = piece if pending is None else pending.joined(piece)
                while len(pending) >= rows:
                    block, pending = pending.cut(rows)
                    yield self._finish(block, first, keep, sides)
                    first += rows
        if pending is not None and len(pending):
            yield self._finish(pending, first, keep, sides)

    def _finish(self, block: _Block, first: int, keep: Any, sides: Any) -> Columns:
        places = None if keep is None else keep(first, len(block))
        columns = block.columns(places)
        if self.format == "movielens":
            columns = join_sides(strip_types(columns, self.files[0]), sides, self.files[0])
        return columns

    def _pieces(self, file: Path, rows: int, done: int) -> Iterator[_Block]:
        """Yields pieces of a file with at most ``rows`` rows, up to the limit."""
        left = None if self.limit is None else self.limit - done
        read = _parquet_pieces if file.suffix in _PARQUET else _text_pieces
        for piece in read(file, rows, self.format):
            if left is not None:
                if left <= 0:
                    return
                piece, _ = piece.cut(min(left, len(piece)))
                left -= len(piece)
            yield piece


def held_out_mask(rows: NDArray[np.int64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Mask of the held-out row numbers: about ``fraction`` of them, the same for the same seed on every machine.

    The choice is a hash of the row number (splitmix64's finaliser), so no rank needs to see another's rows.
    """
    if not 0 < fraction < 1:
        raise InputError(f"test_fraction is {fraction}; expected a number between 0 and 1")
    with np.errstate(over="ignore"):
        x = rows.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x < np.uint64(int(fraction * 2**64))


# --------------------------------------------------------------------------------------------------- blocks of a format


class _Block(abc.ABC):
    """Rows that are read and parsed on demand."""

    names: tuple[str, ...]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def joined(self, other: Any) -> Any:
        """A block of this block's rows followed by the rows of ``other``, a block of the same class."""

    @abc.abstractmethod
    def cut(self, rows: int) -> tuple[Any, Any]:
        """Two blocks: the first ``rows`` rows, and the rest."""

    @abc.abstractmethod
    def columns(self, places: NDArray[np.int64] | None) -> Columns:
        """The rows at ``places`` (None: all), parsed."""


@dataclass
class _Lines(_Block):
    """Lines of tab-separated text, or lists of fields if the file has csv quoting."""

    names: tuple[str, ...]
    rows: list[Any]
    file: Path
    split: bool  # whether rows are lists of fields

    def __len__(self) -> int:
        return len(self.rows)

    def joined(self, other: _Lines) -> _Lines:
        return _Lines(self.names, self.rows + other.rows, other.file, self.split)

    def cut(self, rows: int) -> tuple[_Lines, _Lines]:
        head = _Lines(self.names, self.rows[:rows], self.file, self.split)
        return head, _Lines(self.names, self.rows[rows:], self.file, self.split)

    def columns(self, places: NDArray[np.int64] | None) -> Columns:
        rows = self.rows if places is None else [self.rows[i] for i in places.tolist()]
        fields = rows if self.split else [row.rstrip("\r\n").split("\t") for row in rows]
        if set(map(len, fields)) - {len(self.names)}:
            odd = next(row for row in fields if len(row) != len(self.names))
            raise InputError(
                f"{self.file}: a row has {len(odd)} fields, expected {len(self.names)}: {','.join(odd):.80}"
            )
        columns: Columns = {}
        values: Sequence[Any] = list(zip(*fields)) if fields else [()] * len(self.names)
        for name, column in zip(self.names, values):
            columns[name] = np.empty(len(column), dtype=object)
            columns[name][:] = column
        return columns


@dataclass
class _Arrow(_Block):
    """Rows of a parquet file as an Arrow table."""

    names: tuple[str, ...]
    table: Any

    def __len__(self) -> int:
        return self.table.num_rows

    def joined(self, other: _Arrow) -> _Arrow:
        import pyarrow

        return _Arrow(self.names, pyarrow.concat_tables([self.table, other.table]))

    def cut(self, rows: int) -> tuple[_Arrow, _Arrow]:
        return _Arrow(self.names, self.table.slice(0, rows)), _Arrow(self.names, self.table.slice(rows))

    def columns(self, places: NDArray[np.int64] | None) -> Columns:
        table = self.table if places is None else self.table.take(places)
        return {name: table.column(name).to_numpy(zero_copy_only=False) for name in self.names}


def _text_pieces(file: Path, rows: int, format: str) -> Iterator[_Lines]:
    try:
        with open_text(file) as lines:
            first = lines.readline(1 << 20)
            if not first:
                return
            delimiter = "\t" if "\t" in first else ","
            fields = next(csv.reader([first.rstrip("\r\n")], delimiter=delimiter))
            has_header, names = header_of(file, fields) if format == "criteo" else (True, tuple(fields))
            start: list[str] = [] if has_header else [first]
            if delimiter == "\t":
                source: Iterator[Any] = _not_blank(lines, start)
            else:
                source = (row for row in csv.reader(_chain(start, lines)) if row)
            while block := list(islice(source, rows)):
                yield _Lines(names, block, file, delimiter != "\t")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise InputError(f"{file}: cannot be read as a table of text: {error}") from error
    except NOT_GZIP as error:
        raise cut_off(file, error) from error


def _not_blank(lines: IO[str], start: list[str]) -> Iterator[str]:
    yield from start
    for line in lines:
        if line.strip("\r\n"):
            yield line


def _chain(start: list[str], lines: IO[str]) -> Iterator[str]:
    yield from start
    yield from lines


def _parquet_pieces(file: Path, rows: int, format: str) -> Iterator[_Arrow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnavailableError(f"{file}: reading parquet needs pyarrow; pip install 'recinfer[arrow]'") from error
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            names = tuple(parquet.schema_arrow.names)
            for batch in parquet.iter_batches(batch_size=min(rows, 1 << 16)):
                yield _Arrow(names, pyarrow.Table.from_batches([batch]))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException) as error:
        raise InputError(f"{file}: cannot be read as parquet: {error}") from error
