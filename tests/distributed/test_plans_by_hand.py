"""Plans written by hand: which kernel a table gets, which optimizer trains it, and what the generators accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recinfer.distributed.embedding_types import OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from recinfer.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from recinfer.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from recinfer.distributed.types import ShardingPlan
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.optimizers import in_backward_optimizer_filter
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import RankError, run_ranks

NAMES = ["t0", "t1", "t2"]
CPU = torch.device("cpu")
STEPS = 3


def tables(device: str = "cpu") -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(12, 4, name, feature_names=[f"f{i}"]) for i, name in enumerate(NAMES)],
        device=torch.device(device),
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = tables()
        self.over = nn.Linear(12, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[f"f{i}"] for i in range(3)], dim=1))


def batch(step: int, first: int, stop: int) -> KeyedJaggedTensor:
    """Bags ``first`` to ``stop`` of six of two ids each."""
    ids = torch.randint(0, 12, (3, 6, 2), generator=torch.Generator().manual_seed(step))[:, first:stop]
    return KeyedJaggedTensor(["f0", "f1", "f2"], ids.reshape(-1), lengths=torch.full((3 * (stop - first),), 2))


def train(model: nn.Module, optimizer: Any, rank: int = 0, world_size: int = 1) -> None:
    share = 6 // world_size
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank * share, (rank + 1) * share)).square().mean().backward()
        optimizer.step()


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state with whole tensors, on rank 0."""
    found = {}
    for key, value in state.items():
        out = value
        if hasattr(value, "gather") and hasattr(value, "local_shards"):
            out = torch.empty(value.size())
            value.gather(0, out if dist.get_rank() == 0 else None)
        found[key] = out.detach().clone()
    return found


def by_hand(
    model: nn.Module, per_table: dict[str, ParameterShardingGenerator], world_size: int, local_size: int | None = None
) -> DistributedModelParallel:
    plan = construct_module_sharding_plan(
        model.get_submodule("ebc"),
        per_table,
        local_size=local_size or world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}), device=CPU)


# ------------------------------------------------------------------------------------------------- the user's optimizer

PLANS: dict[str, Callable[[], dict[str, ParameterShardingGenerator]]] = {
    "table_wise": lambda: {"t0": table_wise(0), "t1": table_wise(1), "t2": table_wise(0)},
    "row_wise": lambda: dict.fromkeys(NAMES, row_wise()),
    "column_wise": lambda: dict.fromkeys(NAMES, column_wise(ranks=[1, 0])),
    "hosts": lambda: {"t0": table_row_wise(0), "t1": table_row_wise(1), "t2": grid_shard([0, 1])},
    "dense": lambda: {"t0": table_wise(1, compute_kernel="dense"), "t1": row_wise(compute_kernel="dense"), "t2": data_parallel()},
    "sizes": lambda: dict.fromkeys(NAMES, row_wise(([3, 2, 4, 3], "cpu"))),
}  # fmt: skip


def trained(rank: int, world_size: int, in_backward: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, make in PLANS.items():
        torch.manual_seed(1)
        model = Model()
        if in_backward:  # of tables that the plan keeps dense: their parameters come back plain
            apply_optimizer_in_backward(torch.optim.Adam, model.ebc.parameters(), {"lr": 9.0})
        if in_backward and name != "dense":
            continue
        dmp = by_hand(model, make(), world_size, local_size=1 if name == "hosts" else None)
        users = dict(in_backward_optimizer_filter(dmp.named_parameters()))
        assert {n.removesuffix("_1") for n in users} == {f"ebc.embedding_bags.{t}.weight" for t in NAMES} | {
            "over.weight",
            "over.bias",
        }
        assert not dmp.fused_optimizer.params
        train(dmp, torch.optim.SGD(users.values(), lr=0.5), rank, world_size)
        found[name] = whole(dmp.state_dict())
    return found


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_plan_by_hand_trains_with_the_users_optimizer(in_backward: bool) -> None:
    torch.manual_seed(1)
    plain = Model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    found = run_ranks(2, trained, in_backward)[0]
    assert list(found) == (["dense"] if in_backward else list(PLANS))
    for name, state in found.items():
        assert set(state) == set(plain.state_dict())
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, msg=lambda m, where=(name, key): f"{where}: {m}")


