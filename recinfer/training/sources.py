"""Sources of training batches: examples in memory, or files read in every epoch.

Every rank takes its share of the same global batches: step ``k`` of a pass trains on rows ``k * W * B`` to
``(k + 1) * W * B`` of the pass's order, rank ``r`` of ``W`` on the ``r``-th part of them. A run on ``W`` ranks with
batches of ``B`` therefore sees the same rows in each step as one rank with batches of ``W * B``.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from recinfer.data.stream import RowStream, held_out_mask
from recinfer.errors import InputError
from recinfer.training.batches import Batch, Examples

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract
    from recinfer.data.dataset import Dataset

__all__ = ["BatchSource", "FileSource", "MemorySource"]

_EVALUATION_BATCH = 8192
_SHUFFLE_ROWS = 1 << 17


class BatchSource(abc.ABC):
    """Batches of one rank.

    Attributes:
        name: name of the data.
        contract: the feature contract, by which raw rows become batches.
        num_train_rows: rows of a pass over all ranks; None while unknown.
        positive_rate: part of the labels that are 1, as far as known before training.
    """

    name: str
    contract: FeatureContract
    num_train_rows: int | None
    positive_rate: float

    def __init__(self, batch_size: int, rank: int, world_size: int) -> None:
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    @property
    def global_batch(self) -> int:
        """Rows of all ranks in one step."""
        return self.batch_size * self.world_size

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps per epoch; None while unknown."""
        return None if self.num_train_rows is None else _steps(self.num_train_rows, self.global_batch, self.world_size)

    @abc.abstractmethod
    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """This rank's batches of ``epoch`` (from 0), without the first ``skip`` steps; the same number on every rank.
        The last global batch may be smaller, and is dropped if it has fewer rows than there are ranks."""

    @abc.abstractmethod
    def held_out(self) -> Iterator[Batch]:
        """This rank's share of the rows held out."""


class MemorySource(BatchSource):
    """Batches of a dataset in memory, in a new random order in every epoch.

    Args:
        dataset: rows, contract and split.
        batch_size: rows of a rank in one step.
        seed: seed of the order.
        rank, world_size: this rank, and the number of ranks.

    Raises:
        InputError: no rows to train on or none held out, or values that the contract refuses.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(batch_size, rank, world_size)
        self.name = dataset.name
        self.contract = dataset.contract
        self._train = _examples(dataset, dataset.train, "training")
        self._test = _examples(dataset, dataset.test, "held-out")
        self.num_train_rows = len(self._train)
        self.num_test_rows = len(self._test)
        self.positive_rate = float(self._train.labels.mean())
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._orders: list[torch.Tensor] = []

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """See :class:`BatchSource`."""
        while len(self._orders) <= epoch:  # all passes share one generator, so that an order depends on the seed alone
            self._orders.append(torch.randperm(len(self._train), generator=self._generator))
        for rows in list(self._orders[epoch].split(self.global_batch))[skip:]:
            share = _share(len(rows), self.rank, self.world_size)
            if share is None:
                return
            yield self._train.batch(rows[share])

    def held_out(self) -> Iterator[Batch]:
        """See :class:`BatchSource`."""
        rows = torch.arange(self.rank, len(self._test), self.world_size)
        for part in rows.split(_EVALUATION_BATCH):
            yield self._test.batch(part)


class FileSource(BatchSource):
    """Batches of files larger than memory: read in order, shuffled within blocks of about 130,000 rows.

    Args:
        path: a file or a folder of files, as :class:`~recinfer.data.stream.RowStream` takes them.
        format: ``"criteo"`` or ``"movielens"``.
        contract: the feature contract, by which the rows become batches.
        batch_size: rows of a rank in one step.
        limit: use only that many rows.
        seed: seed of the split and of the order.
        test_fraction: part of the rows to hold out.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str,
        contract: FeatureContract,
        batch_size: int,
        *,
        limit: int | None = None,
        seed: int = 0,
        test_fraction: float = 0.1,
        positive_rate: float = 0.5,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(batch_size, rank, world_size)
        self._stream = RowStream(path, format, limit)
        self.name = self._stream.files[0].name.split(".")[0]
        self.contract = contract
        self.num_train_rows = None
        self.num_test_rows: int | None = None
        self.positive_rate = positive_rate
        self._seed = seed
        self._fraction = test_fraction
        # Whole global batches a block, so that a batch never waits for the next block.
        per_block = max(1, round(_SHUFFLE_ROWS * (1 - test_fraction) / self.global_batch))
        self._block_rows = math.ceil(per_block * self.global_batch / (1 - test_fraction))

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """See :class:`BatchSource`. With several ranks, an incomplete last global batch is dropped.

        After the pass ``num_train_rows`` is known.
        """
        total = 0  # rows to train on before the block; every rank counts all, and parses its own

        def keep(first: int, count: int) -> NDArray[np.int64]:
            nonlocal total
            places = np.flatnonzero(~held_out_mask(np.arange(first, first + count), self._fraction, self._seed))
            places = np.random.default_rng((self._seed, epoch, first)).permutation(places)
            owner = np.arange(total, total + len(places)) % self.global_batch // self.batch_size
            total += len(places)
            return places[owner == self.rank]

        step = 0
        left: Examples | None = None
        for block in self._stream.blocks(self._block_rows, keep):
            examples = Examples.from_columns(self.contract, block)
            examples = examples if left is None else left.joined(examples)
            ready = min(len(examples) // self.batch_size, total // self.global_batch - step)
            for at in range(ready):
                if step >= skip:
                    yield examples.batch(torch.arange(at * self.batch_size, (at + 1) * self.batch_size))
                step += 1
            left = examples.tail(ready * self.batch_size)
        if self.world_size == 1 and left is not None and len(left) and step >= skip:
            yield left.batch(torch.arange(len(left)))
        if not total:
            raise InputError(f"{self._stream.path}: no rows to train on")
        self.num_train_rows = total if self.world_size == 1 else total - total % self.global_batch

    def held_out(self) -> Iterator[Batch]:
        """See :class:`BatchSource`."""

        def keep(first: int, count: int) -> NDArray[np.int64]:
            return np.flatnonzero(held_out_mask(np.arange(first, first + count), self._fraction, self._seed))[
                self.rank :: self.world_size
            ]

        for block in self._stream.blocks(self._block_rows, keep):
            examples = Examples.from_columns(self.contract, block)
            yield from examples.batches(_EVALUATION_BATCH)


def _steps(rows: int, global_batch: int, world_size: int) -> int:
    whole, rest = divmod(rows, global_batch)
    return whole + (rest >= world_size)


def _share(rows: int, rank: int, world_size: int) -> slice | None:
    """The rank's part of a global batch; None if there are fewer rows than ranks."""
    if rows < world_size:
        return None
    return slice(rank * rows // world_size, (rank + 1) * rows // world_size)


def _examples(dataset: Dataset, rows: NDArray[np.int64], what: str) -> Examples:
    if not len(rows):
        raise InputError(f"{dataset.name}: got no {what} rows; expected at least 1, give more data")
    return Examples.from_columns(dataset.contract, dataset.take(rows))
