"""Lookups by recinfer's compiled loop, for tables of which FBGEMM lacks the rows of some.

Shape suffixes: B batch, D output columns, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant._tables import sum_bags
from recinfer.quant.buffers import Buffers, Placed
from recinfer.quant.formats.registry import row_format
from recinfer.quant.rows import OUTPUT_DTYPES

__all__ = ["CompiledBatch"]

_PIECE = 6  # numbers that describe a table to the loop


def _sum_bags(
    buffer: Tensor,
    pieces: NDArray[np.int64],
    steps: NDArray[np.int64],
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    out_BD: Tensor,
) -> None:
    """Look up into the columns of ``out_BD``, float32, that the steps name; raise RuntimeError for an id out of range."""
    ends = None if offsets is None else offsets.contiguous().numpy()
    of_ids = None if weights is None else weights.detach().float().contiguous().numpy()
    batch, columns = out_BD.shape
    if not sum_bags(
        buffer.numpy(), pieces, steps, ids.contiguous().numpy(), ends, of_ids, batch, columns, out_BD.numpy()
    ):
        raise RuntimeError("ids: one is beyond the rows of its table, or offsets are not in order")


@torch.library.custom_op("recinfer::look_up_rows", mutates_args=(), device_types="cpu")
def _look_up_rows(
    buffer: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    pieces: Sequence[int],
    columns: int,
    pooled: bool,
) -> Tensor:
    """The loop as an operator, which an exported program names: ``[B, columns]`` of all features, or ``[N, columns]``."""
    tables = np.array(pieces, np.int64).reshape(-1, _PIECE)
    features = len(tables)
    if pooled:
        batch = (offsets.numel() - 1) // features
        out_BD = torch.empty(batch, columns)
        _sum_bags(buffer, tables, _steps(tables[:, 3].tolist()), ids, offsets, weights, out_BD)
        return out_BD
    edges = offsets[:: (offsets.numel() - 1) // features].tolist()
    return _rows(buffer, tables, ids, edges, columns)


@_look_up_rows.register_fake
def _(
    buffer: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    pieces: Sequence[int],
    columns: int,
    pooled: bool,
) -> Tensor:
    rows = (offsets.numel() - 1) // (len(pieces) // _PIECE) if pooled else ids.numel()
    return buffer.new_empty((rows, columns), dtype=torch.float32)


def _steps(widths: Sequence[int]) -> NDArray[np.int64]:
    """The steps of ``recinfer.quant._tables.pool`` for tables of these columns: key, table and first column of each."""
    starts = [0, *accumulate(widths)][:-1]
    return np.array([(i, i, start) for i, start in enumerate(starts)], np.int64).reshape(-1, 3)


def _rows(buffer: Tensor, tables: NDArray[np.int64], ids: Tensor, edges: Sequence[int], columns: int) -> Tensor:
    """``[N, columns]``: the rows of each table's own ids, one after another."""
    out_ND = torch.empty(ids.numel(), columns)
    only = np.zeros((1, 3), np.int64)
    for number, (start, end) in enumerate(pairwise(edges)):
        _sum_bags(buffer, tables[number : number + 1], only, ids[start:end], None, None, out_ND[start:end])
    return out_ND


class CompiledBatch(nn.Module):
    """Lookups of packed tables of any format on the CPU by the compiled loop; see
    :class:`recinfer.quant.tbe.TableBatch`, whose arguments and attributes these are.

    Columns are not padded, and the loop checks every id itself.
    """

    averages = False
    counts_ids = False
    knows_rows = True
    real_columns: Tensor | None = None
    weights: Tensor

    def __init__(
        self,
        reads: Sequence[Placed],
        pooling: PoolingType,
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if output_dtype not in OUTPUT_DTYPES:
            raise ConfigError(f"output_dtype: got {output_dtype}; expected one of {sorted(map(str, OUTPUT_DTYPES))}")
        self.reads, self.tables = tuple(reads), tuple(dict.fromkeys(reads))
        self.pooling, self.storage, self.output_dtype = pooling, buffers, output_dtype
        self.register_buffer("weights", buffers.near, persistent=False)
        self.widths = [read.rect.cols for read in self.reads]
        unpooled = pooling is PoolingType.NONE
        if unpooled and len(set(self.widths)) > 1:
            raise ConfigError(f"unpooled tables of one batch must have one width; got {sorted(set(self.widths))}")
        self.total_dim = self.widths[0] if unpooled and self.widths else sum(self.widths)
        self._pieces = np.array([self._piece(read) for read in self.reads], np.int64).reshape(-1, _PIECE)
        self._steps = _steps(self.widths)

    def _piece(self, read: Placed) -> tuple[int, ...]:
        size, mean = read.row_bytes(self.storage.row_alignment), int(self.pooling is PoolingType.MEAN)
        return read.offset, read.rect.rows, size, read.rect.cols, row_format(read.data_type).code, mean

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up, like ``TableBatch.forward``; ids beyond the rows raise RuntimeError, and -1 is skipped."""
        if self.pooling is PoolingType.NONE:
            edges = offsets[:: (offsets.numel() - 1) // len(self.reads)].tolist()
            return torch.cat(self.rows_per_read(indices, offsets, edges))
        out_BD = torch.empty((offsets.numel() - 1) // len(self.reads), self.total_dim)
        _sum_bags(self.weights, self._pieces, self._steps, indices, offsets, per_sample_weights, out_BD)
        return out_BD.to(self.output_dtype)

    def rows_per_read(
        self, indices: Tensor, offsets: Tensor, edges: Sequence[int], *, traced: bool = False
    ) -> list[Tensor]:
        """See ``TableBatch.rows_per_read``."""
        if traced:
            rows = self.traced(indices, offsets)
        else:
            rows = _rows(self.weights, self._pieces, indices, edges, self.total_dim).to(self.output_dtype)
        return [rows[edges[i] : edges[i + 1]] for i in range(len(self.reads))]

    def traced(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """:meth:`forward` for torch.export, on the registered buffer itself. A program that loads the export imports this
        module first, which registers the operator."""
        pieces, pooled = self._pieces.reshape(-1).tolist(), self.pooling is not PoolingType.NONE
        found = torch.ops.recinfer.look_up_rows(
            self.weights, indices, offsets, per_sample_weights, pieces, self.total_dim, pooled
        )
        return found.to(self.output_dtype)

    def without_padding(self, out_BD: Tensor) -> Tensor:
        """Returns ``out_BD``, which has no padding."""
        return out_BD

    def forget_cached(self) -> None:
        """No effect: nothing is cached."""

    def fbgemm_module(self) -> NoReturn:
        """Raises UnavailableError: FBGEMM lacks some of the rows."""
        lacking = sorted({read.data_type.value for read in self.reads if row_format(read.data_type).fbgemm is None})
        raise UnavailableError(
            f"FBGEMM has no TBE module for {', '.join(lacking)} rows; quantize the tables to another precision"
        )
