"""First values of sharded tables: the given module's, or drawn so that they do not depend on the sharding.

A table without values is drawn block by block of whole rows, each block from a generator of its own, so a rectangle's
values are the same whatever the other rectangles are: ranks that start from one seed hold the same table however it is
cut. (With ``init_fn`` each shard is filled by itself; what that gives is up to the function.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from recinfer.distributed.embedding_sharding import EmbeddingShardingInfo
from recinfer.distributed.sharding.layout import Piece
from recinfer.modules.embedding_configs import BaseEmbeddingConfig

__all__ = ["fill", "new_seed"]

_BLOCK_ELEMENTS = 1 << 20
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring numbers over the whole range


def new_seed() -> int:
    """A seed from torch's default generator; ranks that were seeded alike get the same one."""
    return int(torch.randint(1 << 62, ()))


@torch.no_grad()
def fill(weight: Tensor, info: EmbeddingShardingInfo, piece: Piece, seed: int) -> None:
    """Give a rectangle its first values.

    Args:
        weight: ``[piece.rows, piece.cols]``, written.
        info: the table; its ``param`` holds the values ``[rows, columns]``, or is on the meta device.
        piece: which rectangle.
        seed: of the values that are drawn.
    """
    if weight.is_meta:
        return
    if not info.param.is_meta:
        weight.copy_(info.param[piece.row_start : piece.row_stop, piece.col_start : piece.col_stop])
    elif info.embedding_config.init_fn is not None:
        info.embedding_config.init_fn(weight)
    else:
        _draw(weight, info.embedding_config, piece, seed)


def _draw(weight: Tensor, config: BaseEmbeddingConfig, piece: Piece, seed: int) -> None:
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    height = max(1, _BLOCK_ELEMENTS // config.embedding_dim)
    generator = torch.Generator()
    first = piece.row_start - piece.row_start % height
    for start in range(first, piece.row_stop, height):
        number = (seed + (piece.table << 32) + start // height + 1) * _MIX
        generator.manual_seed((number ^ (number >> 31)) % (1 << 63))
        rows = min(height, config.num_embeddings - start)
        block = torch.empty(rows, config.embedding_dim).uniform_(low, high, generator=generator)
        top, bottom = max(start, piece.row_start), min(start + rows, piece.row_stop)
        weight[top - piece.row_start : bottom - piece.row_start].copy_(
            block[top - start : bottom - start, piece.col_start : piece.col_stop]
        )