def tables_alone(rank: int, world_size: int) -> list[tuple[str, int]]:
    """A model that is all tables: the rank without any has an optimizer too."""
    holder = nn.Module()
    holder.ebc = tables()
    dmp = by_hand(holder, dict.fromkeys(NAMES, table_wise(0)), world_size)
    optimizer = torch.optim.SGD([p for _, p in in_backward_optimizer_filter(dmp.named_parameters())], lr=0.5)
    dmp.module.ebc(batch(0, 0, 6)).values().sum().backward()
    optimizer.step()
    return [(name, parameter.numel()) for name, parameter in dmp.named_parameters()]


def test_every_rank_names_every_table() -> None:
    names = [f"ebc.embedding_bags.{name}.weight" for name in NAMES]
    assert run_ranks(2, tables_alone) == [[(name, 48) for name in names], [(name, 0) for name in names]]


def planned_dense(rank: int, world_size: int) -> tuple[list[str], list[str], bool]:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        constraints={
            "t0": ParameterConstraints(compute_kernels=["dense"]),
            "t1": ParameterConstraints(sharding_types=["table_wise"]),
            "t2": ParameterConstraints(sharding_types=["column_wise"]),
        },
        debug=False,
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    dmp = DistributedModelParallel(model, plan=plan, device=CPU, sharders=sharders)
    users = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    before = whole(dmp.state_dict())["ebc.embedding_bags.t0.weight"]
    dmp(batch(0, 0, 6)).sum().backward()
    kept = torch.equal(whole(dmp.state_dict())["ebc.embedding_bags.t0.weight"], before)
    return (
        list(users),
        sorted(dmp.fused_optimizer.params),
        kept and users["ebc.embedding_bags.t0.weight"].grad is not None,
    )


def test_a_table_that_the_plan_keeps_dense_is_the_users() -> None:
    for users, fused, is_users in run_ranks(2, planned_dense):
        assert users == ["ebc.embedding_bags.t0.weight", "over.weight", "over.bias"]
        assert set(fused) <= {"ebc.embedding_bags.t1.weight", "ebc.embedding_bags.t2.weight"}
        assert is_users


# ------------------------------------------------------------------------------------------------- nobody's optimizer


def fused_without_optimizer(rank: int, world_size: int) -> list[str]:
    said = []
    per_table = dict.fromkeys(NAMES, row_wise(compute_kernel="fused"))
    dmp = by_hand(Model(), per_table, world_size)
    before = [p.detach().clone() for p in dmp.module.ebc.parameters()]
    dmp.load_state_dict(dmp.state_dict())
    with torch.no_grad():
        dmp(batch(0, 0, 6))
    dmp.eval()
    dmp(batch(0, 0, 6))  # with gradients on, but no backward
    try:
        dmp.train()(batch(0, 0, 6)).sum().backward()
    except ConfigError as error:
        said.append(str(error))
    assert all(torch.equal(p, old) for p, old in zip(dmp.module.ebc.parameters(), before))
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = 0.25
    dmp(batch(0, 0, 6)).sum().backward()
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = 0.01  # a schedule may pass through any rate
    dmp(batch(0, 0, 6)).sum().backward()
    assert not any(torch.equal(p, old) for p, old in zip(dmp.module.ebc.parameters(), before))
    return said


def test_fused_tables_without_an_optimizer_refuse_to_train() -> None:
    for said in run_ranks(2, fused_without_optimizer):
        assert len(said) == 1
        for part in ("t0, t1, t2", "apply_optimizer_in_backward", "fused_params", "dense"):
            assert part in said[0]


def default_plan(rank: int, world_size: int, params: dict[str, Any] | None) -> None:
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params=params)]
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in NAMES}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"), constraints=constraints, debug=False
    )
    model = Model()
    dmp = DistributedModelParallel(model, plan=planner.plan(model, sharders), device=CPU, sharders=sharders)
    dmp(batch(0, 0, 6)).sum().backward()


