"""What each rank has of each embedding module, as both ends of the wire derive it from the same plan.

A rank's *streams* are what it is sent: one for each feature and range of rows that it has. Column pieces of a table on one
rank read the same stream. Its *pairs* (feature, shard) are what it looks up, in RankOrder's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recinfer.archive.manifest import Manifest, ModuleInfo
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.distributed.quant_layout import PackedShard, RankOrder
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, PoolingType

__all__ = ["ModuleLayout", "RankModule", "Stream", "module_layouts", "rank_shards"]


@dataclass(frozen=True)
class Stream:
    """One feature's ids in rows ``row_start`` to ``row_stop`` of its table; ``whole``: the table has no other rows."""

    feature: str
    row_start: int
    row_stop: int
    whole: bool

    @property
    def rows(self) -> int:
        """Height."""
        return self.row_stop - self.row_start


@dataclass(frozen=True)
class RankModule:
    """One rank's part of one module.

    Attributes:
        order: its pairs and the output columns they give.
        streams: what it is sent.
        stream_of: of each pair, its stream.
        pooling: what the rank does to bags: MEAN where nobody else has rows of its tables and all of them are MEAN,
            else SUM, which the ranker divides; NONE for unpooled ones.
    """

    rank: int
    order: RankOrder
    streams: tuple[Stream, ...]
    stream_of: tuple[int, ...]
    pooling: PoolingType

    @property
    def cuts_rows(self) -> bool:
        """Whether it has only some rows of a table."""
        return not all(stream.whole for stream in self.streams)


@dataclass(frozen=True)
class ModuleLayout:
    """One embedding module over all ranks; ``ranks`` only those that have a part of it."""

    info: ModuleInfo
    configs: Sequence[BaseEmbeddingConfig]
    ranks: dict[int, RankModule]

    @property
    def pooled(self) -> bool:
        """One vector a bag, not one an id."""
        return self.info.kind == "pooled"


def rank_shards(plan: Plan) -> dict[tuple[str, int], list[PackedShard]]:
    """(module, rank) -> its shards, without offsets. A replicated table is asked of one rank, each of another one."""
    found: dict[tuple[str, int], list[PackedShard]] = {}
    for number, table in enumerate(plan.tables):
        for rank, rect in _owned(table, number):
            shard = PackedShard(table.table, rect[0], rect[1], rect[2], rect[3], rank, 0)
            found.setdefault((table.module, rank), []).append(shard)
    return found


def _owned(table: TablePlan, number: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    rects = [(s.rank, (s.row_start, s.row_stop, s.col_start, s.col_stop)) for s in table.shards if s.rows]
    if table.sharding_type == "data_parallel":
        return [rects[number % len(rects)]]
    return rects


def module_layouts(manifest: Manifest, plan: Plan) -> list[ModuleLayout]:
    """The layout of every module, in the manifest's order."""
    shards = rank_shards(plan)
    layouts = []
    for info in manifest.modules:
        configs = manifest.configs(info.path)
        ranks = {
            rank: _rank_module(rank, configs, mine, info.kind == "pooled")
            for (path, rank), mine in sorted(shards.items())
            if path == info.path
        }
        layouts.append(ModuleLayout(info, configs, ranks))
    return layouts


def _rank_module(
    rank: int, configs: Sequence[BaseEmbeddingConfig], shards: Sequence[PackedShard], pooled: bool
) -> RankModule:
    order = RankOrder(configs, shards)
    by_name = {config.name: config for config in configs}
    streams: dict[tuple[str, int, int, bool], int] = {}
    stream_of = []
    for feature, shard in zip(order.names, order.shards):
        whole = shard.rows == by_name[shard.table].num_embeddings
        # Whole tables of two heights that read one feature share its ids: those were checked against the lower one.
        key = (feature, 0, 0, True) if whole else (feature, shard.row_start, shard.row_stop, False)
        stream_of.append(streams.setdefault(key, len(streams)))
    found = []
    for place, (feature, start, stop, whole) in enumerate(streams):
        if whole:
            stop = min(s.rows for s, k in zip(order.shards, stream_of) if k == place)
        found.append(Stream(feature, start, stop, whole))
    poolings = {by_name[shard.table].pooling for shard in shards} if pooled else {PoolingType.NONE}  # type: ignore[attr-defined]
    means = poolings == {PoolingType.MEAN} and all(stream.whole for stream in found)
    pooling = PoolingType.NONE if not pooled else PoolingType.MEAN if means else PoolingType.SUM
    return RankModule(rank, order, tuple(found), tuple(stream_of), pooling)
