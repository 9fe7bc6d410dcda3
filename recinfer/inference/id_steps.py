"""The steps that change a request's ids between its intake and the lookup: one ordered list for every path of a request.

A step is made from an archive and its applied deltas, so that each process that serves the archive runs the same steps, and each
state of a predictor has its own. To add a step, write a class of :class:`IdStep` and a function that makes it, and name the function
in ``STEPS``; its metrics are in ``COUNTS``, and ``SHOWN`` names what ``recinfer inspect`` shows of its part of an archive. The intake
makes rows of strings by ``open_strings``, before the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.check import Request
from recinfer.archive.manifest import Manifest
from recinfer.archive.part import Changes, ShownPart
from recinfer.archive.reader import Archive
from recinfer.errors import InputError
from recinfer.inference.bags import Bags, bags_of, offsets_of
from recinfer.lru import LruCache
from recinfer.quant.bags import BagPlaces
from recinfer.vocabulary.described import shown_strings, shown_vocabularies
from recinfer.vocabulary.step import vocabulary_step
from recinfer.vocabulary.strings import StringRows, open_strings

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = [
    "COUNTS",
    "SHOWN",
    "STEPS",
    "ByteStep",
    "CountReplaced",
    "FeatureCount",
    "IdCounts",
    "IdStep",
    "IdSteps",
    "MakeStep",
    "StringRows",
    "indexed_contract",
    "open_strings",
    "out_of_range",
]

_MAX_ORDERS = 256  # stored orders of keys; clients send few different ones
_INT64 = np.iinfo(np.int64)
_LENGTH_BYTES = 4  # size of a length in a request
_NO_ROW = -1

CountReplaced = Callable[[Mapping[str, int]], None]
"""Counts ids that became the default row, by feature."""


@dataclass(frozen=True)
class FeatureCount:
    """A count by feature. ``metric``, ``help``: of Prometheus; ``outcome``: its label, of a metric that has several counts."""

    metric: str
    help: str
    outcome: str | None = None


_KNOWN = "recinfer_vocabulary_ids", "Ids of features with a vocabulary: known or unknown."
COUNTS = {
    "replaced": FeatureCount("recinfer_out_of_range_ids", "Ids out of range that became the default row."),
    "missing": FeatureCount("recinfer_missing_features", "Predictions that lacked a feature and had it filled in."),
    "known": FeatureCount(*_KNOWN, "known"),
    "unknown": FeatureCount(*_KNOWN, "unknown"),
}
"""The counts of a model by feature, as a server's status names them (:attr:`recinfer.inference.intake.FeatureIntake.counts`)."""


@dataclass(frozen=True, eq=False)
class IdCounts:
    """Counters of what steps did, which all states of a predictor share.

    Attributes:
        replaced: counts ids that became the default row.
        places: feature -> its place in ``found``.
        found: int64 ``[features, 2]``, ids that a step knows and ids that it does not know.
    """

    replaced: CountReplaced
    places: Mapping[str, int]
    found: NDArray[np.int64]


class IdStep(Protocol):
    """Changes ids. Any thread may call it.

    Attributes:
        decoded_only: whether the byte paths may omit the step, since their loops leave each request that it would change to the
            decoded path.
    """

    @property
    def decoded_only(self) -> bool: ...

    def __call__(self, ids: NDArray[Any], keys: tuple[str, ...], edges: NDArray[Any]) -> NDArray[Any]:
        """The ids that the lookup reads in place of ``ids``.

        Args:
            ids: int32 or int64 ``[N]``, read-only.
            keys: features, in the request's order.
            edges: ``[F + 1]``, first id of each feature.

        Returns:
            int32 or int64 ``[N]``: one id per id; ``ids`` if none changes.

        Raises:
            InputError: an id that has no row.
        """
        ...

    @property
    def drops(self) -> Set[str]:
        """Features whose ids may become -1, which stands for no row: the id is left out of its bag then."""
        ...


