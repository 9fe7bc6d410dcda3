"""The one seam to FBGEMM's table-batched embeddings (TBE): quantize rows, look packed rows up, register TBE modules.

No other file imports FBGEMM's TBE classes. The lookup calls the op itself on tables that lie anywhere in one uint8
buffer, so tables are never copied into a module's own storage: a memory-mapped archive serves as it is. FBGEMM's
``IntNBitTableBatchedEmbeddingBagsCodegen`` is built only for those who want the module (registration, inspection); it
shares the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.rows import QPARAM_BYTES, padded_dim, row_bytes
from recinfer.quant.threads import SplitLookup

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
        "FBGEMM is not installed; install recinfer with its extra 'cpu' (or 'cuda' on a GPU machine): "
        f"pip install 'recinfer[cpu]' ({error})"
    ) from error

__all__ = [
    "OUTPUT_DTYPES",
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "Memory",
    "TableBatch",
    "TableSlot",
    "embedding_location",
    "managed_bytes",
    "quantize_rows",
]

_SPARSE_TYPES = {
    DataType.FP32: SparseType.FP32,
    DataType.FP16: SparseType.FP16,
    DataType.INT8: SparseType.INT8,
    DataType.INT4: SparseType.INT4,
    DataType.INT2: SparseType.INT2,
}
_POOLING_MODES = {
    PoolingType.SUM: PoolingMode.SUM,
    PoolingType.MEAN: PoolingMode.MEAN,
    PoolingType.NONE: PoolingMode.NONE,
}
_OUTPUT_TYPES = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16, torch.bfloat16: SparseType.BF16}
OUTPUT_DTYPES = frozenset(_OUTPUT_TYPES)
"""What looked-up vectors may be."""


Memory = Literal["near", "managed", "cached"]
"""Where a table's rows are: in the device's own memory, in the host's, or in the host's behind a cache on the device."""


def embedding_location(memory: Memory, device: torch.device) -> EmbeddingLocation:
    """FBGEMM's word for rows that are in ``memory`` when ``device`` looks them up: HOST on anything but CUDA."""
    if device.type != "cuda":
        return EmbeddingLocation.HOST
    locations = {"managed": EmbeddingLocation.MANAGED, "cached": EmbeddingLocation.MANAGED_CACHING}
    return locations.get(memory, EmbeddingLocation.DEVICE)


def managed_bytes(size: int, device: torch.device) -> Tensor:
    """A zeroed uint8 buffer for ``"managed"`` tables: unified memory for a CUDA device, else plain host memory."""
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    like = torch.zeros(1, dtype=torch.uint8, device=device)
    return torch.ops.fbgemm.new_unified_tensor(like, [size], False).zero_()


def quantize_rows(weight_RD: Tensor, bits: int) -> Tensor:
    """FBGEMM's row-wise quantization with fp16 scale and bias moved before the codes, as the TBE op reads them.

    Args:
        weight_RD: finite float32 rows on CPU, contiguous.
        bits: 8, 4 or 2.

    Returns:
        uint8 [R, 4 + ceil(D * bits / 8)].
    """
    rows, dim = weight_RD.shape
    per_byte = 8 // bits
    payload = -(-dim // per_byte)
    if rows == 0:
        return torch.empty((0, QPARAM_BYTES + payload), dtype=torch.uint8)
    fill = -dim % (2 * per_byte)
    if fill:  # the op wants an even number of bytes; repeating a column changes neither minimum nor maximum
        weight_RD = torch.cat([weight_RD, weight_RD[:, :1].expand(rows, fill)], dim=1)
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight_RD, bits)
    out = torch.cat([fused[:, -QPARAM_BYTES:], fused[:, :payload]], dim=1)
    if dim % per_byte:
        out[:, -1] &= (1 << (bits * (dim % per_byte))) - 1
    return out


@dataclass(frozen=True)
class TableSlot:
    """Where one packed table (or one rectangle of it) lies in a buffer.

    Attributes:
        name: for messages and registration.
        rows, dim: its size; ``dim`` counts real columns, without padding.
        data_type: INT8, INT4, INT2, FP16 or FP32.
        offset: byte offset of its first row in its buffer.
        memory: ``"near"``: the batch's buffer; ``"managed"``: its second one, which a GPU reads over the bus;
            ``"cached"``: the second one behind a cache in GPU memory. On CPU the last two are the same.
    """

    name: str
    rows: int
    dim: int
    data_type: DataType
    offset: int
    memory: Memory = "near"


