"""Sharded managed collisions: against TorchRec's own states, checkpoints of other numbers of ranks, plans, pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from recinfer.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.train_pipeline import TrainPipelineSparseDist
from recinfer.distributed.types import ShardingEnv, ShardingPlan
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from recinfer.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.golden import managed_sharded as golden

ROWS, DIM, IDS = 32, 4, 1000
IDENTITY = "_managed_collision_collection._managed_collision_modules.t."


def trained(rank: int, world: int, pooled: bool) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    outputs, state, model = golden.train("recinfer", pooled)
    collisions = model.module.tables._managed_collision_collection
    modules = collisions._managed_collision_modules
    counts = {
        what: {table: getattr(module, f"num_{what}") for table, module in modules.items()}
        for what in ("admitted", "evicted")
    }
    flat = torch.cat([output.reshape(-1) for output in outputs]).numpy()
    return flat, {name: value.numpy() for name, value in state.items()}, counts


@pytest.mark.parametrize("world", golden.WORLDS)
@pytest.mark.parametrize("pooled", [True, False])
def test_training_gives_torchrecs_ids_rows_and_vectors(world: int, pooled: bool) -> None:
    known = np.load(golden.FILE)
    ranks = run_ranks(world, trained, pooled)
    for rank, (outputs, state, _) in enumerate(ranks):
        head = f"{world}/{rank}/{'pooled' if pooled else 'unpooled'}/"
        expected = {name.removeprefix(head): known[name] for name in known.files if name.startswith(head)}
        np.testing.assert_allclose(outputs, expected.pop("outputs"), rtol=0, atol=1e-6)
        assert {name for name in state if "_segments_" not in name} == set(expected)
        for name, values in expected.items():
            if name.endswith(".weight"):
                np.testing.assert_allclose(state[name], values, rtol=0, atol=1e-6)
            else:
                np.testing.assert_array_equal(state[name], values, err_msg=name)
    for table in ("t0", "t1"):
        assert sum(counts["admitted"][table] for _, _, counts in ranks) > 0
        assert world == 1 or sum(counts["evicted"][table] for _, _, counts in ranks) > 0


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f", "g"])]
        modules = {
            "t": MCHManagedCollisionModule(
                ROWS, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=2, input_hash_size=IDS
            )
        }
        self.tables = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables), ManagedCollisionCollection(modules, tables), **options
        )
        self.over = nn.Linear(2 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, _ = self.tables(features)
        answer = self.over(found.values()).squeeze(-1)
        return answer.pow(2).mean(), answer


def batch(seed: int, size: int = 8) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, IDS, (2, 2 * size), generator=random)
    return KeyedJaggedTensor(["f", "g"], ids.prod(0) // IDS, lengths=torch.ones(2 * size, dtype=torch.int32))


def parallel(types: Any = row_wise) -> DistributedModelParallel:
    torch.manual_seed(3)
    model = Model()
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        model.tables, {"t": types()}, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )


def known(model: DistributedModelParallel) -> dict[int, list[float]]:
    """Each id that this rank holds, with its vector."""
    tables = model.module.tables
    module = tables._managed_collision_collection._managed_collision_modules["t"]
    weight = tables._embedding_module.embedding_bags["t"].weight.detach()
    rows = module._mch_remapped_ids_mapping - module._output_global_offset
    return {
        id_: weight[row].tolist()
        for id_, row in zip(module._mch_sorted_raw_ids.tolist(), rows.tolist())
        if id_ != torch.iinfo(torch.int64).max
    }


def saved(rank: int, world: int, folder: str) -> tuple[list[float], dict[int, list[float]]]:
    model = parallel()
    for step in range(7):
        model(batch(step * world + rank))[0].backward()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    model.eval()
    return model(batch(100))[1].tolist(), known(model)


def loaded(rank: int, world: int, folder: str) -> tuple[list[float], dict[int, list[float]]]:
    model = parallel()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.eval()
    return model(batch(100))[1].tolist(), known(model)


def test_a_checkpoint_is_loaded_on_fewer_ranks(tmp_path: Path) -> None:
    """Ids keep their vectors. An id without a row reads the last row of its segment, and fewer ranks have fewer segments."""
    before = run_ranks(4, saved, str(tmp_path))
    vectors = {id_: vector for _, held in before for id_, vector in held.items()}
    assert len(vectors) > ROWS / 2
    for answers, held in run_ranks(4, loaded, str(tmp_path)):
        assert answers == before[0][0]
        assert held.items() <= vectors.items()
    assert {id_: vector for _, held in run_ranks(2, loaded, str(tmp_path)) for id_, vector in held.items()} == vectors


def refused(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as error:
        parallel(table_wise_on_0)
    return str(error.value)


def table_wise_on_0() -> Any:
    return table_wise(rank=0)


def test_tables_that_are_not_row_wise_are_refused() -> None:
    for text in run_ranks(2, refused):
        assert "table_wise is not supported" in text and "expected ['row_wise']" in text


def test_remapped_features_are_refused_by_name() -> None:
    (text,) = run_ranks(1, remapped)
    assert "return_remapped_features=True; sharded modules return vectors only" in text


def remapped(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as error:
        DistributedModelParallel(Model(return_remapped_features=True), device=torch.device("cpu"))
    return str(error.value)


def test_the_planner_cuts_managed_tables_by_rows() -> None:
    from recinfer.distributed.sharding_plan import get_default_sharders

    plan = EmbeddingShardingPlanner(topology=Topology(world_size=4, compute_device="cpu")).plan(
        Model(), get_default_sharders()
    )
    assert plan.plan["tables"]["t"].sharding_type == "row_wise"


def piped(rank: int, world: int) -> tuple[list[float], list[float]]:
    results = []
    for pipelined in (False, True):
        model = parallel()
        optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
        batches = [batch(step * world + rank) for step in range(6)]
        if pipelined:
            pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
            stream = iter(batches)
            answers = [pipeline.progress(stream) for _ in batches]
        else:
            answers = []
            for features in batches:
                optimizer.zero_grad()
                loss, answer = model(features)
                loss.backward()
                optimizer.step()
                answers.append(answer)
        results.append([x for answer in answers for x in answer.tolist()])
    return results[0], results[1]


def test_a_pipeline_trains_alike() -> None:
    for plain, pipelined in run_ranks(2, piped):
        np.testing.assert_allclose(pipelined, plain, atol=1e-6)