@runtime_checkable
class ByteStep(Protocol):
    """A step with a compiled form for the byte paths."""

    def from_bytes(self, data: bytes, keys: tuple[str, ...], bags: BagPlaces) -> bytes | None:
        """The bytes of the lengths and of the new ids, int64, of bags in ``data``; None where the decoded path has to answer."""
        ...


MakeStep = Callable[[Archive, Sequence[Changes], IdCounts], "IdStep | None"]
"""Makes a step of an archive and its applied deltas; None if the archive has no use for it."""


class IdSteps:
    """The steps of one archive in one state, in the order of ``STEPS``.

    Args:
        archive: with the deltas applied.
        deltas: the applied deltas.
        counts: the counters.

    Attributes:
        in_bytes: whether the byte paths have to run steps (:meth:`rewrite`).
    """

    def __init__(self, archive: Archive, deltas: Sequence[Changes], counts: IdCounts) -> None:
        self._steps = [step for make in STEPS if (step := make(archive, deltas, counts)) is not None]
        self._byte_steps = [step for step in self._steps if not step.decoded_only]
        self._drops = frozenset(feature for step in self._steps for feature in step.drops)
        self.in_bytes = bool(self._byte_steps)
        only = self._byte_steps[0] if len(self._byte_steps) == 1 else None
        self._from_bytes = only.from_bytes if isinstance(only, ByteStep) else None

    def apply(self, features: Bags) -> Bags:
        """The features with the ids that the lookup reads; raises InputError for an id that has no row."""
        if not self._steps or not features.values.size:
            return features
        edges = features.offsets[:: features.batch]
        ids = _run(self._steps, features.values, features.keys, edges)
        if ids is features.values:
            return features
        offsets = features.offsets.astype(ids.dtype, copy=False)
        changed = Bags(features.keys, features.batch, offsets, ids, features.weights)
        return _without_dropped(changed, self._drops) if self._drops else changed

    def looked_up(self, request: Request) -> Request:
        """``request`` with the ids that lookups read in place of its own."""
        if not self._steps:
            return request
        return Request(request.dense, self.apply(bags_of(request.features)).kjt(), request.inputs)

    def rewrite(
        self, data: bytes, parts: Sequence[tuple[tuple[str, ...], BagPlaces]]
    ) -> tuple[bytes, list[BagPlaces]] | None:
        """New bytes with the lengths and the new ids of bags in ``data``, and their places there.

        Args:
            data: a request.
            parts: keys and places of its bags, and of its context's bags.

        Returns:
            None where the decoded path has to answer: lengths that do not sum up to the ids, or an id that has no row.
        """
        pieces: list[bytes] = []
        places: list[BagPlaces] = []
        size = 0
        for keys, bags in parts:
            if self._from_bytes is not None and not (self._drops and self._drops.intersection(keys)):
                compiled = self._from_bytes(data, keys, bags)
                if compiled is None:
                    return None
                pieces.append(compiled)
                size += len(compiled)
                ids_at = size - 8 * bags.ids
                lengths_at = size - len(compiled)
                places.append(BagPlaces(lengths_at, ids_at, bags.ids, True, bags.keys, bags.batch))
                continue
            ids = np.frombuffer(data, np.int64 if bags.wide else np.int32, bags.ids, bags.ids_at)
            lengths = np.frombuffer(data, np.int32, bags.keys * bags.batch, bags.lengths_at).reshape(
                bags.keys, bags.batch
            )
            edges = np.concatenate(([0], lengths.sum(1, dtype=np.int64).cumsum()))
            if edges[-1] != bags.ids or (lengths < 0).any():
                return None
            try:
                changed = _run(self._byte_steps, ids, keys, edges)
            except InputError:
                return None
            if not self._drops.isdisjoint(keys) and (changed == _NO_ROW).any():
                return None
            lengths_size = lengths.size * _LENGTH_BYTES
            pieces += [
                data[bags.lengths_at : bags.lengths_at + lengths_size],
                changed.astype(np.int64, copy=False).tobytes(),
            ]
            places.append(bags._replace(lengths_at=size, ids_at=size + lengths_size, wide=True))
            size += lengths_size + 8 * bags.ids
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), places