class TableBatch(nn.Module):
    """One FBGEMM call over packed tables of any precision and width that lie in one buffer.

    Args:
        slots: the tables.
        feature_slots: for every feature, in the order the ids come, the index of its slot; slots may repeat.
        pooling: SUM or MEAN for bags; NONE for one row per id (then all slots have one padded width).
        buffer: uint8, 1-D. Kept and read, never copied or written.
        row_alignment: 1 for CPU buffers, 16 for CUDA ones.
        output_dtype: float32, float16 or bfloat16.
        managed: uint8, 1-D: what holds the slots that are not ``"near"``.

    :attr:`knows_rows` says whether the op refuses ids beyond the tables' rows.

    Columns of INT4 and INT2 tables come out padded to whole bytes (``padded_dim``): the caller knows and drops them.
    """

    weights: Tensor

    def __init__(
        self,
        slots: Sequence[TableSlot],
        feature_slots: Sequence[int],
        pooling: PoolingType,
        buffer: Tensor,
        *,
        row_alignment: int = 1,
        output_dtype: torch.dtype = torch.float32,
        managed: Tensor | None = None,
    ) -> None:
        super().__init__()
        if output_dtype not in _OUTPUT_TYPES:
            raise ConfigError(f"output_dtype: got {output_dtype}; expected one of {sorted(map(str, OUTPUT_DTYPES))}")
        self.slots = tuple(slots)
        self.feature_slots = tuple(feature_slots)
        self.pooling = pooling
        self.row_alignment = row_alignment
        self.output_dtype = output_dtype
        self._through_cache: IntNBitTableBatchedEmbeddingBagsCodegen | None = None
        self._split: SplitLookup | None = None
        self.register_buffer("weights", buffer, persistent=False)
        device = buffer.device
        used = [self.slots[i] for i in self.feature_slots]
        widths = [padded_dim(slot.dim, slot.data_type) for slot in used]
        if pooling is PoolingType.NONE and len(set(widths)) > 1:
            raise ConfigError(f"unpooled tables of one batch must have one width; got {sorted(set(widths))}")
        column_offsets = [0, *accumulate(widths)]
        self._widths = widths
        self.total_dim = widths[0] if pooling is PoolingType.NONE and widths else column_offsets[-1]
        near = all(slot.memory == "near" for slot in used)
        if managed is None and not near:
            raise ConfigError("tables in managed memory were given without it; pass managed=")
        self._managed = managed if managed is not None else torch.empty(0, dtype=torch.uint8, device=device)
        widest = {t: max((w for s, w in zip(used, widths) if s.data_type is t), default=0) for t in _SPARSE_TYPES}

        def tensor(data: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(data, dtype=dtype, device=device)

        # The op's arguments, built once; a tuple because attribute look-ups through nn.Module cost more than the op's
        # own dispatch at batch 1.
        self._head: tuple[Any, ...] = (
            buffer,
            self._managed,
            tensor([embedding_location(s.memory, device).value for s in used], torch.int32),
            tensor([self._offset(s) for s in used], torch.int64),
            tensor([_SPARSE_TYPES[s.data_type].as_int() for s in used], torch.uint8),
            tensor(column_offsets, torch.int32),
            column_offsets[-1],
            widest[DataType.INT2],
            widest[DataType.INT4],
            widest[DataType.INT8],
            widest[DataType.FP16],
            widest[DataType.FP32],
        )
        ends = [s.offset + s.rows * row_bytes(s.dim, s.data_type, row_alignment) for s in used if s.memory == "near"]
        end = max(ends, default=0)
        # Without the slack behind the last row, which the op would take for more rows.
        self._bounded = (buffer[:end], *self._head[1:]) if device.type == "cpu" else self._head
        self.knows_rows = device.type == "cpu" and near and self._knows_rows(used, end)
        self._pooling_mode = int(_POOLING_MODES[pooling])
        self._tail = (_OUTPUT_TYPES[output_dtype].as_int(), None, None, row_alignment, 0, -1, -1)
        self._op = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
        self._fbgemm_modules: dict[tuple[int, ...], IntNBitTableBatchedEmbeddingBagsCodegen] = {}
        if device.type == "cuda" and any(slot.memory == "cached" for slot in used):
            self._through_cache = self.fbgemm_module()  # which keeps the cache's state and fills it before each lookup

    def _offset(self, slot: TableSlot) -> int:
        """Byte offset for the op. On CPU it takes one buffer, so the second one's tables lie at a distance from it.

        Giving it both would not do: it takes the bytes between the offsets of two features' tables for the first one's
        rows, in whichever buffers they are, and refuses ids beyond. A distance is larger than any table, or negative,
        which the op reads as unsigned.
        """
        if slot.memory == "near" or self.weights.device.type != "cpu":
            return slot.offset
        return slot.offset + self._managed.data_ptr() - self.weights.data_ptr()

    def _knows_rows(self, used: Sequence[TableSlot], size: int) -> bool:
        """Whether the op refuses every id beyond each table's rows.

        It is not told the rows: it takes the bytes up to the next feature's table (or the end of the buffer) for the
        table's. So tables must follow one another in the order of the features, with less than a row between them. It
        lets -1 through in any case: the id of a row pruned away.
        """
        ends = [slot.offset for slot in used[1:]] + [size]
        for t in reversed(range(len(used) - 1)):
            if used[t].offset == used[t + 1].offset:
                ends[t] = ends[t + 1]  # several features of one table
        return all(
            (end - slot.offset) // row_bytes(slot.dim, slot.data_type, self.row_alignment) == slot.rows
            for slot, end in zip(used, ends)
        )

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up ``indices`` [N] (int32 or int64), bags bounded by ``offsets`` [features x B + 1], feature-major.

        With :attr:`knows_rows` ids beyond the rows raise RuntimeError, -1 is skipped; else nothing is checked here.

        Returns:
            [B, total padded columns], or [N, padded width] when unpooled.
        """
        if self._through_cache is not None:
            return self._through_cache(indices, offsets, per_sample_weights)
        if self._split is not None and self._split.wants(indices):
            return self._split(self._alone, indices, offsets, per_sample_weights)
        return self._alone(indices, offsets, per_sample_weights)

    def _alone(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        return self._op(*self._bounded, indices, offsets, self._pooling_mode, per_sample_weights, *self._tail)

    def use_threads(self, threads: int) -> None:
        """Let large pooled lookups on CPU run on up to ``threads`` threads, where that turns out faster; 1: never."""
        on_host = self.weights.device.type == "cpu" and self.pooling is not PoolingType.NONE
        self._split = None
        if threads > 1 and on_host and len(self.feature_slots) > 1:
            self._split = SplitLookup(threads, self._widths, self._part, self.output_dtype)

    def _part(self, first: int, last: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """The op over features ``first:last`` alone; it takes all ids and the offsets of its bags."""
        buffer, managed, locations, starts, types, columns, *_ = self._bounded
        if self.knows_rows and last < len(self.feature_slots):
            # Up to the next table, which the op would else not know of.
            ahead = [int(start) for start in starts[last:] if start > starts[last - 1]]
            buffer = buffer[: min(ahead, default=buffer.numel())]
        mine = columns[first : last + 1] - columns[first]
        head: tuple[Any, ...] = (
            buffer,
            managed,
            locations[first:last],
            starts[first:last],
            types[first:last],
            mine,
            int(mine[-1]),
            *self._bounded[7:],
        )

        def run(indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
            return self._op(*head, indices, offsets, self._pooling_mode, weights, *self._tail)

        return run

    def traced(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """:meth:`forward` for torch.export, on the registered buffer itself: an exported program saves it once."""
        return self._op(*self._head, indices, offsets, self._pooling_mode, per_sample_weights, *self._tail)

    @property
    def is_cached(self) -> bool:
        """Whether lookups run through :meth:`fbgemm_module` of all slots, which keeps a cache of rows on the device."""
        return self._through_cache is not None

    def forget_cached(self) -> None:
        """Rows of ``"cached"`` slots were written: the cache reads them anew."""
        if self._through_cache is not None:
            self._through_cache.reset_cache_states()

    def fbgemm_module(self, slots: Sequence[int] | None = None) -> IntNBitTableBatchedEmbeddingBagsCodegen:
        """FBGEMM's own TBE module over the same bytes (built at the first call), for registration and inspection.

        Args:
            slots: numbers of the slots that it has; None: all. Its features are the batch's that read them, in order.
        """
        chosen = tuple(range(len(self.slots)) if slots is None else slots)
        if chosen not in self._fbgemm_modules:
            device = self.weights.device
            own = [self.slots[i] for i in chosen]
            tbe: Any = IntNBitTableBatchedEmbeddingBagsCodegen(
                embedding_specs=[
                    (
                        s.name,
                        s.rows,
                        padded_dim(s.dim, s.data_type),
                        _SPARSE_TYPES[s.data_type],
                        embedding_location(s.memory, device),
                    )
                    for s in own
                ],
                feature_table_map=[chosen.index(i) for i in self.feature_slots if i in chosen],
                pooling_mode=_POOLING_MODES[self.pooling],
                device=device,
                bounds_check_mode=BoundsCheckMode.NONE,
                output_dtype=_OUTPUT_TYPES[self.output_dtype],
                row_alignment=self.row_alignment,
            )
            tbe.weights_physical_offsets = [self._offset(s) for s in own]
            tbe.initialize_logical_weights_placements_and_offsets()
            size = self.weights.numel()
            tbe.host_size, tbe.dev_size = (size, 0) if device.type == "cpu" else (0, size)
            if device.type == "cpu":
                tbe.weights_host = self.weights
            else:
                tbe.weights_dev = self.weights
                tbe.weights_uvm, tbe.uvm_size = self._managed, self._managed.numel()
            tbe.weight_initialized = True
            self._fbgemm_modules[chosen] = tbe  # in a dict, so not a submodule: its buffers are ours
        return self._fbgemm_modules[chosen]
