"""Buffers of packed rows, and the position of each rectangle in them.

:class:`Placed` describes packed rows in a buffer: a shard, whole columns of a table, or a table of a kernel call.

Shape suffixes: R rows, P packed bytes.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from recinfer import fbgemm
from recinfer.errors import UnavailableError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType
from recinfer.quant.rows import row_bytes

__all__ = ["SLACK_BYTES", "Buffers", "Memory", "Placed", "allocate", "row_alignment_for", "whole_table"]

_TABLE_ALIGNMENT = 128  # bytes; as FBGEMM lays tables out, so that no two share a cache line
SLACK_BYTES = 64
"""Padding after the last table, in bytes: vectorised kernels may read past a row's end."""
_COPY_BYTES = 64 << 20
_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable

Memory = Literal["near", "managed", "cached"]
"""Memory of a table's rows: the device's, the host's, or the host's with a cache on the device."""


def row_alignment_for(device: torch.device) -> int:
    """Row alignment FBGEMM needs: 1 on CPU (smaller and faster), 16 on a GPU."""
    return 1 if device.type in ("cpu", "meta") else 16


@dataclass(frozen=True, slots=True)
class Placed:
    """The packed rows of a rectangle: consecutive from byte ``offset`` of a buffer.

    Attributes:
        rect: the table and its rows and columns.
        data_type: one of ``recinfer.quant.rows.PACKED_TYPES``.
        offset: byte offset of its first row.
        memory: ``"near"``: the first of two :class:`Buffers`; ``"managed"``: the second, which a GPU reads over the bus;
            ``"cached"``: the second, behind a cache in GPU memory. Without a second one all is in the first.
    """

    rect: Rect
    data_type: DataType
    offset: int = 0
    memory: Memory = "near"

    def row_bytes(self, row_alignment: int = 1) -> int:
        """Bytes of a row."""
        return row_bytes(self.rect.cols, self.data_type, row_alignment)

    def bytes(self, row_alignment: int = 1) -> int:
        """Bytes of all rows."""
        return self.rect.rows * self.row_bytes(row_alignment)


def whole_table(config: BaseEmbeddingConfig) -> Placed:
    """A whole table on rank 0, not yet placed in a buffer."""
    return Placed(Rect(0, 0, config.num_embeddings, 0, config.embedding_dim, config.name), config.data_type)


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers that hold packed rows.

    Attributes:
        near: uint8, 1-D, on the device that looks rows up.
        managed: the same for rectangles that are not ``"near"``; None: ``near`` has those too.
        row_alignment: rows are zero-padded to a multiple of this many bytes.
    """

    near: Tensor
    managed: Tensor | None = None
    row_alignment: int = 1
    _writes: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles: a GPU cannot read a copy of host memory that is not page-locked too."""
        return _copied, (self.near, self.managed, self.row_alignment)

    @property
    def writes(self) -> int:
        """Number of :meth:`write` calls so far, by which a cache knows that its rows may be stale."""
        return self._writes[0]

    @property
    def device(self) -> torch.device:
        """Device that looks the rows up."""
        return self.near.device

    def memory_of(self, placed: Placed) -> Memory:
        """The buffer that a rectangle is in."""
        return placed.memory if self.managed is not None else "near"

    def rows(self, placed: Placed) -> Tensor:
        """The rows of ``table``, uint8 ``[R, P]``, a view."""
        buffer = self.near if self.managed is None or placed.memory == "near" else self.managed
        span = buffer[placed.offset : placed.offset + placed.bytes(self.row_alignment)]
        return span.view(placed.rect.rows, placed.row_bytes(self.row_alignment))

    def write(self, placed: Placed, packed_RP: Tensor) -> None:
        """Write the rows of a rectangle. ``packed_RP`` may have other padding and be on another device."""
        rows, need = self.rows(placed), placed.row_bytes()
        # A copy between rows of two widths passes through memory of its size on the device.
        step = max(1, _COPY_BYTES // rows.shape[1])
        for at in range(0, len(rows), step):
            rows[at : at + step, :need].copy_(packed_RP[at : at + step, :need])
        self._writes[0] += 1  # after the rows: a cache that is filled meanwhile is emptied


def allocate(
    tables: Sequence[Placed], device: torch.device, row_alignment: int | None = None
) -> tuple[Buffers, list[Placed]]:
    """Zeroed buffers with ``tables`` placed in order.

    Args:
        tables: what to hold; their offsets are not read.
        row_alignment: None: the device's requirement.
    """
    alignment = row_alignment or row_alignment_for(device)
    placed: list[Placed] = []
    sizes = {True: 0, False: 0}
    for table in tables:
        near = table.memory == "near" or device.type != "cuda"
        placed.append(replace(table, offset=sizes[near]))
        # Less than a row between tables, so that the op can tell where each ends (TableBatch.knows_rows).
        unit = _TABLE_ALIGNMENT
        while alignment == 1 and unit > table.row_bytes():
            unit //= 2
        sizes[near] += -(-table.bytes(alignment) // unit) * unit
    near_bytes = torch.zeros(sizes[True] + SLACK_BYTES, dtype=torch.uint8, device=device)
    return Buffers(near_bytes, _managed(sizes[False], device) if sizes[False] else None, alignment), placed


def _managed(size: int, device: torch.device) -> Tensor:
    """Zeroed host memory that the GPU can read: FBGEMM's managed memory, or page-locked without its CUDA build."""
    if not fbgemm.HAS_CUDA:
        return _page_locked(size + SLACK_BYTES)
    like = torch.zeros(1, dtype=torch.uint8, device=device)
    return torch.ops.fbgemm.new_unified_tensor(like, [size + SLACK_BYTES], False).zero_()


def _copied(near: Tensor, managed: Tensor | None, row_alignment: int) -> Buffers:
    """Buffers of copied tensors."""
    if managed is not None and near.is_cuda and managed.device.type == "cpu":
        managed = _page_locked(managed.numel()).copy_(managed)
    return Buffers(near, managed, row_alignment)


def _page_locked(size: int) -> Tensor:
    """Zeroed page-locked memory of just this size: torch's allocator rounds up to a power of two, and keeps what is freed.

    Raises:
        UnavailableError: CUDA refuses it.
    """
    memory = mmap.mmap(-1, size)
    rows, cuda = torch.frombuffer(memory, dtype=torch.uint8), torch.cuda.cudart()
    code = int(cuda.cudaHostRegister(rows.data_ptr(), size, _FOR_ALL_GPUS))
    if code:
        raise UnavailableError(
            f"CUDA refuses to page-lock {size} bytes of host memory for tables that stay there (error {code}); give the "
            "process more memory, or plan fewer tables with quant_uvm and quant_uvm_caching"
        )
    # At the end of the process CUDA unlocks it itself.
    weakref.finalize(memory, cuda.cudaHostUnregister, rows.data_ptr()).atexit = False
    return rows
