"""Generates random batches for a click model, for tests and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

from recinfer.datasets.utils import Batch
from recinfer.errors import ConfigError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["RandomRecDataset"]

_DEFAULT_ROWS = 100
_DEFAULT_IDS = 2


class RandomRecDataset(IterableDataset[Batch]):
    """Batches of random ids (uniform), dense features (normal) and labels (0 or 1); the same seed gives the same
    batches.

    Args:
        keys: the sparse features.
        batch_size: examples of a batch.
        hash_size, hash_sizes: ids are below this, for all features or for each; 100.
        ids_per_feature, ids_per_features: the most ids of a feature in an example, for all or for each; 2.
        num_dense: dense features.
        manual_seed: None draws from torch's own generator.
        num_batches: batches of one pass; None is without end.
        num_generated_batches: this many batches are generated and repeated; negative generates every batch anew.
        min_ids_per_feature, min_ids_per_features: the fewest ids of a feature in an example, for all or for each;
            without either it is ``ids_per_feature``, and 0 where that is not given.

    Raises:
        ConfigError: not one size per key, or num_generated_batches is 0.
    """

    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        super().__init__()
        if min_ids_per_feature is None:
            min_ids_per_feature = ids_per_feature
        self.keys = keys
        self.batch_size = batch_size
        self.num_dense = num_dense
        self.hash_sizes = self._for_each("hash_sizes", hash_sizes, hash_size or _DEFAULT_ROWS)
        self.max_ids = self._for_each("ids_per_features", ids_per_features, ids_per_feature or _DEFAULT_IDS)
        self.min_ids = self._for_each("min_ids_per_features", min_ids_per_features, min_ids_per_feature or 0)
        self.num_batches = num_batches
        if num_generated_batches == 0:
            raise ConfigError(
                "num_generated_batches is 0; expected a positive number, or a negative one to generate every batch anew"
            )
        self.generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        self.made = [self._make_batch() for _ in range(num_generated_batches)]

    def __iter__(self) -> Iterator[Batch]:
        batches = itertools.cycle(self.made) if self.made else iter(self._make_batch, None)
        return itertools.islice(batches, self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("RandomRecDataset without num_batches is infinite and has no length")
        return self.num_batches

    def _for_each(self, name: str, sizes: list[int] | None, one: int) -> list[int]:
        if sizes is None:
            return [one] * len(self.keys)
        if len(sizes) != len(self.keys):
            raise ConfigError(f"{name} has {len(sizes)} numbers for {len(self.keys)} keys; expected one per key")
        return sizes

    def _make_batch(self) -> Batch:
        # TorchRec's dataset draws in this order too, so that the same seed gives the same batches.
        size, generator = (self.batch_size,), self.generator
        lengths, values = [], []
        for rows, fewest, most in zip(self.hash_sizes, self.min_ids, self.max_ids):
            lengths.append(torch.randint(fewest, most + 1, size, dtype=torch.int32, generator=generator))
            values.append(torch.randint(0, rows, (int(lengths[-1].sum()),), generator=generator))
        sparse = KeyedJaggedTensor.from_lengths_sync(self.keys, torch.cat(values), torch.cat(lengths))
        dense = torch.randn(self.batch_size, self.num_dense, generator=generator)
        return Batch(dense, sparse, torch.randint(0, 2, size, generator=generator))
