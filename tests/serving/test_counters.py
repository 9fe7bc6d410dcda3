"""Ids out of range and missing features are counted by feature, exactly, also when requests share a run."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.data.contract import DenseFeature, FeatureContract, Identity, SparseFeature
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.modules.embedding_configs import DataType
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.server.server import Server
from recinfer.serving.wire.loop import run_on_loop
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import NUM_DENSE, ROWS, build_model

CONTRACT = FeatureContract(
    sparse=tuple(
        SparseFeature(name, Identity(rows), out_of_range="default_row" if name in ("user", "item") else "reject")
        for name, rows in ROWS.items()
    ),
    dense=tuple(DenseFeature(f"d{column}") for column in range(NUM_DENSE)),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("counted")
    model = build_model()
    reader = CheckpointReader(save_checkpoint(folder / "checkpoint", model, model_name="tiny", model_version="1"))
    on_meta = copy.deepcopy(model).to("meta")
    plan = plan_inference(on_meta, world_size=1, precision=DataType.INT8)
    options = {"name": "tiny", "version": "1", "contract": CONTRACT, "progress": False}
    options["missing"] = {"history": "empty", "shop": "empty"}
    export_archive(on_meta, reader, plan, folder / "tiny.rqa", **options)
    with Server({"tiny": load(folder / "tiny.rqa")}) as running:
        yield running


def counts(server: Server) -> tuple[dict[str, int], dict[str, int]]:
    model = server.status()["models"][0]
    return model["replaced"], model["missing"]


def test_ids_of_raw_rows_are_counted_too(server: Server):
    pytest.importorskip("pyarrow")
    before = dict(counts(server)[0])
    row = {f"d{column}": [0.0, 0.0] for column in range(NUM_DENSE)} | {name: ["1", "2"] for name in ROWS}
    with InferenceClient(server.target, timeout=60) as client:
        client.predict_raw(row | {"user": ["1", "50"], "item": ["99", "77"]})
    found = counts(server)[0]
    assert {name: found[name] - before[name] for name in ("user", "item")} == {"user": 1, "item": 2}


def test_each_is_counted_once(server: Server):
    ids = torch.tensor([3, 50, -1, 7, 40])  # user has 50 rows, item 40
    kjt = KeyedJaggedTensor(["user", "item"], ids, lengths=torch.tensor([2, 1, 1, 1]))
    before = [dict(part) for part in counts(server)]
    with InferenceClient(server.target, timeout=60) as client:
        client.lookup(kjt)
        client.predict(torch.zeros(2, NUM_DENSE), kjt)

    async def together() -> None:
        async with AsyncInferenceClient(server.target, timeout=60) as mine:
            await asyncio.gather(*(mine.predict(torch.zeros(2, NUM_DENSE), kjt) for _ in range(50)))

    run_on_loop(together(), timeout=60)
    replaced, missing = counts(server)
    assert {name: replaced[name] - before[0][name] for name in ROWS} == {
        "user": 104,
        "item": 52,
        "history": 0,
        "shop": 0,
    }
    assert {name: missing[name] - before[1][name] for name in ROWS} == {"user": 0, "item": 0, "history": 51, "shop": 51}
