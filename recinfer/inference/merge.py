"""The features of several requests laid out as one batch, whatever their sizes and the order of their keys.

Shape suffixes: F features, B batch of one request, S samples of all, N ids. Loops run over requests, never over ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["merge_features"]


def merge_features(
    requests: Sequence[KeyedJaggedTensor], names: Sequence[str], *, weighted: bool = False
) -> KeyedJaggedTensor:
    """One batch of all samples, request after request.

    Args:
        requests: each with all of ``names`` as keys, in any order, on the CPU; ids int32 or int64.
        names: keys of the result, in its order.
        weighted: keep the weights, which every request then has; otherwise they are dropped.

    Returns:
        values int64 ``[N]`` (int32 when every request's are), lengths ``[F * S]``.
    """
    batches = [request.stride() for request in requests]
    lengths = np.concatenate([request.lengths().numpy() for request in requests])
    values = np.concatenate([request.values().numpy() for request in requests])
    order = _order([tuple(request.keys()) for request in requests], tuple(names), batches)
    ends = np.cumsum(lengths, dtype=np.int64)
    taken = lengths[order]
    taken_ends = np.cumsum(taken, dtype=np.int64)
    # Where each id comes from: its bag's first id in the requests, less the bag's first place in the merged batch.
    source = np.repeat((ends - lengths)[order] - (taken_ends - taken), taken)
    source += np.arange(len(source))
    weights = None
    if weighted:
        weights = torch.from_numpy(np.concatenate([request.weights().numpy() for request in requests])[source])
    return KeyedJaggedTensor.from_parts_unchecked(
        list(names), torch.from_numpy(values[source]), torch.from_numpy(taken), weights=weights, stride=sum(batches)
    )


def _order(keys: Sequence[tuple[str, ...]], names: tuple[str, ...], batches: Sequence[int]) -> NDArray[np.int64]:
    """For each (feature, sample) of the merged batch ``[F * S]``, its bag among the bags of all requests."""
    width = len(names)
    if all(batch == batches[0] for batch in batches) and all(key == keys[0] for key in keys):
        batch = batches[0]
        bags = np.arange(len(keys))[None, :, None] * (width * batch) + np.arange(batch)
        return (bags + (_positions(keys[0], names) * batch)[:, None, None]).reshape(-1)
    blocks, base = [], 0
    for key, batch in zip(keys, batches):
        blocks.append((_positions(key, names) * batch)[:, None] + np.arange(base, base + batch))
        base += width * batch
    return np.concatenate(blocks, axis=1).reshape(-1)


@lru_cache(maxsize=512)
def _positions(keys: tuple[str, ...], names: tuple[str, ...]) -> NDArray[np.int64]:
    at = {key: position for position, key in enumerate(keys)}
    return np.array([at[name] for name in names], dtype=np.int64)
