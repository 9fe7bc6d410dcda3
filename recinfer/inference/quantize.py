"""Quantizes a checkpoint's tables into shards with a few threads that read, pack and measure chunks.

Memory is bounded by the chunks in flight for any table size. A chunk is processed in blocks that fit a core's cache,
which is several times faster than passes over the whole chunk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from recinfer.archive.manifest import QuantizationInfo
from recinfer.archive.rows import row_chunks
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import TablePlan
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import RowError, RowPacker
from recinfer.quant.rows import row_bytes
from recinfer.threads import Call, Threads

__all__ = ["one_thread_an_operator", "quantize_tables"]

_MOST_WORKERS = 4

Collect = Callable[[TablePlan, int, Tensor], None]
Write = Callable[[TablePlan, int, Tensor], None]


def quantize_tables(
    tables: list[tuple[TablePlan, str]],
    checkpoint: CheckpointReader,
    write: Write,
    collect: Collect,
    advance: Callable[[int], None],
    max_chunk_bytes: int,
) -> dict[tuple[str, str], QuantizationInfo]:
    """Read, pack and measure tables, and pass their packed rows on in order.

    Args:
        tables: each with its key in the checkpoint.
        write: called in this thread with (table, first row, packed rows uint8 [R, row bytes]), rows ascending.
        collect: called in any thread with (table, first row, float32 rows), which it must not keep.
        advance: called with the number of processed bytes (of float32).
        max_chunk_bytes: float bytes of a chunk; a few packed chunks are in memory at a time, and 2 MB a worker.

    Returns:
        (module path, table) -> its error.

    Raises:
        CheckpointError: rows cannot be read. InputError: rows that are not finite, with table and row.
    """
    errors: dict[tuple[str, str], RowError] = {}
    workers = max(1, min(_MOST_WORKERS, _cores()))
    waiting: deque[tuple[TablePlan, int, Call[tuple[Tensor, RowError]]]] = deque()
    worker = _Worker(checkpoint, collect)

    def finish() -> None:
        table, start, call = waiting.popleft()
        packed, error = call.result()
        write(table, start, packed)
        errors.setdefault((table.module, table.table), RowError()).merge(error)
        advance(4 * packed.shape[0] * table.embedding_dim)

    with one_thread_an_operator(), Threads(workers) as threads:
        for table, key in tables:
            for start, stop in row_chunks(table.num_embeddings, 4 * table.embedding_dim, max_chunk_bytes):
                waiting.append((table, start, threads.submit(worker, table, key, start, stop)))
                if len(waiting) > workers + 1:
                    finish()
        while waiting:
            finish()
    sizes = {(t.module, t.table): t.num_embeddings * t.embedding_dim for t, _ in tables}
    return {key: _summary(error, sizes[key]) for key, error in errors.items()}


def _summary(error: RowError, elements: int) -> QuantizationInfo:
    """The quantization error of a whole table, for the manifest."""
    relative = (error.squares / error.weight_squares) ** 0.5 if error.weight_squares else 0.0
    return QuantizationInfo(error.step, error.largest, (error.squares / elements) ** 0.5, relative)


class _Worker:
    """Reads and packs chunks; each thread reuses its own buffers for all chunks of a width and precision."""

    def __init__(self, checkpoint: CheckpointReader, collect: Collect) -> None:
        self._checkpoint = checkpoint
        self._collect = collect
        self._local = threading.local()

    def __call__(self, table: TablePlan, key: str, start: int, stop: int) -> tuple[Tensor, RowError]:
        packer = self._packer(table.embedding_dim, table.precision)
        out_RP = torch.empty(stop - start, row_bytes(table.embedding_dim, table.precision), dtype=torch.uint8)
        packer.error = RowError()
        for first, last in self._checkpoint.read_blocks(key, start, stop, packer.block):
            rows = out_RP[first - start : last - start]
            packer.pack(last - first, rows, table=table.name, first_row=first)
            self._collect(table, first, packer.block[: last - first])
        return out_RP, packer.error

    def _packer(self, dim: int, data_type: DataType) -> RowPacker:
        packer = getattr(self._local, "packer", None)
        if packer is None or (packer.dim, packer.data_type) != (dim, data_type):
            packer = self._local.packer = RowPacker(dim, data_type, measure=True)
        return packer


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread_an_operator() -> Iterator[None]:
    """Run torch operators with one thread: on small blocks more threads gain nothing and wait for busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
