"""DistributedModelParallel: what it shards, what it replicates, its names and its state, on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from recinfer.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    get_module,
    get_unwrapped_module,
)
from recinfer.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recinfer.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from recinfer.errors import CheckpointError, ConfigError
from recinfer.models.dlrm import DLRM, DLRMTrain
from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.optimizers import in_backward_optimizer_filter
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.training.batches import Batch
from tests.distributed.spawn import RankError, run_ranks

BATCH, STEPS = 6, 3
TABLES = [
    EmbeddingBagConfig(name="t0", num_embeddings=40, embedding_dim=8, feature_names=["f0", "f3"]),
    EmbeddingBagConfig(name="t1", num_embeddings=30, embedding_dim=8, feature_names=["f1"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(name="t2", num_embeddings=11, embedding_dim=8, feature_names=["f2"]),
    EmbeddingBagConfig(name="t3", num_embeddings=7, embedding_dim=8, feature_names=["f4"]),
]
EBC = "model.sparse_arch.embedding_bag_collection"


class AnySharder(EmbeddingBagCollectionSharder):
    """Every sharding type on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t.value for t in ShardingType]


def make_model(device: str = "cpu", seed: int = 0) -> DLRMTrain:
    torch.manual_seed(seed)
    return DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=TABLES, device=torch.device(device)),
            dense_in_features=3,
            dense_arch_layer_sizes=[5, 8],
            over_arch_layer_sizes=[4, 1],
        )
    )


def make_plan(model: nn.Module, world_size: int) -> ShardingPlan:
    module = model.get_submodule(EBC)
    per_table = {
        "t0": row_wise(),
        "t1": column_wise(ranks=[r % world_size for r in range(2)]),
        "t2": table_wise(rank=world_size - 1),
        "t3": data_parallel(compute_kernel="fused"),
    }
    made = construct_module_sharding_plan(
        module, per_table, AnySharder(), local_size=world_size, world_size=world_size, device_type="cpu"
    )
    return ShardingPlan(plan={EBC: made})


def make_batch(step: int, first: int, stop: int) -> Batch:
    """Rows ``first`` to ``stop`` of the global batch of ``step``."""
    random = torch.Generator().manual_seed(100 + step)
    dense, labels = torch.randn(24, 3, generator=random), torch.randint(0, 2, (24,), generator=random).float()
    features = [f for t in TABLES for f in t.feature_names]
    rows = [t.num_embeddings for t in TABLES for _ in t.feature_names]
    values, lengths = [], []
    for num in rows:
        size = torch.randint(0, 4, (24,), generator=random)
        ids = torch.randint(0, num, (int(size.sum()),), generator=random)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
        values.append(ids[starts[first] : starts[stop]])
        lengths.append(size[first:stop])
    sparse = KeyedJaggedTensor(keys=features, values=torch.cat(values), lengths=torch.cat(lengths))
    return Batch(dense[first:stop], sparse, labels[first:stop])


def optimizer_of(dmp: DistributedModelParallel) -> CombinedOptimizer:
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    return CombinedOptimizer(
        [dmp.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))]
    )


def sharded(rank: int, world_size: int, device: str = "cpu", **kwargs: Any) -> DistributedModelParallel:
    model = make_model(device)
    # SGD, because row-wise Adagrad keeps one number a row and column piece: cut columns then learn differently.
    apply_optimizer_in_backward(torch.optim.SGD, model.get_submodule(EBC).parameters(), {"lr": 0.5})
    kwargs.setdefault("plan", make_plan(model, world_size))
    return DistributedModelParallel(model, sharders=[AnySharder()], **kwargs)


