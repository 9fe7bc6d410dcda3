"""The compute kernels of an archive's plan say where a GPU keeps its tables; on a CPU all of them are mapped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recinfer.archive.reader import Archive
from recinfer.distributed.planner.plan import Plan
from recinfer.inference.export import export_archive
from recinfer.inference.lookups import sharded_module
from recinfer.inference.predictor import load
from recinfer.quant.tbe import EmbeddingLocation, embedding_location
from tests.archive.models import (
    NUM_DENSE,
    RANKER_ROWS,
    Everything,
    Ranker,
    make_plan,
    make_request,
    save_weights,
)

KERNELS = {
    "users": "quant",
    "item": "quant_uvm",
    "cats": "quant_uvm_caching",
    "recent": "quant_uvm",
    "words": "quant_uvm_caching",
}
LOCATIONS = {
    "quant": EmbeddingLocation.DEVICE,
    "quant_uvm": EmbeddingLocation.MANAGED,
    "quant_uvm_caching": EmbeddingLocation.MANAGED_CACHING,
}


def archive_of(model: torch.nn.Module, folder: Path, ranks: int, kinds: tuple[str, ...]) -> Archive:
    plan = make_plan(model, ranks, kinds=kinds)
    tables = tuple(replace(table, compute_kernel=KERNELS[table.table]) for table in plan.tables)
    return export_archive(
        model,
        save_weights(model, folder),
        Plan(plan.world_size, "cuda", tables),
        folder / "uvm.rqa",
        name="uvm",
        version="1",
        progress=False,
    )


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_lookups_of_an_archive_know_where_a_gpu_keeps_each_table(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(3)
    for model in (Ranker(), Everything()):
        folder = tmp_path / type(model).__name__
        folder.mkdir()
        archive = archive_of(model, folder, 2, (kind,))
        mapped = archive.map_shards()
        for info in archive.manifest.modules:
            module = sharded_module(archive, info, mapped)
            for shard in module.shards:
                expected = LOCATIONS[KERNELS[shard.rect.table]]
                assert embedding_location(shard.memory, torch.device("cuda")) is expected
                assert embedding_location(shard.memory, torch.device("cpu")) is EmbeddingLocation.HOST
            tables = [table for config in module.tbes_configs().values() for table in config.embedding_tables]
            assert {table.name: table.compute_kernel.value for table in tables} == {
                name: KERNELS[name] for name in info.tables
            }
            assert module.fused  # on a CPU the rows are read where they are mapped, by one call


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_tables_of_quant_uvm_do_not_fill_the_gpu(tmp_path: Path) -> None:
    archive = archive_of(Ranker(), tmp_path, 1, ("table_wise",))
    mapped = archive.map_shards()
    (info,) = archive.manifest.modules
    on_gpu = sharded_module(archive, info, mapped, device="cuda")
    small = 53 * 16 + 4096
    assert all(tbe.weights_dev.numel() < small < tbe.weights_uvm.numel() for tbe in on_gpu.tbes_configs())
    cpu, gpu = load(archive.root), load(archive.root, device="cuda")
    for seed in range(3):  # the second and third find rows in the cache
        request, dense = make_request(RANKER_ROWS, 33, seed=seed), torch.ones(33, NUM_DENSE)
        torch.testing.assert_close(gpu.predict(dense, request)["output"], cpu.predict(dense, request)["output"])
