"""A request's features as numpy arrays, without tensor operations between the wire and the lookup.

At the sizes of a request, the dispatch of a torch operator takes longer than its work. Shape suffixes: F features, B
batch, S samples of all requests, N ids. Loops run over requests and features, never over ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays, Strings, as_features
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["Bags", "Features", "bags_of", "merge_bags", "offsets_of", "with_strings"]

# torch warns once per process about a tensor over read-only memory. Lookups never write to ids, so the warning is
# triggered here, where it is hidden.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


@dataclass(slots=True, eq=False)
class Bags:
    """Ids of F features for B samples; each (feature, sample) holds a bag of any length.

    Attributes:
        keys: feature names, none twice, except where a lookup reads a feature several times.
        batch: B.
        offsets: ``[F * B + 1]``, key-major, of the ids' dtype: where each bag begins, from 0 to N.
        values: ids ``[N]``, int64 or int32.
        weights: float32 ``[N]``, or None.
        weighted: features whose weights the request gave by name; where there are none, weights are of all ids.
        strings: the ids of features that the request gave as strings, for which ``values`` holds 0; the intake replaces them by
            their rows.
    """

    keys: tuple[str, ...]
    batch: int
    offsets: NDArray[Any]
    values: NDArray[Any]
    weights: NDArray[np.float32] | None = None
    weighted: tuple[str, ...] = ()
    strings: Strings | None = None

    @property
    def lengths_FB(self) -> NDArray[Any]:
        """Number of ids in each bag."""
        return np.subtract(self.offsets[1:], self.offsets[:-1]).reshape(len(self.keys), self.batch)

    def fits(self, rows_F: NDArray[np.uint64]) -> bool:
        """Whether each id is 0 or more and below its feature's number of rows."""
        values, batch = self.values, self.batch
        if not values.size:
            return True
        # Unsigned, a negative id is huge, so checking the largest id of a feature is enough.
        unsigned = values.view(np.uint64 if values.dtype == np.int64 else np.uint32)
        edges = self.offsets[::batch]
        starts = edges[:-1]
        if starts[-1] < edges[-1] and (np.maximum.reduceat(unsigned, starts) < rows_F).all():
            return True
        # For a feature without ids, reduceat takes the neighbour's first id (or would read beyond the last id).
        filled = edges[1:] > starts
        return bool((np.maximum.reduceat(unsigned, starts[filled]) < rows_F[filled]).all())

    def kjt(self) -> KeyedJaggedTensor:
        """A KeyedJaggedTensor that shares this memory (lengths become int32)."""
        return KeyedJaggedTensor.from_parts_unchecked(
            list(self.keys),
            torch.from_numpy(self.values),
            torch.from_numpy(self.lengths_FB.reshape(-1).astype(np.int32)),
            weights=None if self.weights is None else torch.from_numpy(self.weights),
            stride=self.batch,
        )

    def arranged(self, names: tuple[str, ...]) -> Bags:
        """The bags of the features ``names``, in that order; a name that is absent gets empty bags."""
        if names == self.keys:
            return self
        plan = _plan(self.keys, names)
        batch = self.batch
        lengths_FB = np.zeros((len(names), batch), self.values.dtype)
        lengths_FB[plan.taken] = self.lengths_FB[plan.source]
        values, weights = self.values, self.weights
        if not plan.in_order and values.size:
            edges = self.offsets[::batch].tolist()
            pieces = [slice(edges[i], edges[i + 1]) for i in plan.source.tolist()]
            values = _joined(values, pieces)
            weights = None if weights is None else _joined(weights, pieces)
        strings = None if self.strings is None else self._arranged_strings(self.strings, names)
        return Bags(names, batch, offsets_of(lengths_FB, values.dtype), values, weights, strings=strings)

    def _arranged_strings(self, strings: Strings, names: tuple[str, ...]) -> Strings | None:
        """The strings of the features ``names``, in that order; None if none of them has strings."""
        counts = dict(zip(self.keys, self.lengths_FB.sum(axis=1, dtype=np.int64).tolist()))
        stops = np.cumsum([counts[key] for key in strings.keys]).tolist()
        pieces = {key: (stop - counts[key], stop) for key, stop in zip(strings.keys, stops)}
        kept = tuple(name for name in names if name in pieces)
        return replace(strings.picked([pieces[name] for name in kept]), keys=kept) if kept else None

    def with_context(self, context: Bags, *, repeat: bool = False) -> Bags:
        """Add the features of ``context``, one sample that applies to all samples; its bags go to the first sample.

        The other samples get empty bags of those features; the lookup copies the first sample's vectors to them. With
        ``repeat``, every sample gets the context's bags."""
        if repeat and self.batch > 1:
            copies = [context] * self.batch
            context = merge_bags(copies, context.keys, weighted=context.weights is not None)
            return _side_by_side(self, context)
        if not self.batch:  # no sample takes the context
            return self.arranged(self.keys + context.keys)
        lengths_FB = np.zeros((len(self.keys) + len(context.keys), self.batch), np.int64)
        lengths_FB[: len(self.keys)] = self.lengths_FB
        lengths_FB[len(self.keys) :, 0] = context.lengths_FB[:, 0]
        values = np.concatenate((self.values, context.values))
        weights = None
        if self.weights is not None and context.weights is not None:
            weights = np.concatenate((self.weights, context.weights))
        return Bags(self.keys + context.keys, self.batch, offsets_of(lengths_FB, values.dtype), values, weights)


