"""Initial values of sharded tables: the given module's, or random values that do not depend on the sharding.

Blocks of whole rows are initialised by separate random generators, so the values of a rectangle do not depend on other
rectangles: ranks with the same seed get the same table for any sharding. (With ``init_fn`` each shard is initialised
separately by that function.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from recinfer.distributed.types.shardings import EmbeddingShardingInfo
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import BaseEmbeddingConfig

__all__ = ["fill", "fill_anew", "new_seed"]

_BLOCK_ELEMENTS = 1 << 20
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring numbers over the whole range


def new_seed() -> int:
    """A seed from torch's default generator; ranks with the same seed get the same one."""
    return int(torch.randint(1 << 62, ()))


@torch.no_grad()
def fill(weight: Tensor, info: EmbeddingShardingInfo, rect: Rect, seed: int) -> None:
    """Initialise a rectangle.

    Args:
        weight: ``[rect.rows, rect.cols]``, written.
        info: the table; its ``param`` holds the values ``[rows, columns]``, or is on the meta device.
        rect: the rectangle.
        seed: seed of random values, different for each table.
    """
    if weight.is_meta:
        return
    if not info.param.is_meta:
        weight.copy_(info.param[rect.row_start : rect.row_stop, rect.col_start : rect.col_stop])
    elif info.embedding_config.init_fn is not None:
        info.embedding_config.init_fn(weight)
    else:
        _draw(weight, info.embedding_config, rect, seed)


@torch.no_grad()
def fill_anew(rows: Tensor, config: BaseEmbeddingConfig) -> None:
    """Fill ``rows`` ``[n, columns]`` with a table's initial values, from torch's default generator."""
    if config.init_fn is None:
        rows.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
    else:
        config.init_fn(rows)


def _draw(weight: Tensor, config: BaseEmbeddingConfig, rect: Rect, seed: int) -> None:
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    height = max(1, _BLOCK_ELEMENTS // config.embedding_dim)
    generator = torch.Generator()
    first = rect.row_start - rect.row_start % height
    for start in range(first, rect.row_stop, height):
        number = (seed + start // height + 1) * _MIX
        generator.manual_seed((number ^ (number >> 31)) % (1 << 63))
        rows = min(height, config.num_embeddings - start)
        block = torch.empty(rows, config.embedding_dim).uniform_(low, high, generator=generator)
        top, bottom = max(start, rect.row_start), min(start + rows, rect.row_stop)
        weight[top - rect.row_start : bottom - rect.row_start].copy_(
            block[top - start : bottom - start, rect.col_start : rect.col_stop]
        )
