"""The interface to FBGEMM's table-batched embeddings (TBE): looking up packed rows, registering TBE modules.

No other file imports FBGEMM's TBE classes. The lookup calls the operator itself on tables anywhere in one uint8
buffer, so tables are never copied into a module's own storage: a memory-mapped archive serves as it is. FBGEMM's
``IntNBitTableBatchedEmbeddingBagsCodegen`` is built only on request (registration, inspection); it
shares the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.buffers import Buffers, Memory, Placed
from recinfer.quant.formats.registry import ROW_FORMATS
from recinfer.quant.rows import OUTPUT_DTYPES, padded_dim

try:
    import fbgemm_gpu  # noqa: F401  registers the ops
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
except ImportError as error:
    raise UnavailableError(
        f"FBGEMM is not installed; run pip install 'recinfer[cpu]', or 'recinfer[cuda]' on a GPU machine ({error})"
    ) from error

__all__ = [
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "TableBatch",
    "embedding_location",
]

_SPARSE_TYPES = {known.data_type: SparseType[known.fbgemm] for known in ROW_FORMATS if known.fbgemm is not None}
_WIDEST = ("INT2", "INT4", "INT8", "FP16", "FP32")  # the operator takes the widest table of each, in this order
_POOLING_MODES = {
    PoolingType.SUM: PoolingMode.SUM,
    PoolingType.MEAN: PoolingMode.MEAN,
    PoolingType.NONE: PoolingMode.NONE,
}
_OUTPUT_TYPES = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16, torch.bfloat16: SparseType.BF16}


def embedding_location(memory: Memory, device: torch.device) -> EmbeddingLocation:
    """FBGEMM's name for rows in ``memory`` that ``device`` looks up: HOST on any device but CUDA."""
    if device.type != "cuda":
        return EmbeddingLocation.HOST
    locations = {"managed": EmbeddingLocation.MANAGED, "cached": EmbeddingLocation.MANAGED_CACHING}
    return locations.get(memory, EmbeddingLocation.DEVICE)


