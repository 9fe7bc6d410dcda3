"""What a request's features become before they are looked up: checked, absent ones filled, ids out of range replaced.

Everything that depends on the names alone is computed once per order of keys; the rest is a few tensor ops.
Shape suffixes: F features, B batch, N ids.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from recinfer.archive.manifest import FeatureInfo, Manifest
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["FeatureIntake", "TakenFeatures"]

_MAX_ORDERS = 256  # orders of keys that are remembered; clients send a handful
_INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class TakenFeatures:
    """Features ready to look up: all of the archive's. ``present`` names those that the request brought, None for all."""

    features: KeyedJaggedTensor
    present: frozenset[str] | None


@dataclass(frozen=True)
class _Order:
    """What one order of keys needs."""

    keys: list[str]  # the request's, then the absent ones
    present: frozenset[str] | None
    rejected: tuple[str, ...]  # absent ones that predict refuses
    empty: int  # absent ones that become empty bags
    defaults: Tensor | None  # ids of absent ones that become one id each; they follow the empty ones
    low: Tensor | None  # smallest and largest allowed id per key, and what replaces others; None: nothing is replaced
    high: Tensor | None
    replacement: Tensor | None


class FeatureIntake:
    """Checks and completes the features of requests. Safe from any thread.

    Attributes:
        names: all features, in the archive's order.
        needs_weights: whether every request brings weights.
        replaced_ids: ids out of range that became the default row, since the start.
        replaced: the same by feature.
        missing: predictions that lacked a feature and had it filled, by feature.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._features = {feature.name: feature for feature in manifest.features}
        self.names = tuple(self._features)
        self._rows = {name: min(t.rows for t in tables) for name, tables in manifest.feature_tables.items()}
        self.needs_weights = any(m.is_weighted and m.position_weights is None for m in manifest.modules)
        self._replaces = any(feature.out_of_range == "default_row" for feature in manifest.features)
        self._orders: dict[tuple[str, ...], _Order] = {}
        self.replaced_ids = 0
        self.replaced: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, features: KeyedJaggedTensor, *, need_all: bool, elsewhere: Set[str] = frozenset()) -> TakenFeatures:
        """Check and complete.

        Args:
            features: ids int32 or int64 on CPU, keys in any order.
            need_all: refuse absent features whose policy is ``reject`` (predict); otherwise (lookup) absent features
                are only filled to be left out of the result.
            elsewhere: features that the request brings elsewhere (its context), so that they are not missing.

        Raises:
            InputError: unknown, repeated or rejected features, wrong dtypes, weights that are missing or not finite.
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise InputError(f"features: got a {type(features).__name__}; expected a KeyedJaggedTensor")
        key = tuple(features.keys())
        order = self._orders.get(key)
        if order is None:
            order = self._new_order(key)
            if len(self._orders) < _MAX_ORDERS:
                self._orders[key] = order
        if need_all and (missing := [name for name in order.rejected if name not in elsewhere]):
            raise InputError(
                f"features {', '.join(map(repr, missing))} are missing; got {_some(key)}; this model needs them"
            )
        self._check_tensors(features)
        if order.low is not None:
            features = self._replace(features, order)
        if order.present is not None:
            if need_all:
                with self._lock:
                    self.missing.update(name for name in order.keys[len(key) :] if name not in elsewhere)
            features = _fill(features, order)
        return TakenFeatures(features, order.present)

    def _new_order(self, keys: tuple[str, ...]) -> _Order:
        unknown = [key for key in keys if key not in self._features]
        if unknown:
            raise InputError(
                f"unknown features {', '.join(map(repr, unknown[:5]))}; this model has {_some(list(self._features))}"
            )
        if len(set(keys)) != len(keys):
            raise InputError(f"features: {_some(keys)} repeats a name; give each feature once")
        if not keys:
            raise InputError(f"features: none given; this model has {_some(list(self._features))}")
        absent = [feature for name, feature in self._features.items() if name not in keys]
        empty = [f.name for f in absent if not isinstance(f.missing, int)]
        default = [(f.name, f.missing) for f in absent if isinstance(f.missing, int)]
        low = high = replacement = None
        if self._replaces:
            mine = [self._features[name] for name in keys]
            low = torch.tensor([0 if f.out_of_range == "default_row" else _INT64.min for f in mine])
            high = torch.tensor([self._highest(f) for f in mine])
            replacement = torch.tensor([f.default_row for f in mine])
        return _Order(
            keys=[*keys, *empty, *(name for name, _ in default)],
            present=frozenset(keys) if absent else None,
            rejected=tuple(f.name for f in absent if f.missing == "reject"),
            empty=len(empty),
            defaults=torch.tensor([row for _, row in default]) if default else None,
            low=low,
            high=high,
            replacement=replacement,
        )

    def _highest(self, feature: FeatureInfo) -> int:
        return self._rows[feature.name] - 1 if feature.out_of_range == "default_row" else _INT64.max

    def _check_tensors(self, features: KeyedJaggedTensor) -> None:
        if features.variable_stride_per_key():
            raise InputError("features: batch sizes differ between features; expected one batch size")
        values = features.values()
        if values.dtype not in (torch.int64, torch.int32) or values.device.type != "cpu":
            raise InputError(f"features: ids are {values.dtype} on {values.device}; expected int64 or int32 on cpu")
        if not self.needs_weights:
            return
        weights = features.weights_or_none()
        if weights is None:
            raise InputError("features: weights are missing; this model's tables are weighted, give one weight per id")
        if weights.dtype != torch.float32:
            raise InputError(f"features: weights are {weights.dtype}; expected float32")
        if not bool(torch.isfinite(weights.sum())) and not bool(torch.isfinite(weights).all()):
            position = int((~torch.isfinite(weights)).nonzero()[0])
            raise InputError(f"features: weight {position} is {float(weights[position])}; expected finite weights")

    def _replace(self, features: KeyedJaggedTensor, order: _Order) -> KeyedJaggedTensor:
        assert order.low is not None and order.high is not None and order.replacement is not None
        values = features.values()
        counts = torch.tensor(features.length_per_key())
        feature_of_id = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=values.numel())
        bad = (values < order.low[feature_of_id]) | (values > order.high[feature_of_id])
        count = int(bad.sum())
        if not count:
            return features
        by_feature = torch.bincount(feature_of_id[bad], minlength=len(counts)).tolist()
        with self._lock:
            self.replaced_ids += count
            self.replaced.update({name: n for name, n in zip(features.keys(), by_feature) if n})
        values = torch.where(bad, order.replacement[feature_of_id].to(values.dtype), values)
        return KeyedJaggedTensor.from_parts_unchecked(
            features.keys(),
            values,
            features.lengths_or_none(),
            offsets=features.offsets_or_none(),
            weights=features.weights_or_none(),
            stride=features.stride(),
        )


def _fill(features: KeyedJaggedTensor, order: _Order) -> KeyedJaggedTensor:
    """Append the absent features: empty bags, then one default id a sample."""
    batch = features.stride()
    lengths, values, weights = features.lengths(), features.values(), features.weights_or_none()
    parts = [lengths, lengths.new_zeros(order.empty * batch)]
    if order.defaults is not None:
        ids = order.defaults.to(values.dtype).repeat_interleave(batch)
        parts.append(lengths.new_ones(ids.numel()))
        values = torch.cat([values, ids])
        if weights is not None:
            weights = torch.cat([weights, weights.new_ones(ids.numel())])
    return KeyedJaggedTensor.from_parts_unchecked(order.keys, values, torch.cat(parts), weights=weights, stride=batch)


def _some(names: Sequence[str], shown: int = 8) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
