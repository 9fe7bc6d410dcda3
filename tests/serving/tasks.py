"""A model of two tasks with weighted and plain features, and a feature contract that names its dense columns."""

# Annotations stay classes here: see recinfer.models.dlrm.

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.data.contract import DenseFeature, FeatureContract, Identity, SparseFeature
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor, load
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["COLUMNS", "TASK_ROWS", "Tasks", "tasks_archive", "tasks_predictor"]

TASK_ROWS = {"user": 50, "tags": 20}
COLUMNS = ("price", "age")


class Tasks(nn.Module):
    """``click`` [B] and ``spend`` [B, 2]; every id has a weight."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=8, name=f"t_{name}", feature_names=[name])
            for name, rows in TASK_ROWS.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, is_weighted=True)
        self.click = nn.Linear(16 + len(COLUMNS), 1)
        self.spend = nn.Linear(16 + len(COLUMNS), 2)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Both tasks."""
        joined = torch.cat([dense, self.ebc(features).values()], dim=1)
        return {"click": torch.sigmoid(self.click(joined)).squeeze(1), "spend": self.spend(joined)}


def build_tasks(folder: Path) -> Path:
    """Its archive, for two ranks."""
    torch.manual_seed(4)
    model = Tasks()
    contract = FeatureContract(
        sparse=tuple(SparseFeature(name, Identity(rows)) for name, rows in TASK_ROWS.items()),
        dense=tuple(DenseFeature(name) for name in COLUMNS),
    )
    checkpoint = save_checkpoint(folder / "checkpoint", model, contract=contract, model_name="tasks", model_version="1")
    on_meta = copy.deepcopy(model).to("meta")
    plan = plan_inference(on_meta, world_size=2, precision=DataType.INT8)
    out = folder / "tasks.rqa"
    reader = CheckpointReader(checkpoint)
    more = {"name": "tasks", "version": "1", "contract": contract, "progress": False}
    export_archive(on_meta, reader, plan, out, **more)
    return out


@pytest.fixture(scope="session")
def tasks_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive."""
    return build_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def tasks_predictor(tasks_archive: Path) -> Predictor:
    """It in this process."""
    return load(tasks_archive)
