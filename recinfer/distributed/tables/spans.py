"""Parts of a table group: shapes of tables, spans of adjacent tables of one width, and sums of rows by FBGEMM's
lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from recinfer.modules.embedding_configs import PoolingType

__all__ = ["OUTPUT", "POOLING", "Span", "TableShape", "rows_of", "spans_of", "sums_of"]

# FBGEMM's numbers of pooling types and of the output's element types.
POOLING = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
OUTPUT = {torch.float32: 0, torch.float16: 1}


@dataclass(frozen=True)
class TableShape:
    """Shape of one table or local shard.

    Attributes:
        name: name for messages and state keys.
        rows, dim: size of the table; a piece may have no rows.
        num_features: number of its features, which are adjacent in the input.
    """

    name: str
    rows: int
    dim: int
    num_features: int = 1


@dataclass(frozen=True, eq=False)
class Span:
    """Adjacent tables of one dim: their rows form one matrix, and their features' columns are adjacent.

    Attributes:
        features, columns: features of the input, and columns of the output.
        elements, rows: ranges of its numbers and rows among those of all tables.
        row_starts: int64 ``[features]``, the first row of each feature's table in the matrix.
    """

    dim: int
    features: slice
    columns: slice
    elements: slice
    rows: slice
    row_starts: Tensor

    def matrix(self, flat: Tensor) -> Tensor:
        """The span's rows of a flat tensor of all rows: a view ``[rows, dim]``."""
        return flat[self.elements].view(-1, self.dim)


def spans_of(shapes: Sequence[TableShape], starts: Sequence[int], row_starts: Sequence[int]) -> list[Span]:
    """The spans of tables, whose numbers and rows begin at ``starts`` and ``row_starts``; the last of each is the end."""
    spans: list[Span] = []
    feature = column = 0
    for dim, members in groupby(range(len(shapes)), key=lambda t: shapes[t].dim):
        tables = list(members)
        first, stop = tables[0], tables[-1] + 1
        of_feature = [row_starts[t] - row_starts[first] for t in tables for _ in range(shapes[t].num_features)]
        features = slice(feature, feature + len(of_feature))
        columns = slice(column, column + len(of_feature) * dim)
        elements, rows = slice(starts[first], starts[stop]), slice(row_starts[first], row_starts[stop])
        spans.append(Span(dim, features, columns, elements, rows, torch.tensor(of_feature)))
        feature, column = features.stop, columns.stop
    return spans


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows]`` in float32. FBGEMM's lookup prefetches rows, which indexing does not."""
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
