"""Concatenates, splits and permutes KeyedJaggedTensors by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, fx

from recinfer.errors import InputError
from recinfer.sparse.checks import require
from recinfer.sparse.jagged import JaggedTensor
from recinfer.sparse.keyed_parts import InverseIndices, KeyedParts
from recinfer.sparse.offsets import batched_lengths_to_offsets, gather_segments, lengths_to_offsets

__all__ = ["by_key", "concat", "cut", "permute"]

Keyed = TypeVar("Keyed", bound=KeyedParts)


@fx.wrap  # a single node in graphs of torch.fx, because Python cannot iterate over a list of symbols
def concat(kjt_list: Sequence[Keyed]) -> Keyed:
    """See :meth:`KeyedJaggedTensor.concat`."""
    require(len(kjt_list) > 0, "KeyedJaggedTensor.concat: got an empty list; expected at least one")
    weighted = {k._weights is not None for k in kjt_list}
    require(
        len(weighted) == 1,
        "KeyedJaggedTensor.concat: got weighted and unweighted tensors; give weights to all or to none",
    )
    variables = {k.variable_stride_per_key() for k in kjt_list}
    require(
        len(variables) == 1,
        "KeyedJaggedTensor.concat: got variable and fixed batches; give stride_per_key_per_rank to all or to none",
    )
    variable = variables.pop()
    strides = sorted({k.stride() for k in kjt_list})
    require(
        variable or len(strides) == 1,
        f"KeyedJaggedTensor.concat: got batch sizes (strides) {strides}; expected one",
    )
    # A KeyedJaggedTensor without keys may still have batch sizes (empty_like).
    strides_of_keys = [s for k in kjt_list for s in k.stride_per_key_per_rank()[: len(k._keys)]]
    result = kjt_list[0].from_parts_unchecked(
        [key for k in kjt_list for key in k._keys],
        torch.cat([k._values for k in kjt_list]),
        torch.cat([k.lengths() for k in kjt_list]),
        weights=torch.cat([k.weights() for k in kjt_list]) if weighted.pop() else None,
        stride=None if variable else strides[0],
        stride_per_key_per_rank=strides_of_keys if variable else None,
        inverse_indices=_concat_inverse([k._inverse_indices for k in kjt_list]),
    )
    if all(k._length_per_key is not None for k in kjt_list):
        result._length_per_key = [n for k in kjt_list for n in k._length_per_key or ()]
    return result


def cut(kjt: Keyed, start: int, stop: int) -> Keyed:
    """The keys ``start`` to ``stop`` (exclusive), as views."""
    if start == 0 and stop == len(kjt._keys):
        return kjt
    variable = kjt.variable_stride_per_key()
    at, lengths_at = kjt.offset_per_key(), kjt.lengths_offset_per_key()
    part = kjt.from_parts_unchecked(
        kjt._keys[start:stop],
        kjt._values[at[start] : at[stop]],
        kjt.lengths()[lengths_at[start] : lengths_at[stop]],
        weights=None if kjt._weights is None else kjt._weights[at[start] : at[stop]],
        stride=kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank()[start:stop] if variable else None,
        inverse_indices=_inverse_of(kjt, kjt._keys[start:stop]),
    )
    part._length_per_key = kjt.length_per_key()[start:stop]
    return part


def by_key(kjt: KeyedParts, compute_offsets: bool) -> dict[str, JaggedTensor]:
    """A KeyedJaggedTensor per key, as views; ``compute_offsets`` also computes their offsets, in one operation."""
    if not kjt._keys:
        return {}
    sizes, strides = kjt.length_per_key(), kjt.stride_per_key()
    values = kjt._values.split(sizes)
    weights = [None] * len(sizes) if kjt._weights is None else kjt._weights.split(sizes)
    lengths = kjt.lengths().split(strides)
    offsets: Sequence[Tensor | None] = [None] * len(sizes)
    if compute_offsets and kjt.variable_stride_per_key():
        offsets = [lengths_to_offsets(part) for part in lengths]
    elif compute_offsets:
        offsets = batched_lengths_to_offsets(kjt.lengths().view(len(strides), -1)).unbind(0)
    parts = zip(kjt._keys, values, weights, lengths, offsets)
    return {k: JaggedTensor.from_parts_unchecked(v, w, n, o) for k, v, w, n, o in parts}


def permute(kjt: Keyed, indices: list[int], indices_tensor: Tensor | None) -> Keyed:
    """See :meth:`KeyedJaggedTensor.permute`."""
    num_keys = len(kjt._keys)
    if indices and not (min(indices) >= -num_keys and max(indices) < num_keys):
        bad = next(i for i in indices if not -num_keys <= i < num_keys)
        raise InputError(f"KeyedJaggedTensor.permute: index {bad} with {num_keys} keys; expected 0 to {num_keys - 1}")
    sizes = kjt.length_per_key()
    variable = kjt.variable_stride_per_key()
    if variable:
        lengths = gather_segments(kjt.lengths(), kjt.stride_per_key(), indices)
    else:
        order = indices_tensor
        if order is None:
            order = torch.tensor(indices, dtype=torch.int64, device=kjt.lengths().device)
        rows = kjt.lengths().view(num_keys, kjt.stride()) if num_keys else kjt.lengths().view(0, kjt.stride())
        lengths = rows.index_select(0, order).flatten()
    strides = kjt.stride_per_key_per_rank()
    result = kjt.from_parts_unchecked(
        [kjt._keys[i] for i in indices],
        gather_segments(kjt._values, sizes, indices),
        lengths,
        weights=None if kjt._weights is None else gather_segments(kjt._weights, sizes, indices),
        stride=kjt.stride(),
        stride_per_key_per_rank=[strides[i] for i in indices] if variable else None,
        inverse_indices=_inverse_of(kjt, [kjt._keys[i] for i in indices]),
    )
    result._length_per_key = [sizes[i] for i in indices]
    return result


def _inverse_of(kjt: KeyedParts, keys: Sequence[str]) -> InverseIndices | None:
    """The inverse indices of ``keys``, each key once; None if ``kjt`` has none."""
    if kjt._inverse_indices is None:
        return None
    known, indices = kjt._inverse_indices
    kept = [key for key in dict.fromkeys(keys) if key in known]
    if kept == known:
        return kjt._inverse_indices
    order = torch.tensor([known.index(key) for key in kept], dtype=torch.int64, device=indices.device)
    return kept, indices.index_select(0, order)


def _concat_inverse(parts: Sequence[InverseIndices | None]) -> InverseIndices | None:
    known = [p for p in parts if p is not None]
    if len(known) != len(parts):
        return None
    return [key for keys, _ in known for key in keys], torch.cat([indices for _, indices in known])
