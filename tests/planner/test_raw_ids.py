"""Tables that take raw ids: the planner counts their ids, in training by the module's tensors, in serving by the index."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from recinfer.data.contract import FeatureContract, Hash, SparseFeature, Vocabulary
from recinfer.distributed.planner import ParameterConstraints, Topology
from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.stats import format_plan
from recinfer.distributed.types.default_sharders import get_default_sharders
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from recinfer.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from recinfer.vocabulary.index import build_index
from recinfer.vocabulary.options import VocabularyFiles
from tests.vocabulary.made import vocabulary

META = torch.device("meta")
ROWS = {"counted": 4000, "aged": 2000, "hashed": 1024}
TRAINED = {"counted": 24, "aged": 32, "hashed": 8}  # bytes per row: ids, rows and the policy's numbers; identities


class Model(nn.Module):
    def __init__(self, raw: bool) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(rows, 16, name, feature_names=[f"f_{name}"]) for name, rows in ROWS.items()]
        collection: Any = EmbeddingBagCollection(tables=tables, device=META)
        modules: dict[str, ManagedCollisionModule] = {
            "counted": MCHManagedCollisionModule(4000, META, LFU_EvictionPolicy(), 5),
            "aged": MCHManagedCollisionModule(2000, META, DistanceLFU_EvictionPolicy(), 5),
            "hashed": HashZchManagedCollisionModule(1024, META, 4, is_inference=True),
        }
        if raw:
            collection = ManagedCollisionEmbeddingBagCollection(collection, ManagedCollisionCollection(modules, tables))
        self.tables = collection


def test_training_counts_the_modules_tensors_on_the_device() -> None:
    topology = Topology(world_size=2, compute_device="cuda")
    limits = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in ROWS}
    found = [
        EmbeddingEnumerator(topology, batch_size=8, constraints=limits).enumerate(Model(raw), get_default_sharders())
        for raw in (True, False)
    ]
    plains = {(o.name, o.compute_kernel): o for o in found[1]}
    assert {o.name for o in found[0]} == set(ROWS)
    for option in found[0]:
        plain = plains[option.name, option.compute_kernel]
        for shard, other in zip(option.shards, plain.shards):
            assert shard.storage is not None and other.storage is not None
            assert shard.storage.hbm == other.storage.hbm + shard.size[0] * TRAINED[option.name]
            assert shard.storage.ddr == other.storage.ddr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_serving_counts_the_index_in_host_memory(device: str, kind: str) -> None:
    limits = {name: ParameterConstraints(sharding_types=[kind]) for name in ROWS}
    plans = [
        plan_inference(Model(raw), world_size=2, compute_device=device, constraints=limits) for raw in (True, False)
    ]
    for table, plain in zip(plans[0].tables, plans[1].tables):
        index = 16 * ROWS[table.table]
        assert table.estimates["index_bytes"] == index and "index_bytes" not in plain.estimates
        assert table.estimates["ddr_bytes"] == plain.estimates["ddr_bytes"] + index
        assert table.estimates.get("hbm_bytes") == plain.estimates.get("hbm_bytes")
    used = [sum(plan.estimates["ddr_bytes_per_rank"]) for plan in plans]
    assert used[0] - used[1] == 16 * sum(ROWS.values())


def test_serving_counts_the_index_of_strings_and_of_lists_of_ids() -> None:
    tables = [
        EmbeddingBagConfig(4000, 16, "t_items", feature_names=["item", "history"]),
        EmbeddingBagConfig(999, 16, "cities", feature_names=["city"]),
        EmbeddingBagConfig(50, 16, "users", feature_names=["user"]),
    ]
    model = EmbeddingBagCollection(tables=tables, device=META)
    contract = FeatureContract(
        (
            SparseFeature("item", Vocabulary(tuple(map(str, range(3000))))),
            SparseFeature("history", Vocabulary(tuple(map(str, range(3000))))),
            SparseFeature("user", Hash(50)),
        )
    )
    assert VocabularyFiles().indexed(contract) == {"item": 3000, "history": 3000}
    indexed = {**VocabularyFiles().indexed(contract), "city": 500}
    found, plain = (plan_inference(model, world_size=2, indexed=given) for given in (indexed, None))
    counted = {t.table: t.estimates.get("index_bytes") for t in found.tables}
    assert counted == {"t_items": 48000, "cities": 8000, "users": None}
    used = [sum(plan.estimates["ddr_bytes_per_rank"]) for plan in (found, plain)]
    assert 0 <= used[0] - used[1] - 56000 <= 2 * len(tables)  # each piece rounds up


def test_an_index_takes_at_most_as_many_bytes() -> None:
    for rows in (*ROWS.values(), 100_003):
        shape = build_index(vocabulary(rows, full=1.0)).shape
        assert 0.8 * 16 * rows < shape.num_bytes <= 16 * rows


def test_a_shown_plan_tells_the_bytes_of_raw_ids() -> None:
    shown = []
    for raw in (True, False):
        console = Console(file=StringIO(), width=200)
        console.print(*format_plan(plan_inference(Model(raw), world_size=1)))
        shown.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert "3 tables have indexes of raw ids or strings: 0.11 of these MB" in shown[0]
    assert "raw ids" not in shown[1]
