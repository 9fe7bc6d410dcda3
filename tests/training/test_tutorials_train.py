"""The models of TorchRec's two tutorials train: planned by all ranks, sharded, with the losses of plain torch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

import recinfer
from recinfer.distributed.embedding_types import OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan, ShardingType
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.optimizers import in_backward_optimizer_filter
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

BATCH, STEPS, DIM = 8, 4, 64
ROWS = {"large_table_0": 4096, "large_table_1": 4096, "small_table_0": 1024, "small_table_1": 1024}
adagrad = partial(torch.optim.Adagrad, lr=0.5, eps=1e-8)


@dataclass(frozen=True)
class Case:
    """One training program."""

    kind: str  # "mixed": another type for each table; "own": what DistributedModelParallel plans by itself
    pooling: str = "SUM"
    in_backward: bool = False  # the optimizer by apply_optimizer_in_backward, else by fused_params
    variable: bool = False  # a batch size for each feature
    kernel: str | None = None

    @property
    def sharding(self) -> dict[str, str]:
        return MIXED if self.kind == "mixed" else dict.fromkeys(ROWS, self.kind)


def configs(pooling: str) -> list[recinfer.EmbeddingBagConfig]:
    return [
        recinfer.EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=[f"{name}_feature"],
            pooling=recinfer.PoolingType[pooling],
        )
        for name, rows in ROWS.items()
    ]


def weights() -> dict[str, Tensor]:
    """What every table starts from."""
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(rows, DIM, generator=random) / 8 for name, rows in ROWS.items()}


def targets(step: int) -> Tensor:
    return torch.randn(BATCH, len(ROWS) * DIM, generator=torch.Generator().manual_seed(900 + step))


def bags_of(step: int) -> dict[str, list[Tensor]]:
    """The global batch: for each table, the ids of each row; some bags are empty, few ids come often."""
    random = torch.Generator().manual_seed(step)
    drawn: dict[str, list[Tensor]] = {}
    for name, rows in ROWS.items():
        sizes = torch.randint(0, 4, (BATCH,), generator=random).tolist()
        drawn[name] = [torch.randint(0, 6, (n,), generator=random) * (rows // 6) for n in sizes]
    return drawn


def fed(step: int, rank: int, world_size: int, variable: bool) -> KeyedJaggedTensor:
    """The rank's part of the global batch; ``variable``: each feature without its repeated bags, with the way back."""
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    keys, rows, strides, inverse = [], [], [], []
    for name, bags in bags_of(step).items():
        whole = [tuple(bag.tolist()) for bag in bags[mine]]
        kept = sorted(set(whole)) if variable else whole
        keys.append(f"{name}_feature")
        rows += kept
        strides.append([len(kept)])
        inverse.append(torch.tensor([kept.index(bag) for bag in whole]))
    values = torch.tensor([i for bag in rows for i in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in rows])
    if not variable:
        return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
    return KeyedJaggedTensor(
        keys, values, lengths=lengths, stride_per_key_per_rank=strides, inverse_indices=(keys, torch.stack(inverse))
    )


def planned(module: nn.Module, case: Case, world_size: int, sharders: list[Any]) -> ShardingPlan | None:
    """As the texts: a topology of GPUs and constraints for each table, planned by all ranks together."""
    if case.kind == "own":
        return None
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cuda"),
        batch_size=BATCH,
        constraints={
            name: ParameterConstraints(
                sharding_types=[ShardingType(kind).value],
                compute_kernels=[case.kernel] if case.kernel else None,
                pooling_factors=[2.0],
            )
            for name, kind in case.sharding.items()
        },
        debug=True,
    )
    assert dist.group.WORLD is not None
    return planner.collective_plan(module, sharders, dist.group.WORLD)


