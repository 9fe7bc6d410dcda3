"""Reads whole packed rows from an archive's shards in slices, for any sharding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from recinfer.archive.paths import open_inside
from recinfer.archive.rank_files import StoredRect
from recinfer.archive.reader import Archive
from recinfer.distributed.planner.plan import TablePlan
from recinfer.errors import ArchiveError, InputError
from recinfer.quant.rows import join_packed_columns, row_bytes

__all__ = ["RowReader", "row_chunks"]


class RowReader:
    """Reads rows of an archive's tables in bounded memory. A context manager; for one thread at a time.

    Row-wise shards are read in place and column-wise shards are joined, which is exact: each carries the scale and bias
    of its whole row. The first copy of a replicated table is read.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._pieces: dict[tuple[str, str], dict[tuple[int, int], list[tuple[str, StoredRect]]]] = {}
        for file in archive.rank_files:
            for piece in file.rects:
                columns = self._pieces.setdefault((piece.table.module, piece.table.table), {})
                parts = columns.setdefault((piece.rect.col_start, piece.rect.col_stop), [])
                if all(other.rect.row_start != piece.rect.row_start for _, other in parts):
                    parts.append((file.path, piece))

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def read(self, table: TablePlan, start: int, stop: int) -> Tensor:
        """Packed rows ``start`` to ``stop``, uint8 [stop - start, row bytes of the whole row].

        Raises:
            ArchiveError: a file has become shorter (F4), or column pieces do not belong together (S5).
        """
        columns = self._pieces[table.module, table.table]
        parts = [
            (low, high, self._read_columns(pieces, high - low, table, start, stop))
            for (low, high), pieces in columns.items()
        ]
        try:
            return join_packed_columns(parts, table.embedding_dim, table.precision, table=table.name, first_row=start)
        except InputError as error:
            raise ArchiveError(str(error), rule="S5") from None

    def _read_columns(
        self, pieces: list[tuple[str, StoredRect]], cols: int, table: TablePlan, start: int, stop: int
    ) -> Tensor:
        width = row_bytes(cols, table.precision)
        out = torch.empty((stop - start, width), dtype=torch.uint8)
        view = memoryview(out.numpy()).cast("B") if out.numel() else memoryview(b"")  # type: ignore[arg-type]
        for path, piece in pieces:
            low, high = max(start, piece.rect.row_start), min(stop, piece.rect.row_stop)
            if low < high:
                offset = piece.start + (low - piece.rect.row_start) * width
                self._fill(path, offset, view[(low - start) * width : (high - start) * width])
        return out

    def _fill(self, path: str, offset: int, view: memoryview) -> None:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._stack.enter_context(open_inside(self._archive.root, path))
        file.seek(offset)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise ArchiveError(f"{path} ends at byte {offset + done}, inside a shard", rule="F4")
            done += count


def row_chunks(rows: int, bytes_per_row: int, max_chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) slices of at most ``max_chunk_bytes`` each, at least one row."""
    step = max(1, max_chunk_bytes // max(1, bytes_per_row))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
