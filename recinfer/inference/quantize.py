"""Tables on their way from a checkpoint into shards: read, packed and measured in a few threads, written in order.

Memory is bounded by the chunks in flight, whatever the tables' sizes. Inside a chunk the work runs over blocks that stay
in a core's cache, which is several times faster than passes over the whole chunk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from recinfer.archive.manifest import QuantizationInfo
from recinfer.archive.rows import row_chunks
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import TablePlan
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import pack_rows, quantization_step, unpack_rows

__all__ = ["TableError", "quantize_tables"]

_BLOCK_ELEMENTS = 1 << 19  # 2 MB of float32: larger ones leave the cache, smaller ones spend their time between calls
_MOST_WORKERS = 4

Collect = Callable[[TablePlan, int, Tensor], None]
Write = Callable[[TablePlan, int, Tensor], None]


@dataclass
class TableError:
    """How far packed rows are from the float ones, gathered chunk by chunk."""

    step: float = 0.0
    largest: float = 0.0
    squares: float = 0.0
    weight_squares: float = 0.0

    def add(self, weight_RD: Tensor, packed_RP: Tensor, data_type: DataType) -> None:
        """Take a block of rows, contiguous."""
        flat = weight_RD.view(-1)
        self.weight_squares += float(torch.dot(flat, flat))
        if data_type is DataType.FP32 or not flat.numel():
            return
        difference = unpack_rows(packed_RP, weight_RD.shape[1], data_type).sub_(weight_RD).view(-1)
        low, high = difference.aminmax()
        self.largest = max(self.largest, -float(low), float(high))
        self.squares += float(torch.dot(difference, difference))
        self.step = max(self.step, float(quantization_step(packed_RP, weight_RD.shape[1], data_type).max()))

    def merge(self, other: TableError) -> None:
        """Take what another has gathered of the same table."""
        self.step, self.largest = max(self.step, other.step), max(self.largest, other.largest)
        self.squares += other.squares
        self.weight_squares += other.weight_squares

    def result(self, elements: int) -> QuantizationInfo:
        """The summary over all of the table's elements."""
        relative = (self.squares / self.weight_squares) ** 0.5 if self.weight_squares else 0.0
        return QuantizationInfo(self.step, self.largest, (self.squares / elements) ** 0.5, relative)


def quantize_tables(
    tables: list[tuple[TablePlan, str]],
    checkpoint: CheckpointReader,
    write: Write,
    collect: Collect,
    advance: Callable[[int], None],
    max_chunk_bytes: int,
) -> dict[tuple[str, str], QuantizationInfo]:
    """Read, pack and measure tables; hand their packed rows on in order.

    Args:
        tables: each with its key in the checkpoint.
        write: called in this thread with (table, first row, packed rows uint8 [R, row bytes]), rows ascending.
        collect: called in any thread with (table, first row, float32 rows), which it must not keep.
        advance: told the bytes (of float32) done.
        max_chunk_bytes: float bytes of a chunk; one chunk a worker and as many packed ones are in memory.

    Returns:
        (module path, table) -> its error.

    Raises:
        CheckpointError: rows cannot be read. InputError: rows that are not finite, with table and row.
    """
    errors: dict[tuple[str, str], TableError] = {}
    workers = max(1, min(_MOST_WORKERS, _cores()))
    waiting: deque[tuple[TablePlan, int, Future[tuple[Tensor, TableError]]]] = deque()
    worker = _Worker(checkpoint, collect)

    def finish() -> None:
        table, start, future = waiting.popleft()
        packed, error = future.result()
        write(table, start, packed)
        errors.setdefault((table.module, table.table), TableError()).merge(error)
        advance(4 * packed.shape[0] * table.embedding_dim)

    with _one_thread_an_operator(), ThreadPoolExecutor(workers) as pool:
        try:
            for table, key in tables:
                for start, stop in row_chunks(table.num_embeddings, 4 * table.embedding_dim, max_chunk_bytes):
                    waiting.append((table, start, pool.submit(worker, table, key, start, stop)))
                    if len(waiting) > workers:
                        finish()
            while waiting:
                finish()
        finally:
            for _, _, future in waiting:
                future.cancel()
    sizes = {(t.module, t.table): t.num_embeddings * t.embedding_dim for t, _ in tables}
    return {key: error.result(sizes[key]) for key, error in errors.items()}


class _Worker:
    """Reads and packs chunks, each thread into a buffer of its own that is used again: fresh pages cost more than work."""

    def __init__(self, checkpoint: CheckpointReader, collect: Collect) -> None:
        self._checkpoint = checkpoint
        self._collect = collect
        self._local = threading.local()

    def __call__(self, table: TablePlan, key: str, start: int, stop: int) -> tuple[Tensor, TableError]:
        rows, dim = stop - start, table.embedding_dim
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < rows * dim:
            buffer = self._local.buffer = torch.empty(rows * dim)
        chunk = buffer[: rows * dim].view(rows, dim)
        self._checkpoint.read_into(key, chunk, start, stop)
        packed = pack_rows(chunk, table.precision, table=table.name, first_row=start)
        error = TableError()
        for low, high in row_chunks(rows, dim, _BLOCK_ELEMENTS):
            error.add(chunk[low:high], packed[low:high], table.precision)
        self._collect(table, start, chunk)
        return packed, error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_thread_an_operator() -> Iterator[None]:
    """The workers are the threads; operators on blocks that small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