def on_rank(rank: int, world_size: int, case: Case) -> tuple[list[float], str]:
    ebc = recinfer.EmbeddingBagCollection(device=cast(Any, "meta"), tables=configs(case.pooling))
    if case.in_backward:
        sharder = EmbeddingBagCollectionSharder()
        cut = [p for name, p in ebc.named_parameters() if case.sharding[name.split(".")[1]] != "data_parallel"]
        apply_optimizer_in_backward(torch.optim.Adagrad, cut, {"lr": 0.5, "eps": 1e-8})
    else:
        fused = {"optimizer": OptimType.ADAGRAD, "learning_rate": 0.5, "eps": 1e-8}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    sharders = [cast(ModuleSharder[nn.Module], sharder)]
    plan = planned(ebc, case, world_size, sharders)
    assert dist.group.WORLD is not None
    model = DistributedModelParallel(
        ebc,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=plan,
        sharders=sharders,
        device=torch.device("cpu"),
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print(f"rank:{rank},sharding plan: {model.plan}")
    found_types = {name: p.sharding_type for name, p in cast(Any, model.plan.plan[""]).items()}
    each_rectangle(model, weights(), lambda held, given: held.copy_(given))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    rest = [KeyedOptimizerWrapper(dense, adagrad)] if dense else []
    optimizer = CombinedOptimizer([model.fused_optimizer, *rest])
    assert bool(dense) == ("data_parallel" in found_types.values())

    losses, mine = [], slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    for step in range(STEPS):
        pooled = model(fed(step, rank, world_size, case.variable))
        found = torch.cat([pooled[f"{name}_feature"] for name in ROWS], dim=1)
        loss = nn.functional.mse_loss(found, targets(step)[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world_size)
    _, trained = plain(case.pooling)
    each_rectangle(model, trained, partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5))
    assert list(found_types) == list(ROWS) and (case.kind == "own" or found_types == case.sharding)
    return losses, printed.getvalue()


def each_rectangle(model: nn.Module, whole: dict[str, Tensor], action: Callable[[Tensor, Tensor], Any]) -> None:
    """Call ``action`` with each piece that this rank holds and the same piece of the whole tables."""
    for key, value in model.state_dict().items():
        table = whole[key.split(".")[1]]
        if not isinstance(value, ShardedTensor):
            action(value.detach(), table)
            continue
        assert tuple(value.size()) == tuple(table.shape)
        for shard in value.local_shards():
            (r, c), (n, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            action(shard.tensor.detach(), table[r : r + n, c : c + w])


def plain(pooling: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same by torch alone: one process, whole tables."""
    tables = {
        name: nn.EmbeddingBag.from_pretrained(w, freeze=False, mode=pooling.lower()) for name, w in weights().items()
    }
    optimizer = adagrad([t.weight for t in tables.values()])
    losses = []
    for step in range(STEPS):
        found = []
        for name, bags in bags_of(step).items():
            ends = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
            found.append(tables[name](torch.cat(bags), ends))
        loss = nn.functional.mse_loss(torch.cat(found, dim=1), targets(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.weight.detach() for name, t in tables.items()}


KINDS = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel"]
MIXED = dict(zip(ROWS, ["row_wise", "table_wise", "column_wise", "data_parallel"]))


def check(world_size: int, case: Case) -> None:
    expected, _ = plain(case.pooling)
    assert max(expected) - min(expected) > 1e-3
    for losses, printed in run_ranks(world_size, on_rank, case):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "sharding plan: " in printed and all(name in printed for name in ROWS)
        if case.kind != "own":
            assert all(kind in printed for kind in case.sharding.values())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "mixed", "own"])
def test_each_type_of_the_text_trains(kind: str, world_size: int) -> None:
    check(world_size, Case(kind))


def test_the_optimizer_in_the_backward() -> None:
    check(2, Case("mixed", in_backward=True))


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_a_table_that_the_plan_puts_into_host_memory_trains_on_cpu(kernel: str) -> None:
    check(2, Case("column_wise", kernel=kernel))


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "mixed"])
def test_mean_pooling(kind: str) -> None:
    check(2, Case(kind, pooling="MEAN"))


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "mixed"])
def test_a_batch_size_for_each_feature(kind: str, pooling: str) -> None:
    check(2, Case(kind, pooling=pooling, variable=True))
