"""Golden archives: small archives that later code must still open, and answer as the code that wrote them did.

    python -m tests.golden.make int8-2ranks ...     (default: every one that is not there yet)

One zip of each precision on one rank and on two, with a table of every sharding type. Written once and kept: what they are
for is that nobody writes them anew. All weights come from whole numbers, so that today's code can be asked for the same
archive again.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from itertools import pairwise
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
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

ARCHIVES = Path(__file__).with_name("archives")
PRECISIONS = [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32]
NAMES = [f"{precision.value.lower()}-{ranks}ranks" for precision in PRECISIONS for ranks in (1, 2)]

KINDS = [
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
]
# Where 37 rows and 10 columns are cut: unevenly, one piece empty, the last columns no whole byte of INT4 and INT2.
SIZE = 37, 10
ROWS = {"row_wise": (0, 13, 13, 29, 37), "table_row_wise": (0, 19, 37), "grid_shard": (0, 19, 37)}
COLUMNS = {"column_wise": (0, 4, 8, 10), "table_column_wise": (0, 4, 10), "grid_shard": (0, 8, 10)}
BY_POSITION = {"f_recent": 3}


class Golden(nn.Module):
    """Bags of every sharding type, position-weighted bags, rows of single ids, and a layer over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    *SIZE,
                    kind,
                    # One table is read by two features; every second one takes means.
                    feature_names=[f"f_{kind}", *(["f_second"] if kind == "column_wise" else [])],
                    pooling=PoolingType.MEAN if i % 2 else PoolingType.SUM,
                )
                for i, kind in enumerate(KINDS)
            ]
        )
        recent = EmbeddingBagConfig(*SIZE, "recent", feature_names=["f_recent"])
        self.weighted = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[recent], is_weighted=True),
            {name: PositionWeightedModule(length) for name, length in BY_POSITION.items()},  # type: ignore[misc]
        )
        self.words = EmbeddingCollection(
            tables=[EmbeddingConfig(*SIZE, f"words_{kind}", feature_names=[f"w_{kind}"]) for kind in KINDS]
        )
        self.top = nn.Linear(2 + 10 * (len(KINDS) + 2), 3)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        self.words(ids)
        return self.top(torch.cat([dense, self.bags(ids).values(), self.weighted(ids).values()], dim=1))


def golden_model() -> Golden:
    """Weights between -1 and 1, each a whole number over 1009: the same on every machine and with every torch."""
    model = Golden().eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            counted = torch.arange(parameter.numel(), dtype=torch.int64)
            whole = (counted * (7919 + number) + 104729 * number) % 2017 - 1008
            parameter.copy_((whole.float() / 1009).view_as(parameter))
    return model


def golden_plan(model: nn.Module, precision: DataType, ranks: int) -> Plan:
    """Each table by the sharding type that its name ends with; on one rank the pieces lie there side by side."""
    tables = []
    for path, _, configs, _ in embedding_tables(model):
        for config in configs:
            kind = config.name.removeprefix("words_").replace("recent", "row_wise")
            rows, columns = ROWS.get(kind, (0, 37)), COLUMNS.get(kind, (0, 10))
            if kind == "data_parallel":
                places = [(rank, 0, 37, 0, 10) for rank in range(ranks)]
            else:
                cells = [(*r, *c) for c in pairwise(columns) for r in pairwise(rows)]
                places = [((i + len(tables)) % ranks, *cell) for i, cell in enumerate(cells)]
            shards = tuple(
                ShardRect(rank=rank, row_start=top, row_stop=bottom, col_start=left, col_stop=right)
                for rank, top, bottom, left, right in places
            )
            tables.append(TablePlan(path, config.name, kind, "quant", precision, *SIZE, shards))
    return Plan(ranks, "cpu", tuple(tables))


def export_golden(name: str, folder: Path) -> Archive:
    """The archive ``folder / "golden.rqa"`` of that name, by the code of today."""
    precision, _, ranks = name.removesuffix("ranks").partition("-")
    model = golden_model()
    torch.save(model.state_dict(), folder / "weights.pt")
    plan = golden_plan(model, DataType.parse(precision), int(ranks))
    checkpoint = CheckpointReader(folder / "weights.pt")
    return export_archive(
        model, checkpoint, plan, folder / "golden.rqa", name=f"golden-{name}", version="1", progress=False
    )


def main(names: list[str]) -> None:
    """Write the zips that are not there."""
    for name in names or NAMES:
        target = ARCHIVES / f"{name}.zip"
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = export_golden(name, Path(folder)).root
            with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
                for path in sorted(root.rglob("*")):
                    if path.is_file():
                        packed.write(path, path.relative_to(root))
        print(target.name, target.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