def full_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors of a sharded state dict, on rank 0."""
    found = {}
    for key, value in state.items():
        if hasattr(value, "local_shards"):
            whole = torch.empty(value.size()) if dist.get_rank() == 0 else None
            value.gather(0, whole)
            found[key] = whole
        else:
            found[key] = value.detach().clone()
    return found


def train_sharded(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    dmp = sharded(rank, world_size)
    optimizer = optimizer_of(dmp)
    share = 24 // world_size
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = dmp(make_batch(step, rank * share, (rank + 1) * share))
        loss.backward()
        optimizer.step()
    return full_state(dmp.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_one_process(world_size: int) -> None:
    model = make_model()
    tables = list(model.get_submodule(EBC).parameters())
    ours = {id(p) for p in tables}
    optimizers = [
        torch.optim.SGD(tables, lr=0.5),
        torch.optim.SGD([p for p in model.parameters() if id(p) not in ours], lr=0.1),
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(make_batch(step, 0, 24))[0].backward()
        for optimizer in optimizers:
            optimizer.step()
    found = run_ranks(world_size, train_sharded)[0]
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def names_and_types(rank: int, world_size: int) -> dict[str, Any]:
    dmp = sharded(rank, world_size, device="meta")
    buckets = sharded(rank, world_size, init_data_parallel=False)
    before = isinstance(buckets._dmp_wrapped_module, nn.parallel.DistributedDataParallel)
    buckets.init_data_parallel()
    buckets.init_data_parallel()
    copied = dmp.copy(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"copy to cuda:0: .* were sharded for cpu and use its kernels"):
        dmp.copy(torch.device("cuda", 0))
    batch = make_batch(0, 0, 4)
    loss = dmp.eval()(batch)[0]
    same = copied.eval()(batch)[0]
    with torch.no_grad():
        next(p for n, p in copied.named_parameters() if "over_arch" in n).add_(1.0)
    return {
        "ebc": type(dmp.module.get_submodule(EBC)).__name__,
        "module": type(dmp.module).__name__,
        "parameters": sorted(name for name, _ in dmp.named_parameters()),
        "bare": sorted(name for name, _ in dmp.bare_named_parameters()),
        "state": sorted(dmp.state_dict(prefix="x.")),
        "buffers": [name for name, _ in dmp.named_buffers()],
        "ddp": (before, isinstance(buckets._dmp_wrapped_module, nn.parallel.DistributedDataParallel)),
        "unwrapped": get_module(dmp) is dmp.module and get_unwrapped_module(dmp) is dmp.module,
        "fused": sorted(dmp.fused_optimizer.params),
        "plan": sorted(dmp.plan.plan[EBC]),
        "sparse_grads": dmp.sparse_grad_parameter_names(),
        "meta": any(p.is_meta for p in dmp.parameters()),
        "copy": (float(loss), float(same), torch.equal(loss, dmp(batch)[0])),
    }


def test_names_are_the_models_own() -> None:
    results = run_ranks(2, names_and_types)
    expected = sorted(name for name, _ in make_model("meta").named_parameters())
    for rank, found in enumerate(results):
        assert found["ebc"] == ShardedEmbeddingBagCollection.__name__
        assert found["module"] == "DLRMTrain"
        assert set(found["parameters"]) <= set(expected)
        assert {n for n in expected if "embedding_bags" not in n} <= set(found["parameters"])
        assert f"{EBC}.embedding_bags.t2.weight" in (expected if rank == 0 else found["parameters"])
        assert all(name.startswith("module.") for name in found["bare"])
        assert found["state"] == sorted(f"x.{name}" for name in expected)
        assert found["buffers"] == []
        assert found["ddp"] == (False, True)
        assert found["unwrapped"]
        assert all(name.startswith(EBC) for name in found["fused"])
        assert found["plan"] == ["t0", "t1", "t2", "t3"]
        assert found["sparse_grads"] == []
        assert not found["meta"]
        loss, same, unchanged = found["copy"]
        assert loss == same and unchanged


def round_trip(rank: int, world_size: int) -> list[bool]:
    one, two = sharded(rank, world_size), sharded(rank, world_size, device="meta")
    before = full_state(one.state_dict())
    result = two.load_state_dict(one.state_dict())
    after = full_state(two.state_dict())
    state = one.state_dict()
    state.pop("model.over_arch.model.0.bias", None) or state.popitem()
    errors = []
    try:
        two.load_state_dict({**state, "stray": torch.zeros(1)})
    except CheckpointError as error:
        errors.append("stray" in str(error) and "1 keys are missing" in str(error))
    loose = two.load_state_dict({**state, "stray": torch.zeros(1)}, strict=False)
    equal = rank != 0 or all(torch.equal(before[k], after[k]) for k in before)
    return [equal, not result.missing_keys, *errors, loose.unexpected_keys == ["stray"], len(loose.missing_keys) == 1]


def test_state_loads_and_misfits_are_named() -> None:
    for found in run_ranks(2, round_trip):
        assert found == [True] * 5


def planned_by_itself(rank: int, world_size: int) -> tuple[list[str], float]:
    torch.manual_seed(rank)  # replicated values become rank 0's
    dmp = DistributedModelParallel(make_model("meta", seed=rank))
    return sorted(dmp.plan.plan[EBC]), float(next(p for n, p in dmp.named_parameters() if "over_arch" in n).sum())


def test_without_a_plan_the_planner_makes_one() -> None:
    (tables, total), (_, other) = run_ranks(2, planned_by_itself)
    assert tables == ["t0", "t1", "t2", "t3"]
    assert total == other


class Recorded(DataParallelWrapper):
    """A wrapper of the user's."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dmp.seen = (env.world_size, device.type)


def wrapped_otherwise(rank: int, world_size: int) -> Any:
    dmp = sharded(rank, world_size, data_parallel_wrapper=Recorded())
    half = sharded(rank, world_size, data_parallel_wrapper=DefaultDataParallelWrapper(allreduce_comm_precision="fp16"))
    half(make_batch(0, 0, 4))[0].backward()
    grads = torch.cat([p.grad.view(-1) for n, p in half.named_parameters() if "over_arch" in n])
    other = grads.clone()
    dist.broadcast(other, 0)
    return dmp.seen, torch.equal(grads, other)


def test_another_data_parallel_wrapper_and_smaller_gradients() -> None:
    assert run_ranks(2, wrapped_otherwise) == [((2, "cpu"), True)] * 2
    with pytest.raises(ConfigError, match="fp8"):
        DefaultDataParallelWrapper(allreduce_comm_precision="fp8")


def wrong_plans(rank: int, world_size: int) -> None:
    model = make_model("meta")
    plan = make_plan(model, world_size)
    with pytest.raises(ConfigError, match="names module 'nowhere', which the model does not have"):
        DistributedModelParallel(model, plan=ShardingPlan({"nowhere": plan.plan[EBC]}), sharders=[AnySharder()])
    with pytest.raises(ConfigError, match="there is no sharder for that class"):
        DistributedModelParallel(model, plan=ShardingPlan({"model.over_arch": plan.plan[EBC]}), sharders=[AnySharder()])


def test_plans_that_do_not_fit_are_refused() -> None:
    run_ranks(1, wrong_plans)
    with pytest.raises(ConfigError, match="needs a process group"):
        DistributedModelParallel(make_model("meta"))


def dies(rank: int, world_size: int) -> None:
    dmp = sharded(rank, world_size)
    if rank == 1:
        raise RuntimeError("rank 1 breaks")
    for step in range(50):
        dmp(make_batch(step, 0, 4))[0].backward()


def test_a_rank_that_breaks_ends_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 breaks"):
        run_ranks(2, dies)
