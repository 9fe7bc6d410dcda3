"""Sharding plans for tests: any table cut by rows or columns over any ranks."""

from __future__ import annotations

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from recinfer.distributed.types import ParameterSharding
from recinfer.modules.embedding_configs import BaseEmbeddingConfig


def cut(total: int, parts: int) -> list[tuple[int, int]]:
    """(start, size) of uneven pieces; the last may be small, none is empty."""
    parts = min(parts, total)
    size = -(-total // parts)
    spans = [(start, min(size, total - start)) for start in range(0, total, size)]
    return spans


def sharding(
    config: BaseEmbeddingConfig, kind: str, ranks: list[int], device: str = "cpu", unit: int = 1
) -> ParameterSharding:
    """``kind`` is table_wise, row_wise, column_wise or grid (rows x columns over the ranks)."""
    rows, cols = config.num_embeddings, config.embedding_dim
    if kind == "table_wise":
        rects = [(0, 0, rows, cols)]
    elif kind == "row_wise":
        rects = [(start, 0, size, cols) for start, size in cut(rows, len(ranks))]
    elif kind == "column_wise":
        rects = [
            (0, start * unit, rows, min(size * unit, cols - start * unit))
            for start, size in cut(-(-cols // unit), len(ranks))
        ]
    else:
        columns = [(c * unit, min(cs * unit, cols - c * unit)) for c, cs in cut(-(-cols // unit), 2)]
        rects = [(r, c, rs, cs) for r, rs in cut(rows, 2) for c, cs in columns]
    spec = EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[r, c],
                shard_sizes=[rs, cs],
                placement=f"rank:{ranks[i % len(ranks)]}/{device}"
                + (f":{ranks[i % len(ranks)]}" if device == "cuda" else ""),
            )
            for i, (r, c, rs, cs) in enumerate(rects)
        ]
    )
    types = {"grid": "grid_shard"}
    return ParameterSharding(types.get(kind, kind), "quant", [ranks[i % len(ranks)] for i in range(len(rects))], spec)
