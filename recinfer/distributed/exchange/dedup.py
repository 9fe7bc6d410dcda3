"""Index dedup: each distinct id of a feature is sent once, and its row is copied to all positions of the id
afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.sparse.offsets import segment_sums

__all__ = ["deduplicated"]

_ID_BITS = 48  # bits of 63 for the id, below the feature's number; ids are far below 2^47


def deduplicated(features: KeyedJaggedTensor, names: list[str]) -> tuple[KeyedJaggedTensor, Tensor]:
    """The distinct ids of each of ``names``, in order of size, as one bag a feature.

    Args:
        features: the input; ids between -2^47 and 2^47.
        names: the features to keep.

    Returns:
        a KeyedJaggedTensor of batch size 1, and int64 ``[ids of names]``: for each id, feature by feature, its index
        among the distinct ids of all features.
    """
    places = features.index_per_key()
    kept = features.permute([places[name] for name in names])
    values = kept.values()
    sizes = kept.length_per_key()
    numbers = torch.arange(len(names), device=values.device)
    of_id = torch.repeat_interleave(numbers, torch.tensor(sizes, device=values.device), output_size=values.numel())
    tagged = (of_id << _ID_BITS) + values.long() + (1 << (_ID_BITS - 1))
    distinct, reverse = torch.unique(tagged, return_inverse=True)
    owner = distinct >> _ID_BITS
    ids = (distinct & ((1 << _ID_BITS) - 1)) - (1 << (_ID_BITS - 1))
    counts = torch.bincount(owner, minlength=len(names)).to(kept.lengths().dtype)
    result = KeyedJaggedTensor.from_parts_unchecked(list(names), ids.to(values.dtype), counts, stride=1)
    result._length_per_key = segment_sums(counts, [1] * len(names))
    return result, reverse
