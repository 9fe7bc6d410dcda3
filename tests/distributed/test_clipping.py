"""Clipped and warmed-up training on ranks with sharded tables is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recinfer.distributed.types import ShardingPlan
from recinfer.optim.clipping import GradientClipping, GradientClippingOptimizer
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import EBC, TABLES, AnySharder, full_state, make_batch, make_model

STEPS = 4
STAGES = [WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.25), WarmupStage(WarmupPolicy.STEP, 9, 0.5)]
CLIPS: list[tuple[GradientClipping, float, float | str]] = [
    (GradientClipping.NORM, 0.05, 2.0),
    (GradientClipping.NORM, 0.02, 1.0),
    (GradientClipping.NORM, 0.01, "inf"),
    (GradientClipping.VALUE, 0.002, 2.0),
]
PLANS = {
    "mixed": {"t0": row_wise(), "t1": column_wise(ranks=[0, 1]), "t2": table_wise(rank=1), "t3": data_parallel()},
    # The first rank has no part of any table, so it has no gradient that is shared.
    "all on one": {name: table_wise(rank=1) for name in ("t0", "t1", "t2", "t3")},
}


def wrapped(params: dict[str, Any], clip: tuple[GradientClipping, float, float | str], **more: Any) -> Any:
    inner = KeyedOptimizerWrapper(params, lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.5))
    clipped = GradientClippingOptimizer(inner, clip[0], max_gradient=clip[1], norm_type=clip[2], **more)
    return clipped, WarmupOptimizer(clipped, STAGES, lr=2.0)


def sharded_run(rank: int, world_size: int, plan: str, clip: tuple[GradientClipping, float, float | str]) -> Any:
    model = make_model()
    module = model.get_submodule(EBC)
    made = construct_module_sharding_plan(
        module, PLANS[plan], AnySharder(), local_size=2, world_size=2, device_type="cpu"
    )
    for sharding in made.values():
        sharding.compute_kernel = "dense"  # fused kernels leave no gradients to clip
    dmp = DistributedModelParallel(model, plan=ShardingPlan({EBC: made}), sharders=[AnySharder()])
    params = dict(dmp.named_parameters())
    pgs = {
        p: [dist.group.WORLD]
        for n, p in params.items()
        if ("embedding_bags" in n and ".t3." not in n) or (plan != "mixed" and "embedding_bags" in n)
    }
    clipped, optimizer = wrapped(params, clip, enable_global_grad_clip=True, param_to_pgs=pgs)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        dmp(make_batch(step, rank * 12, (rank + 1) * 12))[0].backward()
        optimizer.step()
        norms.append(clipped.last_total_grad_norm)
    return norms, full_state(dmp.state_dict()), [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("clip", CLIPS, ids=lambda c: f"{c[0].value}-{c[2]}")
def test_clipping_counts_the_gradients_of_all_ranks(
    plan: str, clip: tuple[GradientClipping, float, float | str]
) -> None:
    model = make_model()
    clipped, optimizer = wrapped(dict(model.named_parameters()), clip)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(make_batch(step, 0, 24))[0].backward()
        optimizer.step()
        norms.append(clipped.last_total_grad_norm)
    if clip[0] is GradientClipping.NORM:
        assert min(float(n) for n in norms) > clip[1]  # it had something to do
    found = run_ranks(2, sharded_run, plan, clip)
    for of_rank, _, rates in found:
        if clip[0] is GradientClipping.NORM:
            torch.testing.assert_close(of_rank, norms, rtol=1e-4, atol=1e-6)
        assert rates == [optimizer.param_groups[0]["lr"]]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def warmed(rank: int, world_size: int) -> Any:
    model = make_model()
    made = construct_module_sharding_plan(
        model.get_submodule(EBC), PLANS["mixed"], AnySharder(fused_params={"learning_rate": 9.0}),
        local_size=2, world_size=2, device_type="cpu",
    )  # fmt: skip
    sharder = AnySharder(fused_params={"learning_rate": 9.0})
    for name, sharding in made.items():
        sharding.compute_kernel = "fused" if name != "t3" else "dense"
    dmp = DistributedModelParallel(model, plan=ShardingPlan({EBC: made}), sharders=[sharder])
    own = {id(p) for s in dmp.module.get_submodule(EBC).embedding_bags.children() for p in s.parameters()}
    dense = {n: p for n, p in dmp.named_parameters() if id(p) not in own or ".t3." in n}
    wrapper = KeyedOptimizerWrapper(dense, lambda ps: torch.optim.SGD(ps, lr=9.0))
    optimizer = WarmupOptimizer(CombinedOptimizer([dmp.fused_optimizer, wrapper]), STAGES, lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        dmp(make_batch(step, rank * 12, (rank + 1) * 12))[0].backward()
        optimizer.step()
    return full_state(dmp.state_dict())


def test_warmup_sets_the_rates_of_fused_kernels_too() -> None:
    model: nn.Module = make_model()
    inner = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda ps: torch.optim.SGD(ps, lr=9.0))
    optimizer = WarmupOptimizer(inner, STAGES, lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(make_batch(step, 0, 24))[0].backward()
        optimizer.step()
    found = run_ranks(2, warmed)[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


assert [t.name for t in TABLES] == list(PLANS["mixed"])


def norm_of_some(rank: int, world_size: int) -> float:
    pair = dist.new_group([0, 1])
    everybody, own = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    everybody.grad, own.grad = torch.tensor([3.0]), torch.tensor([4.0])
    params = {"everybody": everybody, **({"own": own} if rank == 1 else {})}
    inner = KeyedOptimizerWrapper(params, lambda ps: torch.optim.SGD(ps, lr=1.0))
    clipped = GradientClippingOptimizer(
        inner, GradientClipping.NORM, 1.0, enable_global_grad_clip=True, param_to_pgs={own: [pair]} if rank == 1 else None
    )  # fmt: skip
    return float(clipped.clip_grad_norm_())


def test_only_the_ranks_of_a_group_count_its_gradients() -> None:
    assert run_ranks(3, norm_of_some) == pytest.approx([5.0, 5.0, 3.0])
