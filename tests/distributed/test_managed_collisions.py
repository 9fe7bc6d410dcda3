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

from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from recinfer.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.train_pipeline import TrainPipelineSparseDist
from recinfer.distributed.types import ShardingEnv, ShardingPlan
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recinfer.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
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


class Unpooled(nn.Module):
    """Two unpooled tables of three features, one of two features."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f", "g"]),
            EmbeddingConfig(num_embeddings=2 * ROWS, embedding_dim=DIM, name="u", feature_names=["h"]),
        ]
        modules: dict[str, ManagedCollisionModule] = {
            table.name: MCHManagedCollisionModule(
                table.num_embeddings,
                torch.device("cpu"),
                LFU_EvictionPolicy(),
                eviction_interval=2,
                input_hash_size=IDS,
            )
            for table in tables
        }
        self.tables = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables), ManagedCollisionCollection(modules, tables), return_remapped_features=True
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.tables(features)


class Pooled(Model):
    def __init__(self) -> None:
        super().__init__(return_remapped_features=True)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.tables(features)


def bags(seed: int, size: int = 8) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids in another order of features than the tables', one of them of no table."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * size,), generator=random)
    ids = torch.randint(0, IDS, (2, int(lengths.sum())), generator=random).prod(0) // IDS
    ids[::7] = -5 - seed
    return KeyedJaggedTensor(["h", "g", "none", "f"], ids, lengths=lengths)


def remapped(rank: int, world: int, kind: str) -> list[tuple[KeyedJaggedTensor, KeyedJaggedTensor]]:
    """The raw ids and the rows of a few steps, and whether the vectors are those of the rows."""
    sharders: list[Any] = [
        ManagedCollisionEmbeddingBagCollectionSharder(),
        ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(use_index_dedup=kind == "dedup")),
    ]
    torch.manual_seed(3)
    whole = Pooled() if kind == "pooled" else Unpooled()
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=world, compute_device="cpu"))
    plan = planner.collective_plan(whole, sharders, dist.group.WORLD)
    model = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=sharders)
    found = []
    for step in range(7):
        model.train(step < 6)
        features = bags(step * world + rank, 4 + rank)
        vectors, rows = model(features)
        assert rows.keys() == (["f", "g"] if kind == "pooled" else ["f", "g", "h"])
        for name in rows.keys():  # noqa: SIM118 - not a dict
            assert torch.equal(rows[name].lengths(), features[name].lengths())
            table = "u" if name == "h" else "t"
            weight = gathered(model, table)
            expected = weight[rows[name].values()]
            if kind == "pooled":
                lengths = rows[name].lengths().long()
                expected = torch.segment_reduce(expected, "sum", lengths=lengths, axis=0, initial=0)
                torch.testing.assert_close(vectors[name], expected)
            else:
                assert torch.equal(vectors[name].values(), expected)
        found.append((features, rows.wait()))
    return found


def gathered(model: DistributedModelParallel, table: str) -> torch.Tensor:
    """A table whole, from all ranks."""
    module = model.module.tables._embedding_module
    (weight,) = [p for name, p in module.named_parameters() if name.split(".")[1] == table]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, weight.detach().clone())
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["pooled", "unpooled", "dedup"])
@pytest.mark.parametrize("world", [1, 2])
def test_remapped_features_are_the_rows_that_are_looked_up(world: int, kind: str) -> None:
    """Rows of whole tables, for each rank's own ids in their order; one rank gives the rows of the unsharded module."""
    ranks = run_ranks(world, remapped, kind)
    if world > 1:
        assert all((rows.values() >= ROWS // 2).any() and (rows.values() < ROWS // 2).any() for _, rows in ranks[0])
        return
    torch.manual_seed(3)
    whole = Pooled() if kind == "pooled" else Unpooled()
    for step, (features, rows) in enumerate(ranks[0]):
        whole.train(step < 6)
        expected = whole(features)[1]
        assert expected.keys() == rows.keys()
        if kind != "dedup":  # a deduplicated id counts once
            assert torch.equal(rows.values(), expected.values())
        assert torch.equal(rows.lengths(), expected.lengths())


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
