"""Arithmetic on the lengths and offsets of jagged data; plain torch without loops over rows.

Shapes: ``F`` keys (features), ``B`` batch (stride), ``N`` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = [
    "batched_lengths_to_offsets",
    "gather_segments",
    "lengths_to_offsets",
    "offsets_to_lengths",
    "offsets_to_rows",
    "prefix_sums",
    "segment_sums",
]


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """``lengths[n]`` to ``offsets[n + 1]`` of the same dtype, starting at 0."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """``offsets[n + 1]`` to ``lengths[n]`` of the same dtype."""
    return offsets[1:] - offsets[:-1]


def batched_lengths_to_offsets(lengths_FB: Tensor) -> Tensor:
    """``lengths[F, B]`` to ``offsets[F, B + 1]``; each row starts at 0 again."""
    return torch.nn.functional.pad(lengths_FB.cumsum(1, dtype=lengths_FB.dtype), (1, 0))


def offsets_to_rows(offsets: Tensor, num_values: int) -> Tensor:
    """``offsets[n + 1]`` to ``int64[num_values]``: the row of each value; in operators that ONNX has too."""
    ends = offsets[1:].long()
    ended = torch.zeros(num_values + 1, dtype=torch.int64, device=offsets.device)
    return ended.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:num_values]


def prefix_sums(sizes: Sequence[int]) -> list[int]:
    """``[a, b, c]`` to ``[0, a, a + b, a + b + c]``."""
    return list(accumulate(sizes, initial=0))


def segment_sums(lengths: Tensor, strides: Sequence[int]) -> list[int]:
    """Number of values of each of ``F`` keys: sums of ``lengths`` over runs of ``strides[f]`` entries.

    Waits for the device when ``lengths`` is not on the CPU (one copy of ``F`` numbers).
    """
    if not strides:
        return []
    first = strides[0]
    if all(s == first for s in strides):
        if first == 0:
            return [0] * len(strides)
        return lengths.view(len(strides), first).sum(1).tolist()
    ends = torch.tensor(prefix_sums(strides), device=lengths.device)
    sums = lengths_to_offsets(lengths.long())[ends]
    return (sums[1:] - sums[:-1]).tolist()


def gather_segments(tensor: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Split ``tensor`` along dim 0 into runs of ``sizes`` and concatenate the runs ``order`` (a copy)."""
    runs = tensor.split(list(sizes))
    if not order:
        return tensor[:0]
    return torch.cat([runs[i] for i in order])