def _side_by_side(one: Bags, two: Bags) -> Bags:
    """The features of both, of the same samples."""
    weights = None
    if one.weights is not None and two.weights is not None:
        weights = np.concatenate((one.weights, two.weights))
    lengths = np.concatenate((one.lengths_FB, two.lengths_FB))
    values = np.concatenate((one.values, two.values))
    return Bags(one.keys + two.keys, one.batch, offsets_of(lengths, values.dtype), values, weights)


Features = KeyedJaggedTensor | Bags | Mapping[str, Any]
"""Types of a request's features: bags, or anything that :func:`recinfer.columns.as_features` reads."""


def bags_of(features: Features) -> Bags:
    """``features`` as bags that share their memory.

    Raises:
        InputError: no features, batch sizes that differ between features, ids that are not int32 or int64 on
            the CPU, weights that are not float32.
    """
    if isinstance(features, Bags):
        return features
    if not isinstance(features, KeyedJaggedTensor):
        return _bags_of_arrays(as_features(features))
    if features.variable_stride_per_key():
        raise InputError("features: batch sizes differ between features; expected one batch size")
    values, weights = features.values(), features.weights_or_none()
    if values.dtype not in (torch.int64, torch.int32) or values.device.type != "cpu":
        raise InputError(f"features: ids are {values.dtype} on {values.device}; expected int64 or int32 on cpu")
    if weights is not None and weights.dtype != torch.float32:
        raise InputError(f"features: weights are {weights.dtype}; expected float32")
    ids = np.ascontiguousarray(values.numpy())
    offsets = features.offsets_or_none()
    if offsets is None:
        starts = offsets_of(features.lengths().numpy(), ids.dtype)
    else:
        starts = offsets.numpy().astype(ids.dtype, copy=False)
    given = None if weights is None else np.ascontiguousarray(weights.detach().numpy())
    return Bags(tuple(features.keys()), features.stride(), starts, ids, given)


def _bags_of_arrays(found: FeatureArrays) -> Bags:
    if found.batch < 1:
        raise InputError("features: got no samples, expected at least one")
    values = found.values
    if found.strings is not None:
        values = with_strings(found.keys, found.batch, found.lengths, values, found.strings)
    offsets = offsets_of(found.lengths, values.dtype)
    weights = found.weights
    if weights is not None and found.weighted:
        each_F = found.lengths.reshape(len(found.keys), found.batch).sum(axis=1)
        given = np.repeat([key in found.weighted for key in found.keys], each_F)
        weights = np.ones(values.size, np.float32)
        weights[given] = found.weights
    return Bags(found.keys, found.batch, offsets, values, weights, found.weighted, found.strings)


