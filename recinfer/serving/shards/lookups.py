"""The transport to remote shards: a predictor's lookups, answered by other hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recinfer.archive.delta import Delta
from recinfer.archive.mapping import MappedShards
from recinfer.archive.positions import PositionWeights, read_position_weights
from recinfer.archive.reader import Archive
from recinfer.inference.bags import Bags, merge_bags
from recinfer.inference.direct import DirectTables
from recinfer.inference.lookups import Found, Part, output_names
from recinfer.quant.arranger import FeatureArranger
from recinfer.serving.server.loop import start_on_loop
from recinfer.serving.shards.fanout import Fanout
from recinfer.serving.shards.layout import ModuleLayout, module_layouts
from recinfer.serving.shards.messages import Parts
from recinfer.serving.shards.remote_tables import RemoteTables
from recinfer.serving.shards.split import ModuleSplit, Section
from recinfer.serving.shards.versions import VersionSpec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["MakeLookups", "RemoteLookups", "remote_lookups"]


class RemoteLookups:
    """The tables of one version of an archive, on shard servers. Every call asks all ranks for this one version.

    Args:
        archive: opened for no rank.
        spec: the version; shards prepare it for as long as this lives.
        fanout: who asks.

    Raises:
        ConfigError: the fan-out's settings ask for default rows that the manifest does not allow.
    """

    mapped: MappedShards | None = None
    direct: DirectTables | None = None
    is_remote = True

    def __init__(self, archive: Archive, spec: VersionSpec, fanout: Fanout) -> None:
        manifest = archive.manifest
        fanout.check_manifest(manifest)
        self._fanout = fanout
        self._default_rows = manifest.missing_shards == "default_rows"
        self.spec = fanout.pool.want(spec)
        weights, names = read_position_weights(archive), output_names(manifest)
        layouts = module_layouts(manifest, archive.plan)
        self.ranks = sorted({rank for layout in layouts for rank in layout.ranks})
        self.parts = [_part(layout, names[layout.info.path], weights.get(layout.info.path)) for layout in layouts]
        self._splits = [ModuleSplit(number, layout) for number, layout in enumerate(layouts)]
        self._features = tuple(feature.name for feature in manifest.features)
        self._rows = {name: min(t.rows for t in tables) for name, tables in manifest.feature_tables.items()}
        self._weighted = any(part.needs_weights for part in self.parts)
        self._limits: dict[tuple[str, ...], NDArray[np.uint64]] = {}
        self.away = self._away()

    def _away(self) -> RemoteTables | None:
        (part, *others), split = self.parts, self._splits[0]
        if others or not split.layout.pooled or part.info.is_weighted:
            return None
        return RemoteTables(split, part.names, part.dims, self._rows, self._begin, lambda work: work())

    def _begin(self, batch: int, parts: dict[int, Parts], deadline: float, done: Any) -> None:
        if self._fanout.begin(self.spec.key, batch, parts, deadline, done, default_rows=self._default_rows):
            return
        found = start_on_loop(
            self._fanout.find(self.spec.key, batch, parts, deadline, default_rows=self._default_rows)
        )

        def tell(future: Any) -> None:
            error = future.exception()
            done(*(({}, (), error) if error is not None else (*future.result(), None)))

        found.add_done_callback(tell)

    def can_answer(self) -> bool:
        """See :class:`recinfer.inference.lookups.Lookups`."""
        if self._default_rows and self._fanout.gives_default_rows:
            return True
        return not self._fanout.pool.unreachable(self.ranks, self.spec.key)

    def find(self, requests: Sequence[Bags], present: Set[str] | None) -> Found:
        """See :class:`recinfer.inference.lookups.Lookups`; not on the serving loop itself."""
        return start_on_loop(self._find(requests, present, float("inf"), exact=True)).result()

    def begin(
        self,
        requests: Sequence[Bags],
        present: Set[str] | None,
        deadline: float,
        done: Callable[[Found | None, Exception | None], None],
    ) -> None:
        """See :class:`recinfer.inference.lookups.Lookups`."""

        def tell(future: Any) -> None:
            error = future.exception()
            done(None if error is not None else future.result(), error)

        start_on_loop(self._find(requests, present, deadline)).add_done_callback(tell)

    async def _find(
        self, requests: Sequence[Bags], present: Set[str] | None, deadline: float, *, exact: bool = False
    ) -> Found:
        bags = requests[0]
        if len(requests) > 1:
            bags = merge_bags(requests, self._features, weighted=self._weighted)
        self._check(bags)
        asked: list[tuple[ModuleSplit, Bags, dict[int, Section]] | None] = []
        parts: dict[int, Parts] = {}
        for part, split in zip(self.parts, self._splits):
            if present is not None and present.isdisjoint(part.info.features):
                asked.append(None)
                continue
            mine = _weighed(part, bags)
            sections = split.split(mine)
            asked.append((split, mine, sections))
            for rank, section in sections.items():
                parts.setdefault(rank, []).append(section.parts)
        missing: tuple[int, ...] = ()
        answers: dict[int, list[NDArray[Any]]] = {}
        if parts:
            answers, missing = await self._fanout.find(
                self.spec.key, bags.batch, parts, deadline, exact=exact, default_rows=self._default_rows
            )
        return Found(_joined(asked, answers), missing)

    def _check(self, bags: Bags) -> None:
        """Raises InputError for an id out of range, naming the feature and the place."""
        rows = self._limits.get(bags.keys)
        if rows is None:
            rows = np.array([self._rows[key] for key in bags.keys], np.uint64)
            if len(self._limits) < 256:
                self._limits[bags.keys] = rows
        if not bags.fits(rows):
            FeatureArranger(bags.keys, rows.astype(np.int64).tolist()).check(bags.kjt())


def _joined(
    asked: Sequence[tuple[ModuleSplit, Bags, dict[int, Section]] | None], answers: dict[int, list[NDArray[Any]]]
) -> list[Any]:
    taken = dict.fromkeys(answers, 0)
    parts: list[Any] = []
    for item in asked:
        if item is None:
            parts.append(None)
            continue
        split, mine, sections = item
        found = {}
        for rank in sections:
            if rank in answers:
                found[rank] = answers[rank][taken[rank]]
                taken[rank] += 1
        parts.append(split.join(mine, sections, found))
    return parts


def _part(layout: ModuleLayout, names: list[str], positions: PositionWeights | None) -> Part:
    info = layout.info
    dims = [config.embedding_dim for config in layout.configs for _ in config.feature_names]
    return Part(info, names, dims, positions, tuple(dict.fromkeys(info.features)))


def _weighed(part: Part, bags: Bags) -> Bags:
    """``bags`` with the weights that the module's ids have, or none."""
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
    """See :func:`remote_lookups`.

    Attributes:
        wait: may be changed: later ones are waited for then, or not.
    """

    def __init__(self, fanout: Fanout, store: str | None, wait: bool) -> None:
        self._fanout, self._store, self.wait = fanout, store, wait

    def __call__(self, archive: Archive, deltas: Sequence[Delta] = ()) -> RemoteLookups:
        """The tables of ``archive`` after ``deltas``."""
        made = RemoteLookups(archive, VersionSpec.of(archive, deltas, self._store), self._fanout)
        if self.wait:
            start_on_loop(self._fanout.pool.prepare(made.spec, made.ranks)).result()
        return made


def remote_lookups(fanout: Fanout, store: str | None = None, *, wait: bool = True) -> MakeLookups:
    """What a Predictor takes as ``lookups``.

    Args:
        store: the ranker's model store: paths below it are named from there, as shards find them in theirs.
        wait: have all replicas prepare the version first, and fail when one of them cannot; False: they prepare it when
            they come.
    """

    return MakeLookups(fanout, store, wait)
