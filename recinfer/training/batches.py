"""Examples as tensors in memory, and batches of them.

Shapes: ``F`` sparse features, ``N`` examples, ``B`` examples of a batch, ``d`` dense features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.streamable import Pipelineable

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["Batch", "Examples", "empty_batch"]


@dataclass(frozen=True)
class Batch(Pipelineable):
    """A batch of training or evaluation.

    Attributes:
        dense_features: float32 ``[B, d]``.
        sparse_features: ids of ``F`` features for ``B`` examples.
        labels: float32 ``[B]``, 0 or 1.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on ``device``."""
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory alive until ``stream`` is done with it."""
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)


def empty_batch(contract: FeatureContract) -> Batch:
    """A batch without rows, for a rank that has no more rows while others have."""
    sparse = KeyedJaggedTensor(
        keys=list(contract.feature_names),
        values=torch.empty(0, dtype=torch.int64),
        lengths=torch.empty(0, dtype=torch.int64),
        stride=0,
    )
    return Batch(torch.empty(0, contract.num_dense), sparse, torch.empty(0))


class Examples:
    """All examples of a split, as tensors. ``len()`` is ``N``.

    Args:
        dense: float32 ``[N, d]``.
        sparse: ids of ``F`` features for ``N`` examples.
        labels: ``[N]``, 0 or 1.

    Raises:
        InputError: parts with different numbers of examples.
    """

    def __init__(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> None:
        num = dense.shape[0]
        if not num == sparse.stride() == labels.numel():
            raise InputError(
                f"examples: {num} rows of dense features, {sparse.stride()} of sparse ones, {labels.numel()} labels; "
                "expected the same number"
            )
        self.dense = dense
        self.labels = labels.reshape(-1).to(torch.float32)
        self.keys = sparse.keys()
        self._values = sparse.values()
        # int64 throughout: the gather below adds and compares places in `values`.
        self._lengths_FN = sparse.lengths().reshape(len(self.keys), num).to(torch.int64)
        self._starts_FN = sparse.offsets()[:-1].reshape(len(self.keys), num).to(torch.int64)

    @classmethod
    def from_columns(cls, contract: FeatureContract, columns: Any) -> Examples:
        """Convert raw columns by ``contract``; raises InputError for values that it rejects."""
        dense, sparse = contract.apply(columns)
        return cls(dense, sparse, torch.as_tensor(contract.labels(columns)))

    def __len__(self) -> int:
        return self.labels.numel()

    def batch(self, rows: Tensor) -> Batch:
        """The examples ``rows`` (int64 ``[B]``), in that order."""
        lengths = self._lengths_FN[:, rows].reshape(-1)
        starts = self._starts_FN[:, rows].reshape(-1)
        ends = lengths.cumsum(0)
        # Position k of the batch is in bag j, at starts[j] + (k - ends[j] + lengths[j]).
        shift = torch.repeat_interleave(starts - ends + lengths, lengths)
        values = self._values[shift + torch.arange(shift.numel())]
        sparse = KeyedJaggedTensor.from_parts_unchecked(self.keys, values, lengths, stride=rows.numel())
        return Batch(self.dense[rows], sparse, self.labels[rows])

    def tail(self, start: int) -> Examples:
        """The examples from ``start`` on."""
        batch = self.batch(torch.arange(start, len(self)))
        return Examples(batch.dense_features, batch.sparse_features, batch.labels)

    def joined(self, other: Examples) -> Examples:
        """The examples of this split followed by those of ``other``."""
        mine, theirs = self.batch(torch.arange(len(self))), other.batch(torch.arange(len(other)))
        values, lengths = [], []
        for part in (mine, theirs):
            sparse = part.sparse_features
            values.append(sparse.values().split(sparse.length_per_key()))
            lengths.append(sparse.lengths().view(len(self.keys), -1))
        sparse = KeyedJaggedTensor.from_parts_unchecked(
            self.keys,
            torch.cat([v for pair in zip(*values) for v in pair]),
            torch.cat(lengths, dim=1).reshape(-1),
            stride=len(self) + len(other),
        )
        dense = torch.cat([mine.dense_features, theirs.dense_features])
        return Examples(dense, sparse, torch.cat([mine.labels, theirs.labels]))

    def batches(self, batch_size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """All examples once, in batches of ``batch_size`` (the last may be smaller); shuffled with a generator."""
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for rows in order.split(batch_size):
            yield self.batch(rows)