def with_strings(
    keys: tuple[str, ...], batch: int, lengths: NDArray[Any], values: NDArray[Any], strings: Strings
) -> NDArray[np.int64]:
    """The ids of all features, int64 ``[N]``: ``values`` of those with integers, and 0 for each string; see :class:`Bags`."""
    counts = lengths.reshape(len(keys), batch).sum(axis=1, dtype=np.int64)
    found = np.zeros(int(counts.sum()), np.int64)
    found[np.repeat([key not in strings.keys for key in keys], counts)] = values
    return found


def offsets_of(lengths: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Offsets of ``dtype`` for ``lengths`` (any shape, row-major): one more than lengths, starting at 0."""
    offsets = np.empty(lengths.size + 1, dtype)
    offsets[0] = 0
    np.add.accumulate(lengths.reshape(-1), dtype=dtype, out=offsets[1:])
    return offsets


def merge_bags(requests: Sequence[Bags], names: tuple[str, ...], *, weighted: bool = False) -> Bags:
    """Merge requests into one batch: their samples in order, with the features ``names`` in that order.

    Args:
        requests: with any features in any order; missing features become empty bags.
        weighted: keep the weights, which every request then has; otherwise they are dropped.

    Returns:
        int32 ids when every request's are, else int64.
    """
    batches = [request.batch for request in requests]
    total = sum(batches)
    values = np.concatenate([request.values for request in requests])
    first = requests[0]
    keys, batch, dtype = first.keys, first.batch, values.dtype
    uniform = all(request.batch == batch and request.keys == keys for request in requests)
    lengths = np.concatenate([*(request.lengths_FB.reshape(-1) for request in requests), _NO_BAG], dtype=dtype)
    if (
        uniform
        and not weighted
        and keys == names
        and values.size == lengths.size - 1
        and values.size
        and lengths[:-1].min() == 1
    ):
        # Every bag has one id, and all requests have the same features in the same order: the ids are a block that is
        # turned.
        turned = values.reshape(len(requests), len(names), batch).transpose(1, 0, 2).reshape(-1)
        return Bags(names, total, np.arange(len(turned) + 1, dtype=dtype), turned)
    order = _order(requests, names, len(lengths) - 1)
    ends = np.add.accumulate(lengths)
    taken = lengths[order]
    offsets = offsets_of(taken, dtype)
    # Each id's source is the first id of its bag in the requests, less the bag's first place in the merged batch.
    source = np.repeat((ends - lengths)[order] - offsets[:-1], taken)
    source += np.arange(len(source), dtype=dtype)
    weights = None
    if weighted:
        weights = np.concatenate([request.weights for request in requests if request.weights is not None])[source]
    return Bags(names, total, offsets, values[source], weights)


_NO_BAG = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The features to copy: ``taken`` are their indices among the wanted features, ``source`` among the given ones."""

    taken: NDArray[np.intp]
    source: NDArray[np.intp]
    in_order: bool  # all ids stay where they are


@lru_cache(maxsize=512)
def _plan(keys: tuple[str, ...], names: tuple[str, ...]) -> _Plan:
    at = {key: place for place, key in enumerate(keys)}
    pairs = [(i, at[name]) for i, name in enumerate(names) if name in at]
    taken, source = np.array(pairs, np.intp).reshape(-1, 2).T
    return _Plan(taken, source, source.tolist() == list(range(len(keys))))


def _joined(array: NDArray[Any], pieces: Sequence[slice]) -> NDArray[Any]:
    return np.concatenate([array[piece] for piece in pieces]) if pieces else array[:0]


def _order(requests: Sequence[Bags], names: tuple[str, ...], no_bag: int) -> NDArray[np.intp]:
    """The index of each (feature, sample) of the merged batch ``[F * S]`` among all requests' bags, or ``no_bag``."""
    blocks, base = [], 0
    for request in requests:
        plan, batch = _plan(request.keys, names), request.batch
        block = np.full((len(names), batch), no_bag, np.intp)
        block[plan.taken] = (plan.source * batch + base)[:, None] + np.arange(batch)
        blocks.append(block)
        base += len(request.keys) * batch
    return np.concatenate(blocks, axis=1).reshape(-1)
