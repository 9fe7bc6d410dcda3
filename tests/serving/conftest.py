"""A small archive, exported for real, and a server on it, shared by the serving and TorchServe tests."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor, load
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.kept import kept

NUM_DENSE = 3
ROWS = {"user": 50, "item": 40, "history": 40, "shop": 30}
DIM = 8


@kept
def build_archive(folder: Path, name: str = "tiny", version: str = "3") -> Path:
    """Train nothing, but take every other step: a float DLRM, its checkpoint, a plan for two ranks, the archive."""
    return export(build_model(), folder, name, version)


def build_model(seed: int = 0) -> DLRM:
    """The float model: four features, one shared table, three dense columns; the same weights for the same seed."""
    torch.manual_seed(seed)
    bag = partial(EmbeddingBagConfig, embedding_dim=DIM)
    tables = [
        bag(num_embeddings=50, name="t_user", feature_names=["user"]),
        bag(num_embeddings=40, name="t_item", feature_names=["item", "history"], pooling=PoolingType.MEAN),
        bag(num_embeddings=30, name="t_shop", feature_names=["shop"]),
    ]
    return DLRM(EmbeddingBagCollection(tables=tables), NUM_DENSE, [16, DIM], [16, 1])


def steep_model(factor: float) -> DLRM:
    """:func:`build_model` whose dense layers multiply by ``factor`` more."""
    model = build_model()
    with torch.no_grad():
        for layer in model.dense_arch.modules():
            if isinstance(layer, nn.Linear):
                layer.weight *= factor
    return model


def export(model: nn.Module, folder: Path, name: str, version: str) -> Path:
    """``model`` as an INT8 archive for two ranks, through a checkpoint."""
    checkpoint = save_checkpoint(folder / "checkpoint", model, model_name=name, model_version=version)
    on_meta = copy.deepcopy(model).to("meta")
    plan = plan_inference(on_meta, world_size=2, precision=DataType.INT8)
    out = folder / f"{name}.rqa"
    reader = CheckpointReader(checkpoint)
    export_archive(on_meta, reader, plan, out, name=name, version=version, progress=False)
    return out


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small INT8 archive: four features, one shared table, three dense columns, two ranks."""
    return build_archive(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One archive with unpooled features ("sequences"), one with weighted pooled ones ("weighted"); both only look up."""
    torch.manual_seed(1)
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(num_embeddings=20, embedding_dim=4, name="t_clicks", feature_names=["clicks", "buys"]),
            EmbeddingConfig(num_embeddings=9, embedding_dim=4, name="t_page", feature_names=["page"]),
        ]
    )
    weighted = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(num_embeddings=20, embedding_dim=8, name="t_tag", feature_names=["tag"])],
        is_weighted=True,
    )
    folder = tmp_path_factory.mktemp("others")
    models = {"sequences": sequences, "weighted": weighted}
    return {name: export(model, folder / name, name, "1") for name, model in models.items()}


@pytest.fixture(scope="session")
def predictor(archive: Path) -> Predictor:
    """The archive in this process: what every protocol is compared with."""
    return load(archive)


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    """A running server on the archive."""
    with Server({"tiny": predictor}) as running:
        yield running


@pytest.fixture
def num_mutated(request: pytest.FixtureRequest) -> int:
    """How many mutated messages a test sends."""
    return 10_000 if request.config.getoption("--full-matrix") else 1_000


@pytest.fixture
def client(server: Server) -> Iterator[InferenceClient]:
    """A client of it."""
    with InferenceClient(server.target, timeout=60) as open_client:
        yield open_client


def replace_archive(folder: Path) -> None:
    """Replace the archive at ``folder`` by another valid one, as an export does: written next to it, then renamed."""
    old, new = folder.with_name("old"), folder.with_name("new")
    shutil.copytree(folder, new)
    manifest = new / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "created": "2001-01-01T00:00:00+00:00"}))
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old)


def make_request(
    seed: int, batch: int, keys: list[str] | None = None, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, KeyedJaggedTensor]:
    """Random dense columns and ids: bags of 0 to 4 ids, features in a random order unless ``keys`` gives one."""
    random = torch.Generator().manual_seed(seed)
    if keys is None:
        keys = [list(ROWS)[i] for i in torch.randperm(len(ROWS), generator=random)]
    lengths = torch.randint(0, 5, (len(keys), batch), generator=random, dtype=torch.int32)
    ids = [torch.randint(0, ROWS[key], (int(n.sum()),), generator=random) for key, n in zip(keys, lengths)]
    kjt = KeyedJaggedTensor(keys, torch.cat(ids).to(dtype), lengths=lengths.reshape(-1))
    return torch.randn(batch, NUM_DENSE, generator=random), kjt
