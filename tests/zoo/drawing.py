"""Random arguments of forward for the models of the zoo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["Bag", "Draw"]


@dataclass(frozen=True)
class Bag:
    """The values of one feature for all samples."""

    name: str
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None


class Draw:
    """Draws inputs for ``batch`` samples.

    Args:
        batch: number of samples.
        seed: the same seed gives the same numbers.
        one_user: every sample has the user inputs of the first one.

    Attributes:
        user: names of the user's inputs that were drawn.
    """

    def __init__(self, batch: int, seed: int, one_user: bool = False) -> None:
        self.batch = batch
        self.user: set[str] = set()
        self._one_user = one_user
        self._generator = torch.Generator().manual_seed(seed)

    def bag(
        self,
        name: str,
        rows: int,
        *,
        each: int | None = None,
        least: int = 0,
        most: int = 4,
        like: Bag | None = None,
        weighted: bool = False,
        user: bool = False,
        kind: torch.dtype = torch.int64,
    ) -> Bag:
        """Ids below ``rows``, or floats.

        Args:
            each: exactly this many values a sample; None draws ``least`` to ``most``.
            like: as many values as this bag has.
            weighted: with weights.
            user: of the user, so that all candidates have the same.
        """
        shared = user and self._one_user
        batch = 1 if shared else self.batch
        if like is not None:
            lengths = like.lengths[:batch]
        elif each is not None:
            lengths = torch.full((batch,), each)
        else:
            lengths = torch.randint(least, most + 1, (batch,), generator=self._generator)
        count = int(lengths.sum())
        if kind.is_floating_point:
            values = torch.randn(count, generator=self._generator)
        else:
            values = torch.randint(0, rows, (count,), generator=self._generator)
        weights = torch.rand(count, generator=self._generator) + 0.5 if weighted else None
        if user:
            self.user.add(name)
        if shared:
            values, lengths = values.repeat(self.batch), lengths.repeat(self.batch)
            weights = None if weights is None else weights.repeat(self.batch)
        return Bag(name, values, lengths, weights)

    def floats(self, *shape: int) -> Tensor:
        """float32 [batch, *shape]."""
        return torch.randn(self.batch, *shape, generator=self._generator)

    def integers(self, below: int, *shape: int) -> Tensor:
        """int64 [batch, *shape]."""
        return torch.randint(0, below, (self.batch, *shape), generator=self._generator)

    def keyed(self, **columns: int) -> KeyedTensor:
        """Dense features of so many columns."""
        return KeyedTensor(list(columns), list(columns.values()), self.floats(sum(columns.values())))

    @staticmethod
    def kjt(*bags: Bag) -> KeyedJaggedTensor:
        """The features as TorchRec's loaders give them."""
        return KeyedJaggedTensor(
            [bag.name for bag in bags],
            torch.cat([bag.values for bag in bags]),
            lengths=torch.cat([bag.lengths for bag in bags]).int(),
            weights=_all([bag.weights for bag in bags]),
        )

    @staticmethod
    def jagged(bag: Bag) -> JaggedTensor:
        """One feature outside of a KeyedJaggedTensor."""
        return JaggedTensor(bag.values, bag.weights, bag.lengths)


def _all(weights: Sequence[Tensor | None]) -> Tensor | None:
    given = [w for w in weights if w is not None]
    return torch.cat(given) if len(given) == len(weights) else None
