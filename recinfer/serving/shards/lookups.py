"""A predictor's lookups in tables on other hosts, as a fan-out to their shard servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from recinfer.archive.delta import Delta
from recinfer.archive.mapping import MappedShards
from recinfer.archive.positions import PositionWeights, read_position_weights
from recinfer.archive.reader import Archive
from recinfer.inference.bags import Bags, merge_bags
from recinfer.inference.lookups import NO_TRACE, Found, FoundCallback, Part, output_names
from recinfer.lru import LruCache
from recinfer.quant.arranger import FeatureArranger
from recinfer.serving.shards.fan_out import FanOut, waited_for
from recinfer.serving.shards.fan_out_request import ShardQuery, begin_fan_out
from recinfer.serving.shards.messages import Answers, Parts
from recinfer.serving.shards.rank_modules import ModuleLayout, module_layouts
from recinfer.serving.shards.remote_tables import RemoteTables
from recinfer.serving.shards.split import ModuleSplit, Section
from recinfer.serving.shards.versions import VersionSpec
from recinfer.serving.wire.loop import run_on_loop
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["MakeLookups", "RemoteLookups"]

_MAX_ORDERS = 256  # cached orders of keys; clients send a handful


class _ModuleRequest(NamedTuple):
    """One module's part of a request: its bags, and each rank's section of them."""

    split: ModuleSplit
    bags: Bags
    sections: dict[int, Section]


class RemoteLookups:
    """The tables of one version of an archive, on shard servers. Every call looks up in this one version on all ranks.

    Any thread may call it, but :meth:`find` waits for the shard servers.

    Args:
        archive: opened for no rank.
        spec: the version; shard servers keep it prepared for as long as this object lives.
        fan_out: calls the shard servers.

    Raises:
        ConfigError: the fan-out's settings request default rows that the manifest does not allow.
    """

    mapped: MappedShards | None = None
    waits = True

    def __init__(self, archive: Archive, spec: VersionSpec, fan_out: FanOut) -> None:
        manifest = archive.manifest
        fan_out.check_manifest(manifest)
        self._fan_out = fan_out
        self._default_rows = manifest.missing_shards == "default_rows"
        self.spec = fan_out.pool.want(spec)
        weights, names = read_position_weights(archive), output_names(manifest)
        layouts = module_layouts(manifest, archive.plan)
        self.ranks = sorted({rank for layout in layouts for rank in layout.ranks})
        self.parts = [_part(layout, names[layout.info.path], weights.get(layout.info.path)) for layout in layouts]
        self._splits = [ModuleSplit(number, layout) for number, layout in enumerate(layouts)]
        self._features = tuple(feature.name for feature in manifest.features)
        self._rows = {name: min(t.rows for t in tables) for name, tables in manifest.feature_tables.items()}
        self._weighted = any(part.needs_weights for part in self.parts)
        self._limits: LruCache[tuple[str, ...], NDArray[np.uint64]] = LruCache(_MAX_ORDERS)
        self.byte_tables = self._byte_tables()

    def _byte_tables(self) -> RemoteTables | None:
        (part, *others), split = self.parts, self._splits[0]
        if others or not split.layout.pooled or part.info.is_weighted:
            return None
        return RemoteTables(
            split,
            part.names,
            part.dims,
            self._rows,
            self._fan_out,
            self.spec.key,
            default_rows=self._default_rows,
        )

    def can_answer(self) -> bool:
        """See :class:`recinfer.inference.lookups.Lookups`."""
        if self._default_rows and self._fan_out.gives_default_rows:
            return True
        return not self._fan_out.pool.unreachable(self.ranks, self.spec.key)

    def find(self, requests: Sequence[Bags], present: Set[str] | None) -> Found:
        """See :class:`recinfer.inference.lookups.Lookups`; not on the transport's thread."""
        begin = functools.partial(self._begin, requests, present, float("inf"))
        return cast(Found, waited_for(begin).result())

    def begin(
        self,
        requests: Sequence[Bags],
        present: Set[str] | None,
        deadline: float,
        done: FoundCallback,
        trace: Mapping[str, str] = NO_TRACE,
    ) -> None:
        """:meth:`find` without waiting; ``deadline`` is a time of ``time.monotonic()``.

        Args:
            done: called once: on this thread if an id is out of range, else on the transport's thread.
        """
        try:
            self._begin(requests, present, deadline, done, trace)
        except Exception as error:
            done(None, error)

    def _begin(
        self,
        requests: Sequence[Bags],
        present: Set[str] | None,
        deadline: float,
        done: FoundCallback,
        trace: Mapping[str, str] = NO_TRACE,
    ) -> None:
        """Begin the fan-out; raises InputError for errors in the requests themselves."""
        bags = requests[0]
        if len(requests) > 1:
            bags = merge_bags(requests, self._features, weighted=self._weighted)
        elif len(known := tuple(key for key in bags.keys if key in self._rows)) < len(bags.keys):
            bags = bags.arranged(known)  # without features that the dense program alone reads
        self._check(bags)
        modules: list[_ModuleRequest | None] = []
        parts: dict[int, Parts] = {}
        sections: dict[int, list[tuple[ModuleSplit, Section]]] = {}
        for part, split in zip(self.parts, self._splits):
            if present is not None and present.isdisjoint(part.info.features):
                modules.append(None)
            else:
                mine = _with_module_weights(part, bags)
                module = _ModuleRequest(split, mine, split.split(mine))
                modules.append(module)
                for rank, section in module.sections.items():
                    parts.setdefault(rank, []).append(section.parts)
                    sections.setdefault(rank, []).append((split, section))

        def fits(rank: int, arrays: list[NDArray[Any]]) -> bool:
            return all(s.fits(rank, section, bags.batch, a) for (s, section), a in zip(sections[rank], arrays))

        def joined(answers: Answers, missing: tuple[int, ...], error: Exception | None) -> None:
            found = None
            try:
                if error is None:
                    found = Found(_join_modules(modules, answers), missing)
            except Exception as wrong:  # a bug of recinfer: else the request would never end
                error = wrong
            done(found, error)

        query = ShardQuery(self.spec.key, bags.batch, parts, deadline, self._default_rows, fits, trace)
        begin_fan_out(self._fan_out, query, joined)

    def _check(self, bags: Bags) -> None:
        """Raise InputError for an id out of range; the message names the feature and the place."""
        rows = self._limits[bags.keys]
        if rows is None:
            rows = self._limits[bags.keys] = np.array([self._rows[key] for key in bags.keys], np.uint64)
        if not bags.fits(rows):
            FeatureArranger(bags.keys, rows.astype(np.int64).tolist()).check(bags.kjt())