class TableBatch(nn.Module):
    """One FBGEMM call over packed tables of any precision and width.

    Args:
        reads: the table of each feature, in the order of the ids; features may share a table.
        pooling: SUM or MEAN for bags; NONE for one row per id (then all reads have one padded width).
        buffers: hold the rows. They are referenced and read, never copied or written.
        output_dtype: float32, float16 or bfloat16.

    Attributes:
        tables: the tables, each once.
        widths: columns of each read in the output, padded.
        knows_rows: whether the op refuses ids beyond the tables' rows.
        averages: whether one call may have SUM and MEAN; it may not.
        counts_ids: whether it reports ids out of range after the lookup; it does not.
        real_columns: int64, those of the op's output that are columns of a table; None: all are. The op pads columns of INT4
            and INT2 tables to whole bytes.
    """

    averages = False
    counts_ids = False
    weights: Tensor
    real_columns: Tensor | None

    def __init__(
        self,
        reads: Sequence[Placed],
        pooling: PoolingType,
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if output_dtype not in _OUTPUT_TYPES:
            raise ConfigError(f"output_dtype: got {output_dtype}; expected one of {sorted(map(str, OUTPUT_DTYPES))}")
        self.reads = tuple(reads)
        self.tables = tuple(dict.fromkeys(reads))
        self.pooling = pooling
        self.storage = buffers
        self.output_dtype = output_dtype
        self._cache_lock = threading.Lock()
        self._through_cache: IntNBitTableBatchedEmbeddingBagsCodegen | None = None
        buffer, alignment = buffers.near, buffers.row_alignment
        self.register_buffer("weights", buffer, persistent=False)
        device = buffer.device
        memories = [buffers.memory_of(read) for read in self.reads]
        self.widths = [padded_dim(read.rect.cols, read.data_type) for read in self.reads]
        if pooling is PoolingType.NONE and len(set(self.widths)) > 1:
            raise ConfigError(f"unpooled tables of one batch must have one width; got {sorted(set(self.widths))}")
        column_offsets = [0, *accumulate(self.widths)]
        self.total_dim = self.widths[0] if pooling is PoolingType.NONE and self.widths else column_offsets[-1]
        real = [start + c for start, read in zip(column_offsets, self.reads) for c in range(read.rect.cols)]
        padded = pooling is not PoolingType.NONE and len(real) < column_offsets[-1]
        self.register_buffer("real_columns", torch.tensor(real, device=device) if padded else None, persistent=False)
        managed = buffers.managed
        assert managed is None or device.type == "cuda", "the op takes one buffer on CPU"
        self._managed = managed if managed is not None else torch.empty(0, dtype=torch.uint8, device=device)
        widths = list(zip(self.reads, self.widths))
        widest = {
            kind: max((w for read, w in widths if _SPARSE_TYPES[read.data_type].name == kind), default=0)
            for kind in _WIDEST
        }

        def tensor(data: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(data, dtype=dtype, device=device)

        # The op's arguments, built once; a tuple because attribute look-ups through nn.Module cost more than the op's
        # own dispatch at batch 1.
        self._head: tuple[Any, ...] = (
            buffer,
            self._managed,
            tensor([embedding_location(memory, device).value for memory in memories], torch.int32),
            tensor([read.offset for read in self.reads], torch.int64),
            tensor([_SPARSE_TYPES[read.data_type].as_int() for read in self.reads], torch.uint8),
            tensor(column_offsets, torch.int32),
            column_offsets[-1],
            *widest.values(),
        )
        end = max((read.offset + read.bytes(alignment) for read in self.reads), default=0)
        # Without the slack behind the last row, which the op would take for more rows.
        self._bounded = (buffer[:end], *self._head[1:]) if device.type == "cpu" else self._head
        self.knows_rows = device.type == "cpu" and self._knows_rows(end)
        self._pooling_mode = int(_POOLING_MODES[pooling])
        self._tail = (_OUTPUT_TYPES[output_dtype].as_int(), None, None, alignment, 0, -1, -1)
        self._op = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
        self._fbgemm_module: IntNBitTableBatchedEmbeddingBagsCodegen | None = None
        if device.type == "cuda" and "cached" in memories:
            self._through_cache = self.fbgemm_module()  # keeps the cache's state, and fills it before each lookup

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: all but the lock."""
        return {name: value for name, value in vars(self).items() if name != "_cache_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache_lock = threading.Lock()

    def _knows_rows(self, size: int) -> bool:
        """Whether the operator rejects every id beyond each table's rows.

        It does not get the number of rows: it treats the bytes up to the next feature's table (or the buffer's end) as
        the table's. So tables must follow one another in the order of the features, with less than a row between them.
        It always skips -1, the id of a pruned row.
        """
        reads = self.reads
        ends = [read.offset for read in reads[1:]] + [size]
        for t in reversed(range(len(reads) - 1)):
            if reads[t].offset == reads[t + 1].offset:
                ends[t] = ends[t + 1]  # several features of one table
        return all(
            (end - read.offset) // read.row_bytes(self.storage.row_alignment) == read.rect.rows
            for read, end in zip(reads, ends)
        )

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up ``indices`` [N] (int32 or int64), bags bounded by ``offsets`` [features x B + 1], feature-major.

        With :attr:`knows_rows` ids beyond the rows raise RuntimeError and -1 is skipped; otherwise ids are not checked.

        Returns:
            [B, total padded columns], or [N, padded width] when unpooled.
        """
        if self._through_cache is not None:
            # The module fills its cache, then looks up: another thread between the two would put other rows there.
            with self._cache_lock:
                return self._through_cache(indices, offsets, per_sample_weights)
        return self._op(*self._bounded, indices, offsets, self._pooling_mode, per_sample_weights, *self._tail)

    def rows_per_read(
        self, indices: Tensor, offsets: Tensor, edges: Sequence[int], *, traced: bool = False
    ) -> list[Tensor]:
        """Look up unpooled tables: of each read ``[ids of its key, columns]``, views of one result.

        Args:
            indices, offsets: as of :meth:`forward`; read ``i`` takes the ids of key ``i``.
            edges: position of each key's first id, and N.
            traced: call :meth:`traced`.
        """
        rows = (self.traced if traced else self.forward)(indices, offsets)
        return [rows[edges[i] : edges[i + 1], : read.rect.cols] for i, read in enumerate(self.reads)]

    def without_padding(self, out_BD: Tensor) -> Tensor:
        """The columns of a pooled :meth:`forward`'s result without padding."""
        return out_BD if self.real_columns is None else out_BD.index_select(1, self.real_columns)

    def traced(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """:meth:`forward` for torch.export, on the registered buffer itself, so that an exported program saves it
        once."""
        return self._op(*self._head, indices, offsets, self._pooling_mode, per_sample_weights, *self._tail)

    def forget_cached(self) -> None:
        """Invalidate the cache after rows of ``"cached"`` tables were written."""
        if self._through_cache is not None:
            with self._cache_lock:
                self._through_cache.reset_cache_states()

    def fbgemm_module(self) -> IntNBitTableBatchedEmbeddingBagsCodegen:
        """FBGEMM's own TBE module over the same bytes (built at the first call), for registration and inspection."""
        if self._fbgemm_module is None:
            module = self._make_fbgemm_module()
            self.__dict__["_fbgemm_module"] = module  # not a submodule: its buffers are ours
        return self._fbgemm_module  # type: ignore[return-value]  # set above

    def _make_fbgemm_module(self) -> IntNBitTableBatchedEmbeddingBagsCodegen:
        device, number = self.weights.device, {table: i for i, table in enumerate(self.tables)}
        tbe: Any = IntNBitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (
                    table.rect.table,
                    table.rect.rows,
                    padded_dim(table.rect.cols, table.data_type),
                    _SPARSE_TYPES[table.data_type],
                    embedding_location(self.storage.memory_of(table), device),
                )
                for table in self.tables
            ],
            feature_table_map=[number[read] for read in self.reads],
            pooling_mode=_POOLING_MODES[self.pooling],
            device=device,
            bounds_check_mode=BoundsCheckMode.NONE,
            output_dtype=_OUTPUT_TYPES[self.output_dtype],
            row_alignment=self.storage.row_alignment,
        )
        tbe.weights_physical_offsets = [table.offset for table in self.tables]
        tbe.initialize_logical_weights_placements_and_offsets()
        size = self.weights.numel()
        tbe.host_size, tbe.dev_size = (size, 0) if device.type == "cpu" else (0, size)
        if device.type == "cpu":
            tbe.weights_host = self.weights
        else:
            tbe.weights_dev = self.weights
            tbe.weights_uvm, tbe.uvm_size = self._managed, self._managed.numel()
        tbe.weight_initialized = True
        made: IntNBitTableBatchedEmbeddingBagsCodegen = tbe
        return made
