"""Prepares a request's features for lookup: checks them, runs the id steps and fills in missing ones.

Everything that depends on the names alone is computed once per order of keys; the rest is a few array ops.
Shape suffixes: F features, B batch, N ids.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from recinfer.archive.manifest import FeatureInfo, Manifest
from recinfer.archive.part import Changes
from recinfer.archive.reader import Archive
from recinfer.errors import InputError
from recinfer.excerpts import some
from recinfer.inference.bags import Bags, offsets_of
from recinfer.inference.id_steps import IdCounts, IdSteps, StringRows, indexed_contract, open_strings
from recinfer.lru import LruCache

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["FeatureIntake", "TakenFeatures"]

_MAX_ORDERS = 256  # stored orders of keys; clients send few different ones


@dataclass(frozen=True)
class TakenFeatures:
    """Features ready to look up; others are empty bags. ``present``: the features of the request, None for all."""

    features: Bags
    present: frozenset[str] | None


@dataclass(frozen=True)
class _Order:
    """The prepared mapping for one order of keys."""

    absent: tuple[str, ...]  # features that become empty bags, unless ``defaults`` has them
    defaults: dict[str, int]  # absent features with one default id per sample
    present: frozenset[str] | None
    rejected: tuple[str, ...]  # absent features that predict refuses


class FeatureIntake:
    """Checks and completes the features of requests. Safe from any thread.

    Attributes:
        names: all features, in the archive's order.
        weighted: features whose ids may have weights; an id without one weighs 1.
        needs_weights: whether there are any.
        replaced: ids out of range that became the default row, since the start, by feature.
        missing: predictions that lacked a feature and had it filled, by feature.
        steps: change the ids of requests before the lookup; of one state, see :meth:`at`.
        strings: the rows of strings; the same in all states, as deltas leave these unchanged.
    """

    steps: IdSteps
    strings: StringRows | None = None

    def __init__(self, manifest: Manifest) -> None:
        by_name = {feature.name: feature for feature in manifest.features}
        self._features = {n: by_name.get(n) or FeatureInfo(n, "reject", "reject", 0) for n in manifest.request_features}
        self._computes_ids = manifest.signature is not None and manifest.signature.ids is not None
        self.names = tuple(self._features)
        self.weighted = manifest.weighted_features
        self.needs_weights = bool(self.weighted)
        self._orders: LruCache[tuple[str, ...], _Order] = LruCache(_MAX_ORDERS)
        self.replaced: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self._lock = threading.Lock()
        read = list(dict.fromkeys([*manifest.feature_tables, *manifest.request_features]))
        self._counts = IdCounts(
            self.count_replaced, {name: at for at, name in enumerate(read)}, np.zeros((len(read), 2), np.int64)
        )
        counted = manifest.raw_features | manifest.string_features
        self._counted = [name for name in read if name in counted]

    def at(self, archive: Archive, deltas: Sequence[Changes]) -> FeatureIntake:
        """The intake of a state of the archive: its own steps, and the counters of all states.

        Raises:
            ArchiveError: a step cannot be made from the archive.
        """
        state = copy.copy(self)
        state.steps = IdSteps(archive, deltas, self._counts)
        if self.strings is None:
            state.strings = open_strings(archive, self._counts)
        return state

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The counts of :data:`recinfer.inference.id_steps.COUNTS` since the start, by feature."""
        found = {name: self._counts.found[self._counts.places[name]].tolist() for name in self._counted}
        return {
            "replaced": {name: self.replaced[name] for name in self.names},
            "missing": {name: self.missing[name] for name in self.names},
            "known": {name: known for name, (known, _) in found.items()},
            "unknown": {name: unknown for name, (_, unknown) in found.items()},
        }

    def take(
        self, features: Bags, *, need_all: bool, elsewhere: Set[str] = frozenset(), fill: bool = True
    ) -> TakenFeatures:
        """Check and complete the features of a request.

        Args:
            features: keys in any order.
            need_all: refuse absent features whose policy is ``"reject"`` (predict); otherwise (lookup) absent features
                are only filled to be left out of the result.
            elsewhere: features that the request brings elsewhere (its context), so that they are not missing.
            fill: give absent features their default ids; False for a context.

        Raises:
            InputError: unknown, repeated or rejected features, weights that are not finite or of a feature that takes none.
        """
        key = features.keys
        if not key and self._features and not elsewhere:
            raise InputError(f"features: got none; this model has {some(list(self._features))}")
        order = self._orders[key]
        if order is None:
            order = self._orders[key] = self._new_order(key)
        if need_all and order.rejected and (missing := [name for name in order.rejected if name not in elsewhere]):
            raise InputError(_missing_message(missing, (*key, *sorted(elsewhere))))
        if features.strings is not None:
            features = self.with_rows(features)
        if features.weighted and (strange := [key for key in features.weighted if key not in self.weighted]):
            which = some(sorted(self.weighted)) if self.weighted else "none"
            raise InputError(f"weights[{strange[0]!r}]: this feature takes no weights; features with weights: {which}")
        if self.needs_weights:
            if features.weights is None:
                features = replace(features, weights=np.ones(features.values.size, np.float32))
            _check_weights(features)
        if not self._computes_ids:  # otherwise the steps follow the ids program
            features = self.steps.apply(features)
        if order.absent:
            if need_all:
                with self._lock:
                    self.missing.update(name for name in order.absent if name not in elsewhere)
            if order.defaults and fill:
                features = _fill(features, {k: row for k, row in order.defaults.items() if k not in elsewhere})
        return TakenFeatures(features, order.present)

    def contract(self, manifest: Manifest) -> FeatureContract | None:
        """The archive's feature contract, whose texts become rows by the archive's indexes; None without one."""
        if manifest.contract is None:
            return None
        from recinfer.data.contract import FeatureContract

        contract = FeatureContract.from_dict(manifest.contract)
        return contract if self.strings is None else indexed_contract(contract, self.strings)

    def with_rows(self, features: Bags) -> Bags:
        """The features with the row of each string; raises InputError for strings of a feature that takes integers."""
        strings = features.strings
        if strings is None:
            return features
        assert self.strings is not None
        edges = dict(zip(features.keys, pairwise(features.offsets[:: features.batch].tolist())))
        places = [edges[key] for key in strings.keys]
        rows = self.strings.rows(strings, [stop - start for start, stop in places])
        values, at = features.values.astype(np.int64), 0
        for start, stop in places:
            values[start:stop] = rows[at : at + stop - start]
            at += stop - start
        return replace(features, values=values, offsets=features.offsets.astype(np.int64), strings=None)

    def _new_order(self, keys: tuple[str, ...]) -> _Order:
        unknown = [key for key in keys if key not in self._features]
        if unknown:
            raise InputError(
                f"unknown features {', '.join(map(repr, unknown[:5]))}; this model has {some(list(self._features))}"
            )
        if len(set(keys)) != len(keys):
            raise InputError(f"features: {some(keys)} contains a name twice; give each feature once")
        absent = [feature for name, feature in self._features.items() if name not in keys]
        return _Order(
            absent=tuple(f.name for f in absent),
            defaults={f.name: f.missing for f in absent if isinstance(f.missing, int)},
            present=frozenset(keys) if absent else None,
            rejected=tuple(f.name for f in absent if f.missing == "reject"),
        )

    def count_replaced(self, by_feature: Mapping[str, int]) -> None:
        """Count out-of-range ids that were replaced by the default row, here or when raw rows were converted."""
        with self._lock:
            self.replaced.update(by_feature)


