"""Small models, plans and archives for tests: every kind of embedding module, every kind of shard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from recinfer.archive.reader import Archive
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan, embedding_tables
from recinfer.inference.export import export_archive
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModule
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

FEATURES = ["f_user", "f_item", "f_hist", "f_cat"]
NUM_DENSE = 3


class Ranker(nn.Module):
    """Pooled tables (sums, means, one shared by two features) and an MLP: what most archives look like."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(53, 12, "users", feature_names=["f_user"]),
            EmbeddingBagConfig(1201, 16, "item", feature_names=["f_item", "f_hist"]),
            EmbeddingBagConfig(307, 20, "cats", feature_names=["f_cat"], pooling=PoolingType.MEAN),
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device(device) if device else None)
        self.bottom = nn.Linear(NUM_DENSE, 8, device=device)
        self.top = nn.Sequential(nn.Linear(8 + 12 + 16 + 16 + 20, 16, device=device), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(kjt)
        return self.top(torch.cat([self.bottom(dense).relu(), pooled.values()], dim=1)).squeeze(1)


class Everything(nn.Module):
    """Pooled, position-weighted and unpooled tables, a batch object as input, two outputs, no ONNX form."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(40, 8, "users", feature_names=["f_user"])])
        self.recent = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(90, 6, "recent", feature_names=["f_recent", "f_older"])], is_weighted=True
            ),
            {"f_recent": PositionWeightedModule(3), "f_older": PositionWeightedModule(5)},
        )
        with torch.no_grad():
            for parameter in self.recent._feature_processors.parameters():
                parameter.copy_(torch.rand_like(parameter) + 0.5)
        self.words = EmbeddingCollection(tables=[EmbeddingConfig(211, 5, "words", feature_names=["f_word"])])
        self.top = nn.Linear(2 + 8 + 12 + 15, 2)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        sparse = batch.sparse
        words = self.words(sparse.ids)["f_word"].to_padded_dense(3).flatten(1)
        parts = [batch.dense, self.ebc(sparse.ids).values(), self.recent(sparse.ids).values(), words]
        scores = self.top(torch.cat(parts, dim=1))
        return {"click": scores[:, 0], "both": torch.special.i0e(scores)}  # which ONNX does not have


class Named(nn.Module):
    """Ids computed in forward, an integer tensor, and prices as long as the history."""

    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingBagCollection(tables=[EmbeddingBagConfig(40, 4, "item", feature_names=["f_item"])])
        self.history = EmbeddingCollection(tables=[EmbeddingConfig(50, 4, "hist", feature_names=["f_hist"])])
        self.hours = nn.Embedding(24, 3)
        self.top = nn.Linear(4 + 3 + 2 * 5, 2)

    @staticmethod
    def batch() -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, JaggedTensor, Tensor]:
        """An example batch of four samples."""
        lengths = torch.tensor([2, 0, 1, 2])
        hist = KeyedJaggedTensor(["f_hist"], torch.arange(5), lengths=lengths)
        item = KeyedJaggedTensor(["f_item"], torch.arange(5) + 100, lengths=torch.tensor([1, 2, 2, 0]))
        return item, hist, JaggedTensor(torch.rand(5), None, lengths), torch.tensor([3, 0, 23, 7])

    def forward(
        self, item: KeyedJaggedTensor, hist: KeyedJaggedTensor, prices: JaggedTensor, hour: Tensor
    ) -> dict[str, list[Tensor]]:
        hashed = KeyedJaggedTensor(["f_item"], item.values() % 40, lengths=item.lengths())
        found = self.history(hist)["f_hist"]
        bought = JaggedTensor(found.values() * prices.values().unsqueeze(1), lengths=found.lengths())
        parts = [self.items(hashed).values(), self.hours(hour), bought.to_padded_dense(2).flatten(1)]
        scores = self.top(torch.cat([*parts, parts[0][:, :2]], dim=1))
        return {"scores": [scores[:, 0], scores[:, 1]]}


class Sparse:
    """Part of a batch."""

    def __init__(self, ids: KeyedJaggedTensor) -> None:
        self.ids = ids


class Batch:
    """A batch of random inputs for Everything."""

    def __init__(self, dense: Tensor, ids: KeyedJaggedTensor) -> None:
        self.dense = dense
        self.sparse = Sparse(ids)


def rectangles(kind: str, rows: int, dim: int, ranks: int) -> tuple[ShardRect, ...]:
    """A table cut over all ranks: table_wise, row_wise, column_wise or grid_shard."""
    row_step, col_step = -(-rows // ranks), max(4, -(-dim // ranks // 4) * 4)
    row_cuts = [(start, min(start + row_step, rows)) for start in range(0, rows, row_step)]
    col_cuts = [(start, min(start + col_step, dim)) for start in range(0, dim, col_step)]
    if kind == "table_wise":
        row_cuts, col_cuts = [(0, rows)], [(0, dim)]
    elif kind == "row_wise":
        col_cuts = [(0, dim)]
    elif kind == "column_wise":
        row_cuts = [(0, rows)]
    cells = [(r, c) for c in col_cuts for r in row_cuts]
    return tuple(ShardRect((i + 1) % ranks, *r, *c) for i, (r, c) in enumerate(cells))


def make_plan(
    model: nn.Module,
    ranks: int,
    precision: DataType = DataType.INT8,
    kinds: tuple[str, ...] = ("table_wise", "row_wise", "column_wise"),
) -> Plan:
    """A plan that gives the tables the sharding types ``kinds`` in turn."""
    tables = []
    for path, _, configs, _ in embedding_tables(model):
        for config in configs:
            kind = kinds[len(tables) % len(kinds)]
            shards = rectangles(kind, config.num_embeddings, config.embedding_dim, ranks)
            size = config.num_embeddings, config.embedding_dim
            tables.append(TablePlan(path, config.name, kind, "quant", precision, *size, shards))
    return Plan(ranks, "cpu", tuple(tables))


def save_weights(model: nn.Module, folder: Path) -> CheckpointReader:
    """A plain ``.pt`` checkpoint of ``model``."""
    torch.save(model.state_dict(), folder / "weights.pt")
    return CheckpointReader(folder / "weights.pt")


def make_archive(
    folder: Path,
    *,
    model: nn.Module | None = None,
    ranks: int = 3,
    precision: DataType = DataType.INT8,
    kinds: tuple[str, ...] = ("table_wise", "row_wise", "column_wise"),
    name: str = "small",
    **options: object,
) -> tuple[nn.Module, Archive]:
    """A float model with random weights and its archive at ``folder / "small.rqa"``."""
    if model is None:
        torch.manual_seed(7)
        model = Ranker()
    folder.mkdir(parents=True, exist_ok=True)
    reader = save_weights(model, folder)
    plan = make_plan(model, ranks, precision, kinds)
    out = folder / "small.rqa"
    archive = export_archive(model, reader, plan, out, name=name, version="7", progress=False, **options)  # type: ignore[arg-type]
    return model.eval(), archive


def copy_with_missing(archive: Path, out: Path, missing: str | int) -> Path:
    """A copy of the archive whose manifest has this policy for every feature left out of a prediction."""
    shutil.copytree(archive, out)
    manifest = json.loads((out / "manifest.json").read_text())
    for feature in manifest["features"]:
        feature["missing"] = missing
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def make_request(rows: dict[str, int], batch: int, seed: int = 0, longest: int = 4) -> KeyedJaggedTensor:
    """Random bags of 0 to ``longest`` - 1 ids for features with that many rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (len(rows), batch), generator=generator)
    counts = lengths.sum(1).tolist()
    ids = [torch.randint(0, r, (n,), generator=generator) for r, n in zip(rows.values(), counts)]
    return KeyedJaggedTensor(list(rows), torch.cat(ids), lengths=lengths.flatten())


RANKER_ROWS = {"f_user": 53, "f_item": 1201, "f_hist": 1201, "f_cat": 307}
EVERYTHING_ROWS = {"f_user": 40, "f_recent": 90, "f_older": 90, "f_word": 211}
