"""What a group of tables is made of: their shapes, blocks of neighbours of one width, and sums of rows by FBGEMM's lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recinfer.modules.embedding_configs import PoolingType

if TYPE_CHECKING:
    from recinfer.distributed.table_group import TableGroup

__all__ = ["OUTPUT", "POOLING", "Block", "TableShape", "rows_of", "sums_of"]

# FBGEMM's numbers for how bags are pooled and for the element type of the output.
POOLING = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
OUTPUT = {torch.float32: 0, torch.float16: 1}


@dataclass(frozen=True)
class TableShape:
    """One table (or the piece of it that lies here).

    Attributes:
        name: for messages and state keys.
        rows, dim: its size; a piece may have no rows.
        num_features: features that look it up; they stand next to each other in the input.
    """

    name: str
    rows: int
    dim: int
    num_features: int = 1


class Block:
    """Neighbouring tables of one dim: their rows are one matrix, their features' columns lie next to each other."""

    def __init__(self, group: TableGroup, tables: range, first_feature: int, first_column: int) -> None:
        shapes = [group.shapes[t] for t in tables]
        self.tables = tables
        self.dim = shapes[0].dim
        self.num_features = sum(s.num_features for s in shapes)
        self.features = slice(first_feature, first_feature + self.num_features)
        self.columns = slice(first_column, first_column + self.num_features * self.dim)
        self.elements = slice(group._starts[tables[0]], group._starts[tables[-1] + 1])
        self.rows = slice(group._row_starts[tables[0]], group._row_starts[tables[-1] + 1])
        first = group._row_starts[tables[0]]
        starts = [group._row_starts[t] - first for t in tables for _ in range(group.shapes[t].num_features)]
        self.row_starts = torch.tensor(starts)

    def matrix(self, flat: Tensor) -> Tensor:
        """The block's rows of a flat tensor of all rows: a view ``[rows, dim]``."""
        return flat[self.elements].view(-1, self.dim)


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows]`` in float32. FBGEMM's lookup asks for rows ahead of reading them; indexing waits for each one."""
    if table.dim() == 1:
        return table.index_select(0, rows)
    return sums_of(table, rows, torch.arange(rows.numel() + 1), None)


def sums_of(matrix: Tensor, rows: Tensor, bounds: Tensor, scales: Tensor | None) -> Tensor:
    """Sums of rows of ``matrix``, each over one range of ``bounds``: FBGEMM's lookup, with the matrix as its table."""
    out: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
        matrix.reshape(-1),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([0, matrix.shape[1]], dtype=torch.int32),
        matrix.shape[1],
        torch.tensor([0, matrix.shape[0]]),
        rows,
        bounds,
        POOLING[PoolingType.SUM],
        scales,
        OUTPUT[torch.float32],
    )
    return out
