"""Splits a KeyedJaggedTensor for other ranks and joins the received pieces.

Shapes: ``F`` keys a rank receives, ``W`` ranks that sent. Received tensors are rank-major (rank, key, example); a
KeyedJaggedTensor is key-major (key, rank, example); ``recat`` is the permutation of the (rank, key) pieces between the
two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from recinfer.sparse.checks import require
from recinfer.sparse.keyed_parts import KeyedParts
from recinfer.sparse.offsets import gather_segments, prefix_sums, segment_sums

__all__ = ["Received", "received", "splits", "tensors"]


def _sum_runs(numbers: list[int], runs: list[int]) -> list[int]:
    ends = prefix_sums(runs)
    return [sum(numbers[start:stop]) for start, stop in pairwise(ends)]


def splits(kjt: KeyedParts, key_splits: list[int]) -> list[list[int]]:
    """For each tensor of :func:`tensors`, how many entries go to each rank (``key_splits[r]`` keys to rank ``r``)."""
    values = _sum_runs(kjt.length_per_key(), key_splits)
    result = [_sum_runs(kjt.stride_per_key(), key_splits), values]
    if kjt.variable_stride_per_key():
        result.append(list(key_splits))
    if kjt.weights_or_none() is not None:
        result.append(list(values))
    return result


def tensors(kjt: KeyedParts) -> list[Tensor]:
    """Lengths, values, batch size of each key (variable batch only), weights (if any)."""
    result = [kjt.lengths(), kjt.values()]
    if kjt.variable_stride_per_key():
        strides = kjt.stride_per_key()[: len(kjt.keys())]  # empty_like has batch sizes and no keys
        result.append(torch.tensor(strides, dtype=torch.int64, device=kjt.device()))
    weights = kjt.weights_or_none()
    if weights is not None:
        result.append(weights)
    return result


@dataclass
class Received:
    """The parts of a KeyedJaggedTensor, key-major."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    stride: int | None
    strides: list[list[int]] | None


def received(
    num_keys: int,
    tensors: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int = 1,
) -> Received:
    """Rearrange the tensors received from ``W`` ranks (each concatenated over ranks) into key-major order.

    Args:
        num_keys: ``F``.
        tensors: lengths, values, strides ``[W * F]`` (variable batch only), weights (if any).
        variable_stride_per_key: whether strides were sent.
        num_workers: ``W``.
        recat: order of the pieces; None if they are in order already. One entry a (rank, key) piece; with unequal
            ``stride_per_rank``, one entry a length.
        stride_per_rank: batch size of each rank, for a fixed batch.
        stagger: number of groups of ranks (hosts) that the recat interleaves; used for variable strides only.

    Raises:
        InputError: a number of tensors that does not fit, or no ``stride_per_rank`` for a fixed batch.
    """
    least = 3 if variable_stride_per_key else 2
    require(
        least <= len(tensors) <= least + 1,
        f"KeyedJaggedTensor.dist_init: got {len(tensors)} tensors; expected {least}, or {least + 1} with weights",
    )
    lengths, values = tensors[0], tensors[1]
    weights = tensors[least] if len(tensors) > least else None
    if variable_stride_per_key:
        sent = tensors[2].view(num_workers, num_keys)
        per_key = sent.t().reshape(num_keys, stagger, num_workers // stagger).transpose(1, 2)
        strides = per_key.reshape(num_keys, num_workers).tolist()
        lengths, values, weights = _reorder(lengths, values, weights, sent.flatten().tolist(), recat)
        return Received(lengths, values, weights, None, strides)
    require(
        stride_per_rank is not None,
        "KeyedJaggedTensor.dist_init: stride_per_rank is None; a fixed batch needs the batch size of each rank",
    )
    assert stride_per_rank is not None
    if num_keys:
        even = len(set(stride_per_rank)) == 1
        # With uneven batches the recat counts single lengths, so each length is a piece.
        sizes = [stride_per_rank[0]] * (num_workers * num_keys) if even else [1] * lengths.numel()
        lengths, values, weights = _reorder(lengths, values, weights, sizes, recat)
    return Received(lengths, values, weights, sum(stride_per_rank), None)


def _reorder(
    lengths: Tensor, values: Tensor, weights: Tensor | None, sizes: list[int], recat: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if recat is None or not sizes:
        return lengths, values, weights
    order = recat.tolist()
    value_sizes = segment_sums(lengths, sizes)
    return (
        gather_segments(lengths, sizes, order),
        gather_segments(values, value_sizes, order),
        None if weights is None else gather_segments(weights, value_sizes, order),
    )
