"""The parts of each embedding module that each rank has, derived from the plan by both ends of the wire.

A rank's *streams* are the lists of ids that it receives: one for each feature and range of rows on the rank. Column pieces of
a table on one rank read the same stream. Its *pairs* (feature, rectangle) are its lookups: the module's features in order, for
each the rank's rectangles of its table from left to right, from top to bottom. Both ends of the wire rely on that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recinfer.archive.manifest import Manifest, ModuleInfo
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, PoolingType

__all__ = ["ModuleLayout", "Pair", "RankModule", "Stream", "module_layouts"]


@dataclass(frozen=True)
class Stream:
    """One feature's ids in rows ``row_start`` to ``row_stop`` of its table; ``whole``: the table has no other rows."""

    feature: str
    row_start: int
    row_stop: int
    whole: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_stop - self.row_start


@dataclass(frozen=True)
class Pair:
    """One feature read from one rectangle.

    Attributes:
        number: number of the feature in the module.
        rect: rectangle of the feature's table.
        stream: number of the stream with its ids.
    """

    number: int
    rect: Rect
    stream: int


@dataclass(frozen=True)
class RankModule:
    """One rank's part of one module.

    Attributes:
        pairs: its lookups.
        streams: the lists of ids that it receives.
        pooling: the rank's pooling: MEAN if no other rank has rows of its tables and all these tables are MEAN,
            else SUM, which the ranker divides; NONE for an unpooled module.
    """

    rank: int
    pairs: tuple[Pair, ...]
    streams: tuple[Stream, ...]
    pooling: PoolingType

    @property
    def cuts_rows(self) -> bool:
        """Whether the rank has only some rows of a table."""
        return not all(stream.whole for stream in self.streams)


@dataclass(frozen=True)
class ModuleLayout:
    """One embedding module over all ranks; ``ranks`` holds the ranks that have a part of the module."""

    info: ModuleInfo
    configs: Sequence[BaseEmbeddingConfig]
    ranks: dict[int, RankModule]

    @property
    def pooled(self) -> bool:
        """Whether the module returns one vector per bag, instead of one per id."""
        return self.info.kind == "pooled"


def _lookup_rects(table: TablePlan, number: int) -> list[Rect]:
    """The rectangles for lookups in a table. One rank serves all lookups in a replicated table, another rank for each table."""
    rects = [rect for rect in table.shards if rect.rows]
    return [rects[number % len(rects)]] if table.sharding_type == "data_parallel" else rects


def module_layouts(manifest: Manifest, plan: Plan) -> list[ModuleLayout]:
    """The layout of every module, in the manifest's order."""
    rects: dict[tuple[str, int], list[Rect]] = {}
    for number, table in enumerate(plan.tables):
        for rect in _lookup_rects(table, number):
            rects.setdefault((table.module, rect.rank), []).append(rect)
    layouts = []
    for info in manifest.modules:
        configs = manifest.configs(info.path)
        ranks = {
            rank: _rank_module(rank, configs, mine, info.kind == "pooled")
            for (path, rank), mine in sorted(rects.items(), key=lambda found: found[0])
            if path == info.path
        }
        layouts.append(ModuleLayout(info, configs, ranks))
    return layouts


def _rank_module(rank: int, configs: Sequence[BaseEmbeddingConfig], rects: Sequence[Rect], pooled: bool) -> RankModule:
    by_table: dict[str, list[Rect]] = {}
    for rect in sorted(rects, key=lambda r: (r.col_start, r.row_start)):
        by_table.setdefault(rect.table, []).append(rect)
    pairs: list[Pair] = []
    streams: dict[tuple[str, int, int, bool], int] = {}
    number = 0
    for config in configs:
        for feature in config.feature_names:
            for rect in by_table.get(config.name, ()):
                whole = rect.rows == config.num_embeddings
                # Whole tables of two heights that read one feature share its ids, which were checked against the lower table.
                key = (feature, 0, 0, True) if whole else (feature, rect.row_start, rect.row_stop, False)
                stream = streams.setdefault(key, len(streams))
                pairs.append(Pair(number, rect, stream))
            number += 1
    found = []
    for place, (feature, start, stop, whole) in enumerate(streams):
        if whole:
            stop = min(pair.rect.rows for pair in pairs if pair.stream == place)
        found.append(Stream(feature, start, stop, whole))
    poolings = {c.pooling for c in configs if c.name in by_table} if pooled else {PoolingType.NONE}  # type: ignore[attr-defined]
    means = poolings == {PoolingType.MEAN} and all(stream.whole for stream in found)
    pooling = PoolingType.NONE if not pooled else PoolingType.MEAN if means else PoolingType.SUM
    return RankModule(rank, tuple(pairs), tuple(found), pooling)