def _join_modules(modules: Sequence[_ModuleRequest | None], answers: Answers) -> list[Any]:
    taken = dict.fromkeys(answers, 0)
    parts: list[Any] = []
    for module in modules:
        if module is None:
            parts.append(None)
            continue
        found = {}
        for rank in module.sections:
            if rank in answers:
                found[rank] = answers[rank][taken[rank]]
                taken[rank] += 1
        parts.append(module.split.join(module.bags, module.sections, found))
    return parts


def _part(layout: ModuleLayout, names: list[str], positions: PositionWeights | None) -> Part:
    info = layout.info
    dims = [config.embedding_dim for config in layout.configs for _ in config.feature_names]
    return Part(info, names, dims, positions, tuple(dict.fromkeys(info.features)))


def _with_module_weights(part: Part, bags: Bags) -> Bags:
    """``bags`` with the weights of the module's ids: by position, from the request, or none for an unweighted module."""
    if part.positions is not None:
        mine = bags.arranged(part.order)
        features = KeyedJaggedTensor.from_parts_unchecked(
            list(mine.keys),
            torch.from_numpy(mine.values),
            None,
            offsets=torch.from_numpy(mine.offsets),
            stride=mine.batch,
        )
        weights = part.positions.apply(features).weights().numpy()
        return Bags(mine.keys, mine.batch, mine.offsets, mine.values, weights)
    if bags.weights is None or part.info.is_weighted:
        return bags
    return Bags(bags.keys, bags.batch, bags.offsets, bags.values)


class MakeLookups:
    """Makes the ``lookups`` of a Predictor. Any thread except the serving loop's may call it, as a call may wait for
    shard servers.

    Args:
        store: the ranker's model store: paths are sent relative to it, and shard servers look for them in their own store.
        wait: have all replicas prepare the version first, and fail if a replica cannot; False: replicas prepare the version
            later. The attribute may be changed for later calls.
        folder_of: SHA-256 of a manifest -> the archive's folder in the store, where archives are elsewhere on this host.
    """

    def __init__(
        self,
        fan_out: FanOut,
        store: str | None = None,
        *,
        wait: bool = True,
        folder_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._fan_out = fan_out
        self._store = store
        self._folder_of = folder_of
        self.wait = wait

    def __call__(self, archive: Archive, deltas: Sequence[Delta] = ()) -> RemoteLookups:
        """The tables of ``archive`` after ``deltas``."""
        folder = self._folder_of(archive.manifest_sha256)
        made = RemoteLookups(archive, VersionSpec.of(archive, deltas, self._store, folder), self._fan_out)
        if self.wait:
            run_on_loop(self._fan_out.pool.prepare(made.spec, made.ranks))
        return made