def _without_dropped(features: Bags, drops: Set[str]) -> Bags:
    """The features without the ids of ``drops`` that have no row."""
    kept = features.values != _NO_ROW
    edges = features.offsets[:: features.batch].tolist()
    for place, key in enumerate(features.keys):
        if key not in drops:
            kept[edges[place] : edges[place + 1]] = True
    if kept.all():
        return features
    offsets = offsets_of(kept, features.values.dtype)[features.offsets]
    weights = None if features.weights is None else features.weights[kept]
    return Bags(features.keys, features.batch, offsets, features.values[kept], weights)


def _run(steps: Sequence[IdStep], ids: NDArray[Any], keys: tuple[str, ...], edges: NDArray[Any]) -> NDArray[Any]:
    for step in steps:
        ids = step(ids, keys, edges)
    return ids


class _OutOfRange:
    """Replaces ids outside the table by the feature's default row, where the archive was exported with that policy."""

    decoded_only = True
    drops: frozenset[str] = frozenset()

    def __init__(self, manifest: Manifest, count: CountReplaced) -> None:
        rows = {name: min(t.rows for t in tables) for name, tables in manifest.feature_tables.items()}
        self._default = {f.name: f.default_row for f in manifest.features if f.out_of_range == "default_row"}
        self._rows = {name: rows[name] for name in self._default}
        self._count = count
        self._orders: LruCache[tuple[str, ...], tuple[NDArray[np.int64], ...]] = LruCache(_MAX_ORDERS)

    def __call__(self, ids: NDArray[Any], keys: tuple[str, ...], edges: NDArray[Any]) -> NDArray[Any]:
        """See :class:`IdStep`."""
        bounds = self._orders[keys]
        if bounds is None:
            bounds = self._orders[keys] = self._bounds(keys)
        low, high, replacement = bounds
        counts = np.diff(edges)
        feature_of_id = np.repeat(np.arange(len(counts)), counts)
        bad = (ids < low[feature_of_id]) | (ids > high[feature_of_id])
        if not bad.any():
            return ids
        by_feature = np.bincount(feature_of_id[bad], minlength=len(counts)).tolist()
        self._count({name: n for name, n in zip(keys, by_feature) if n})
        return np.where(bad, replacement[feature_of_id].astype(ids.dtype), ids)

    def _bounds(self, keys: tuple[str, ...]) -> tuple[NDArray[np.int64], ...]:
        """Smallest and largest allowed id and the replacement per key; a key without the policy allows all ids."""
        low = [0 if key in self._default else _INT64.min for key in keys]
        high = [self._rows[key] - 1 if key in self._default else _INT64.max for key in keys]
        replacement = [self._default.get(key, 0) for key in keys]
        return np.array(low, np.int64), np.array(high, np.int64), np.array(replacement, np.int64)


def out_of_range(archive: Archive, deltas: Sequence[Changes], counts: IdCounts) -> IdStep | None:
    """Makes the step of ``recinfer export --out-of-range FEATURE=default``."""
    if all(feature.out_of_range != "default_row" for feature in archive.manifest.features):
        return None
    return _OutOfRange(archive.manifest, counts.replaced)


def indexed_contract(contract: FeatureContract, strings: StringRows) -> FeatureContract:
    """The contract whose texts become rows as the strings of requests do.

    Raises:
        ArchiveError: V9, for texts that are not the archive's strings.
    """
    from recinfer.vocabulary import plain  # a server without a contract does not need recinfer.data

    return plain.indexed_contract(contract, strings)


STEPS: list[MakeStep] = [vocabulary_step, out_of_range]
"""Makes the steps of an archive, in their order."""
SHOWN: list[Callable[[Archive], ShownPart]] = [shown_vocabularies, shown_strings]
"""Describes the parts of an archive that steps read."""