@pytest.mark.parametrize("params", [{"learning_rate": 0.01}, {"lr": 0.1}, {"optimizer": OptimType.ADAGRAD}])
def test_settings_of_the_sharder_name_an_optimizer(params: dict[str, Any]) -> None:
    run_ranks(1, default_plan, params)


def test_a_planners_plan_without_an_optimizer_refuses_to_train() -> None:
    with pytest.raises(RankError, match="fused tables that have no optimizer: t0, t1, t2"):
        run_ranks(1, default_plan, {"cache_load_factor": 0.5})


# ------------------------------------------------------------------------------------------------- the generators

GENERATORS: dict[str, ParameterShardingGenerator] = {
    "table_wise": table_wise(0),
    "row_wise": row_wise(),
    "column_wise": column_wise(ranks=[0, 1]),
    "table_row_wise": table_row_wise(0),
    "grid_shard": grid_shard([0]),
    "data_parallel": data_parallel(),
}


def kernels(module: nn.Module, generate: ParameterShardingGenerator, device: str, **kwargs: Any) -> set[str]:
    plan: Any = construct_module_sharding_plan(
        module, dict.fromkeys(NAMES, generate), local_size=2, world_size=2, device_type=device, **kwargs
    )
    return {sharding.compute_kernel for sharding in plan.values()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_kernel_is_dense_unless_the_optimizer_runs_in_the_backward(kind: str, device: str) -> None:
    generate = GENERATORS[kind]
    fused = {"dense" if kind == "data_parallel" else "fused"}
    plain = tables("meta")
    assert kernels(plain, generate, device) == {"dense"}
    cached = EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.2})
    assert kernels(plain, generate, device, sharder=cached) == {"dense"}
    named = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.2})
    assert kernels(plain, generate, device, sharder=named) == fused
    noted = tables("meta")
    apply_optimizer_in_backward(torch.optim.SGD, noted.parameters(), {"lr": 0.5})
    assert kernels(noted, generate, device) == fused


def test_a_kernel_that_is_asked_for() -> None:
    module = tables("meta")
    for kernel in ("dense", "fused", "fused_uvm", "fused_uvm_caching"):
        for device in ("cpu", "cuda"):
            assert kernels(module, table_wise(0, compute_kernel=kernel), device) == {kernel}
    assert kernels(module, data_parallel(compute_kernel="fused"), "cpu") == {"fused"}
    quantized = QuantEmbeddingBagCollection.from_float(tables())
    assert kernels(quantized, table_wise(0), "cpu") == {"quant"}
    assert kernels(quantized, row_wise(compute_kernel="quant_uvm"), "cuda") == {"quant_uvm"}
    with pytest.raises(
        ConfigError,
        match="compute_kernel 'quant'; expected one that EmbeddingBagCollectionSharder supports: dense, fused,",
    ):
        kernels(module, table_wise(0, compute_kernel="quant"), "cpu")
    with pytest.raises(
        ConfigError, match="compute_kernel 'dense'; expected one that QuantEmbeddingBagCollectionSharder supports"
    ):
        kernels(quantized, table_wise(0, compute_kernel="dense"), "cpu", sharder=QuantEmbeddingBagCollectionSharder())


def test_row_wise_sizes_go_round_the_ranks() -> None:
    def placed(sizes: tuple[list[int], str | list[str]]) -> Iterator[tuple[int, int, int]]:
        plan: Any = construct_module_sharding_plan(
            tables("meta"), dict.fromkeys(NAMES, row_wise(sizes)), local_size=2, world_size=2, device_type="cpu"
        )
        for shard, rank in zip(plan["t0"].sharding_spec.shards, plan["t0"].ranks):
            assert shard.placement.rank() == rank
            yield shard.shard_offsets[0], shard.shard_sizes[0], rank

    assert list(placed(([3, 2, 4, 3], "cpu"))) == [(0, 3, 0), (3, 2, 1), (5, 4, 0), (9, 3, 1)]
    with pytest.raises(ConfigError, match="sizes sum to 9; the table has 12 rows"):
        list(placed(([3, 2, 4], "cpu")))
    with pytest.raises(ConfigError, match="3 sizes and 2 device kinds"):
        list(placed(([3, 2, 7], ["cpu", "cpu"])))
