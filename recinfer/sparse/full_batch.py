"""Expands a variable batch to the full batch: each example gets the bag that the inverse indices name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.sparse.checks import MissingKeyError
from recinfer.sparse.jagged import JaggedTensor
from recinfer.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["bags_of", "full_batch", "inverse_of"]


def full_batch(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """The fixed batch of ``names`` that a variable batch with inverse indices stands for.

    Args:
        features: ``inverse_indices`` are given for at least ``names``.
        names: its keys, in the order wanted.

    Raises:
        MissingKeyError: a name is not a key.
        InputError: a name has no inverse indices, or one that is no row of its batch.
    """
    parts = {name: bags_of(features[name], inverse_of(features, name)) for name in names}
    if not parts:
        return KeyedJaggedTensor.empty_like(features)
    return KeyedJaggedTensor.from_jt_dict(parts)


def bags_of(part: JaggedTensor, rows: Tensor) -> JaggedTensor:
    """The bags ``rows`` (int64 ``[B]``) of ``part``, one after another; with gradients."""
    at = _positions(part.lengths(), rows, part.values().shape[0])
    weights = part.weights_or_none()
    return JaggedTensor.from_parts_unchecked(
        part.values().index_select(0, at),
        None if weights is None else weights.index_select(0, at),
        part.lengths().index_select(0, rows),
    )


def inverse_of(features: KeyedJaggedTensor, name: str) -> Tensor:
    """For each example of the full batch, int64 ``[B]``, the row of ``name``'s own batch.

    Raises:
        MissingKeyError: the name is not a key.
        InputError: no inverse indices for it, or one that is no row of its batch.
    """
    keys, indices = features.inverse_indices()
    if name not in features.index_per_key():
        raise MissingKeyError(f"feature {name!r} is not in the input; it has {features.keys()}")
    if name not in keys:
        raise InputError(f"no inverse indices for feature {name!r}; they are given for {keys}")
    rows = indices[keys.index(name)]
    stride = features.stride_per_key()[features.index_per_key()[name]]
    if rows.device.type == "cpu" and rows.numel():
        low, high = (int(edge) for edge in rows.aminmax())
        if low < 0 or high >= stride:
            raise InputError(
                f"inverse_indices of feature {name!r} hold {low if low < 0 else high}; expected 0 to {stride - 1}, the "
                "rows of its own batch"
            )
    return rows.long()


def _positions(lengths: Tensor, rows: Tensor, num_values: int) -> Tensor:
    """Positions, int64, of the values of the bags ``rows``, one bag after another; ``lengths`` are those of all bags.
    On meta, where numbers are unknown, the result has one position per value."""
    starts = lengths.long().cumsum(0) - lengths
    chosen = lengths.index_select(0, rows).long()
    ends = chosen.cumsum(0)
    if lengths.is_meta:
        return ends.new_empty(num_values)
    total = int(ends[-1]) if ends.numel() else 0
    shift = starts.index_select(0, rows) - (ends - chosen)
    return torch.arange(total, device=lengths.device) + shift.repeat_interleave(chosen, output_size=total)
