"""Variable batch sizes for kernels that need equal ones: pads features with empty bags and drops their vectors.

Shapes: ``T`` features, ``D`` columns of all features together. ``batch_sizes[f][r]`` are the bags of feature ``f`` that
come from rank ``r``; a feature's bags lie rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["padded_offsets", "rank_major"]


def padded_offsets(offsets: Tensor, batch_sizes: Sequence[Sequence[int]]) -> Tensor:
    """Offsets of the given bags -> offsets of ``T * most bags`` bags, the added ones empty."""
    sizes = torch.tensor([sum(of_feature) for of_feature in batch_sizes], dtype=torch.int64).unsqueeze(1)
    most = int(sizes.max()) if sizes.numel() else 0
    starts = sizes.cumsum(0) - sizes
    within = torch.arange(most).unsqueeze(0).minimum(sizes)
    places = (starts + within).reshape(-1).to(offsets.device)
    return torch.cat([offsets[places], offsets[-1:]])


def rank_major(out: Tensor, batch_sizes: Sequence[Sequence[int]], dims: Sequence[int]) -> Tensor:
    """``[most bags, D]`` of padded features -> one dimension: rank by rank, and in it feature by feature, without pads."""
    result: Tensor = _RankMajor.apply(out, _pieces(batch_sizes, dims))
    return result


class _RankMajor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, pieces: list[tuple[slice, slice]]) -> Tensor:
        ctx.shape, ctx.pieces = out.shape, pieces
        parts = [out[rows, columns].reshape(-1) for rows, columns in pieces]
        return torch.cat(parts) if parts else out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        full, at = grad.new_zeros(ctx.shape), 0
        for rows, columns in ctx.pieces:
            target = full[rows, columns]
            target.copy_(grad[at : at + target.numel()].view(target.shape))
            at += target.numel()
        return full, None


def _pieces(batch_sizes: Sequence[Sequence[int]], dims: Sequence[int]) -> list[tuple[slice, slice]]:
    columns = [0, *accumulate(dims)]
    rows = [[0, *accumulate(sizes)] for sizes in batch_sizes]
    ranks = range(len(batch_sizes[0]) if batch_sizes else 0)
    return [
        (slice(rows[f][r], rows[f][r + 1]), slice(columns[f], columns[f + 1])) for r in ranks for f in range(len(dims))
    ]