def _check_weights(features: Bags) -> None:
    weights = features.weights
    assert weights is not None
    # A NaN or an infinity makes the sum non-finite. Finite weights whose sum overflows are checked one by one.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(weights)
    if not np.isfinite(total) and not np.isfinite(weights).all():
        at = int(np.argmin(np.isfinite(weights)))
        bag = int(np.searchsorted(features.offsets, at, side="right")) - 1
        key, sample = features.keys[bag // features.batch], bag % features.batch
        place = f"feature {key!r}, sample {sample}: weight {at - int(features.offsets[bag])}"
        raise InputError(f"{place} is {float(weights[at])}; expected finite weights")


def _fill(features: Bags, defaults: Mapping[str, int]) -> Bags:
    """Append missing features whose policy is one default id per sample."""
    batch, weights = features.batch, features.weights
    ids = np.repeat(np.array(list(defaults.values()), features.values.dtype), batch)
    lengths = np.concatenate((features.lengths_FB.reshape(-1), np.ones(ids.size, ids.dtype)))
    if weights is not None:
        weights = np.concatenate((weights, np.ones(ids.size, np.float32)))
    values = np.concatenate((features.values, ids))
    return Bags((*features.keys, *defaults), batch, offsets_of(lengths, ids.dtype), values, weights)


def _missing_message(missing: Sequence[str], given: Sequence[str]) -> str:
    return (
        f"missing features: {some(list(map(repr, missing)), 20)}; got {some(given)}. Predict needs all features: "
        f"send an empty list for a sample without ids, or export with --missing {missing[0]}=empty to make the "
        f"feature optional"
    )
