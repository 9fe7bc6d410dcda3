"""Models with every pooling, precision and kind of shard, as archives for several hosts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from recinfer.serving.shards._ranks import join
from torch import Tensor, nn

from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan, embedding_tables
from recinfer.inference.export import export_archive
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.bags import BagPlaces
from recinfer.serving.shards.rank_modules import ModuleLayout
from recinfer.serving.shards.rank_structs import PACKED_ANSWER, RankAnswer, spans_of
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import rectangles
from tests.kept import kept

ROWS = {"a": 53, "b": 301, "c": 301, "d": 97, "e": 40, "f": 211, "g": 17}
KINDS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)


class Mixed(nn.Module):
    """A module that sums and means, one of means alone, and unpooled tables unless ids have weights."""

    def __init__(self, is_weighted: bool = False) -> None:
        super().__init__()
        first = [
            EmbeddingBagConfig(53, 12, "t_a", feature_names=["a"]),
            EmbeddingBagConfig(301, 16, "t_b", feature_names=["b", "c"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(97, 20, "t_d", feature_names=["d"]),
        ]
        means = [EmbeddingBagConfig(40, 8, "t_e", feature_names=["e"], pooling=PoolingType.MEAN)]
        self.first = EmbeddingBagCollection(tables=first, is_weighted=is_weighted)
        self.means = EmbeddingBagCollection(tables=means, is_weighted=is_weighted)
        if not is_weighted:
            tables = [
                EmbeddingConfig(211, 8, "t_f", feature_names=["f"]),
                EmbeddingConfig(17, 8, "t_g", feature_names=["g"]),
            ]
            self.words = EmbeddingCollection(tables=tables)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        """Something of everything."""
        found = self.first(kjt).values().sum(1) + self.means(kjt).values().sum(1)
        if hasattr(self, "words"):
            words = self.words(kjt)
            found = found + (words["f"].to_padded_dense(3) + words["g"].to_padded_dense(3)).sum((1, 2))
        return found


def rectangles_of(kind: str, rows: int, dim: int, number: int) -> tuple[ShardRect, ...]:
    """Three ranks; the two-level types as if ranks 0 and 1 were one host."""
    if kind == "table_row_wise":
        half = -(-rows // 2)
        return (ShardRect(0, 0, half, 0, dim), ShardRect(1, half, rows, 0, dim))
    if kind == "table_column_wise":  # two pieces on one rank
        return tuple(
            ShardRect(r, 0, rows, c * 4, min(dim, c * 4 + 4)) for c, r in zip(range(-(-dim // 4)), (2, 0, 2, 1, 0))
        )
    if kind == "data_parallel":
        return tuple(ShardRect(rank, 0, rows, 0, dim) for rank in range(3))
    if kind == "table_wise":
        return (ShardRect(number % 3, 0, rows, 0, dim),)
    return rectangles(kind, rows, dim, 3)


@kept
def make_archive(
    folder: Path,
    kind: str,
    *,
    is_weighted: bool = False,
    precision: DataType = DataType.INT8,
    version: str = "1",
    seed: int = 7,
) -> Path:
    """The archive of a Mixed at ``folder``; each seed has other rows."""
    torch.manual_seed(seed)
    model = Mixed(is_weighted)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "weights.pt")
    tables = []
    for path, _, configs, _ in embedding_tables(model):
        for config in configs:
            size = config.num_embeddings, config.embedding_dim
            shards = rectangles_of(kind, *size, len(tables))
            tables.append(TablePlan(path, config.name, kind, "quant", precision, *size, shards))
    out = folder / f"{kind}.rqa"
    reader = CheckpointReader(folder / "weights.pt")
    export_archive(model, reader, Plan(3, "cpu", tuple(tables)), out, name="mixed", version=version, progress=False)
    return out


def make_request(
    batch: int,
    seed: int = 0,
    *,
    is_weighted: bool = False,
    longest: int = 4,
    keys: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Random bags of 0 to ``longest`` - 1 ids; exactly one where it is 1."""
    keys = keys or tuple(ROWS)[: 5 if is_weighted else None]
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (len(keys), batch), generator=random)
    if longest == 1:
        lengths = torch.ones_like(lengths)
    ids = [torch.randint(0, ROWS[key], (int(n.sum()),), generator=random) for key, n in zip(keys, lengths)]
    values = torch.cat(ids).to(dtype)
    weights: Tensor | None = torch.rand(len(values), generator=random) + 0.5 if is_weighted else None
    return KeyedJaggedTensor(list(keys), values, weights=weights, lengths=lengths.flatten().int())


def unpacked(values: np.ndarray, layout: ModuleLayout, rank: int, batch: int) -> np.ndarray:
    """The float32 ``[batch, columns of the rank]`` of a rank's packed answer."""
    mine = layout.ranks[rank]
    pairs = spans_of(mine, layout.configs, {pair.number: 0 for pair in mine.pairs}).pairs
    pairs[:, 2] = np.cumsum(pairs[:, 0]) - pairs[:, 0]
    pairs[:, 3] = 0
    found = np.empty((batch, pairs[:, 0].sum()), np.float32)
    answer = RankAnswer(values, PACKED_ANSWER, pairs)
    join([answer], np.empty(0, np.int64), b"", BagPlaces(0, 0, 0, False, 0, batch), found.shape[1], found)
    return found
