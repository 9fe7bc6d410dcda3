"""Optimizers in the backward of sharded tables: every argument of every class has its class's effect, or is refused.

A fused kernel steps the rows that a batch looked up, and no others: momentum and weight decay do not move the rest, which
torch moves when the gradient is dense. So the reference is the class itself with one parameter per row, and a gradient at
the looked-up rows only; the step that Adam's bias correction counts is that of the whole table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import recinfer.optim
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner.model.facts import _optimizer
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from recinfer.distributed.types import ShardingPlan
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, DIM = 6, 4
START = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4))
# Ids of each step: duplicates in a bag and over bags, rows that only some steps look up, and row 5, which none does.
BATCHES = ([[0, 1, 1], [1, 2]], [[2, 1], [1]], [[4, 4], []], [[0, 1, 2], [0]])

OFF = {"foreach": True, "differentiable": True, "fused": True, "maximize": True}
TORCH: dict[type[torch.optim.Optimizer], dict[str, dict[str, Any]]] = {
    torch.optim.SGD: {"same": {"lr": 0.3, "weight_decay": 0.2}, "refused": {"momentum": 0.9, "dampening": 0.5, **OFF}},
    torch.optim.Adagrad: {
        "same": {"lr": 0.3, "weight_decay": 0.2, "eps": 0.1},
        "refused": {"lr_decay": 0.1, "initial_accumulator_value": 0.1, **OFF},
    },
    torch.optim.Adam: {
        "same": {"lr": 0.3, "betas": (0.7, 0.8), "eps": 0.1, "decoupled_weight_decay": True},
        "refused": {"weight_decay": 0.2, "amsgrad": True, "capturable": True, **OFF},
    },
    torch.optim.AdamW: {
        "same": {"lr": 0.3, "betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.2},
        "refused": {"amsgrad": True, "capturable": True, **OFF},
    },
}
# Together with others.
TORCH[torch.optim.SGD]["refused"]["nesterov"] = {"nesterov": True, "momentum": 0.9}
TORCH[torch.optim.Adam]["same"]["decoupled_weight_decay"] = {"decoupled_weight_decay": True, "weight_decay": 0.2}
OURS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    recinfer.optim.SGD: {"lr": 0.3, "weight_decay": 0.2},
    recinfer.optim.Adagrad: {"lr": 0.3, "eps": 0.1, "weight_decay": 0.2},
    recinfer.optim.RowWiseAdagrad: {"lr": 0.3, "eps": 0.1, "weight_decay": 0.2},
    recinfer.optim.LarsSGD: {"lr": 0.3, "momentum": 0.5, "eta": 0.1, "weight_decay": 0.2},
    **{
        of_adam: {"lr": 0.3, "beta1": 0.7, "beta2": 0.8, "betas": (0.6, 0.7), "eps": 0.1, "weight_decay": 0.2}
        for of_adam in (
            recinfer.optim.Adam,
            recinfer.optim.PartialRowWiseAdam,
            recinfer.optim.LAMB,
            recinfer.optim.PartialRowWiseLAMB,
        )
    },
}


def arguments(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [value if isinstance(value, dict) else {name: value} for name, value in given.items()]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(
    optimizer: Any, kwargs: dict[str, Any], kernel: str = "fused", fused_params: dict[str, Any] | None = None
) -> DistributedModelParallel:
    config = EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"], init_fn=lambda rows: rows.copy_(START))
    model = nn.Sequential(EmbeddingBagCollection([config]))
    apply_optimizer_in_backward(optimizer, model.parameters(), kwargs)
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused_params)
    placed = table_wise(rank=0, compute_kernel=kernel)
    plan = construct_module_sharding_plan(model[0], {"t": placed}, sharder, 1, 1, "cpu")
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"0": plan}), sharders=[sharder]
    )


def loss(pooled: Tensor, step: int) -> Tensor:
    return (pooled * torch.randn(pooled.shape, generator=torch.Generator().manual_seed(step))).sum()


def trained(dmp: DistributedModelParallel) -> Tensor:
    for step, bags in enumerate(BATCHES):
        ids, lengths = [i for bag in bags for i in bag], [len(bag) for bag in bags]
        features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor(lengths))
        loss(dmp(features).values(), step).backward()
    return next(dmp.parameters()).detach().view(ROWS, DIM)


def by_the_class(optimizer: Any, kwargs: dict[str, Any], rowwise: bool = False) -> Tensor:
    """A parameter per row: ``[1, dim]`` for classes with state per row, else ``[dim]``."""
    rows = [nn.Parameter(row.clone().view(1, -1) if rowwise else row.clone()) for row in START]
    stepper = optimizer(rows, **kwargs)
    of_adam = "betas" in stepper.defaults
    for step, bags in enumerate(BATCHES):
        stepper.zero_grad()
        zero = torch.zeros(DIM)
        loss(torch.stack([sum((rows[i].view(-1) for i in bag), zero) for bag in bags]), step).backward()
        for row in rows:
            if row.grad is not None and (of_adam or "beta1" in stepper.defaults):
                state = stepper.state[row]
                if not state:
                    names = ("exp_avg", "exp_avg_sq") if of_adam else ()
                    state.update({name: torch.zeros_like(row) for name in names})
                state["step"] = torch.tensor(float(step))
        stepper.step()
    return torch.stack([row.detach().view(-1) for row in rows])


def sparse_by_the_class(optimizer: Any, kwargs: dict[str, Any]) -> Tensor:
    """The class steps a table with a sparse gradient, as it does without sharding."""
    bag = nn.EmbeddingBag.from_pretrained(START.clone(), freeze=False, sparse=True, mode="sum")
    stepper = optimizer(bag.parameters(), **kwargs)
    for step, bags in enumerate(BATCHES):
        stepper.zero_grad()
        offsets = torch.tensor([0, *(len(b) for b in bags[:-1])]).cumsum(0)
        loss(bag(torch.tensor([i for b in bags for i in b]), offsets), step).backward()
        stepper.step()
    return bag.weight.detach()


def test_every_argument_of_torchs_classes_is_tried() -> None:
    for optimizer, tried in TORCH.items():
        known = set(inspect.signature(optimizer.__init__).parameters) - {"self", "params"}
        assert known <= tried["same"].keys() | tried["refused"].keys(), optimizer


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [(o, kwargs) for o, tried in TORCH.items() for kwargs in [{}, *arguments(tried["same"])]]
    + [(o, {"lr": torch.tensor(0.3)}) for o in (torch.optim.SGD, torch.optim.Adagrad)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_argument_has_the_effect_that_it_has_in_torch(optimizer: Any, kwargs: dict[str, Any]) -> None:
    values = trained(sharded(optimizer, kwargs))
    torch.testing.assert_close(values, by_the_class(optimizer, kwargs), rtol=1e-5, atol=1e-6)
    assert torch.equal(values[5], START[5]) and not torch.equal(values, START)


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [(o, kwargs) for o, tried in TORCH.items() for kwargs in arguments(tried["refused"])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_or_it_is_refused_by_name_when_it_is_on(optimizer: Any, kwargs: dict[str, Any]) -> None:
    name = next(iter(kwargs))
    with pytest.raises(ConfigError, match=name if name != "nesterov" else "nesterov|momentum"):
        sharded(optimizer, kwargs)
    off = dict.fromkeys(kwargs, 0)
    torch.testing.assert_close(trained(sharded(optimizer, off)), by_the_class(optimizer, {}), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [(o, kwargs) for o, tried in OURS.items() for kwargs in [{}, *arguments(tried)]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_our_own_classes_compute_the_same_without_a_kernel(optimizer: Any, kwargs: dict[str, Any]) -> None:
    values = trained(sharded(optimizer, kwargs))
    torch.testing.assert_close(values, sparse_by_the_class(optimizer, kwargs), rtol=1e-5, atol=1e-6)
    assert torch.equal(values[5], START[5])


def test_the_planner_counts_the_state_that_a_class_has() -> None:
    for optimizer in [*TORCH, *OURS]:
        kept = next(iter(sharded(optimizer, {}).fused_optimizer.state.values()))
        sizes = [state.size().numel() for name, state in kept.items() if not name.endswith(".iter")]
        noted = nn.Parameter(torch.empty(ROWS, DIM, device="meta"))
        apply_optimizer_in_backward(optimizer, [noted], {})
        assert _optimizer(noted, {}) == (sizes.count(ROWS * DIM), 4.0 * sizes.count(ROWS)), optimizer


def test_adams_rules_of_weight_decay_differ() -> None:
    """One step on ones with a gradient of one: 0.9 by Adam, 0.85 by AdamW."""
    kwargs: Any = {"lr": 0.1, "weight_decay": 0.5}
    results = []
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):
        one = nn.Parameter(torch.ones(1))
        one.sum().backward()
        optimizer([one], **kwargs).step()
        results.append(round(one.item(), 4))
    assert results == [0.9, 0.85]
    with pytest.raises(ConfigError, match=r"use torch\.optim\.AdamW"):
        sharded(torch.optim.Adam, kwargs)
    with pytest.raises(ConfigError, match=r"use torch\.optim\.AdamW"):
        sharded(torch.optim.Adam, {"lr": 0.1}, fused_params={"weight_decay": 0.5})


def test_a_table_that_stays_dense_may_have_any_optimizer() -> None:
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop):
        sharded(optimizer, {"weight_decay": 0.5}, kernel="dense")


def test_torchs_other_optimizers_are_refused() -> None:
    classes = {c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    others = classes - TORCH.keys() - {torch.optim.Optimizer}
    assert torch.optim.RMSprop in others
    for optimizer in others:
        with pytest.raises(ConfigError, match=f"{optimizer.__name__} has no fused kernel"):
            sharded(optimizer, {"lr": 0.1})


def test_a_class_of_a_known_name_from_elsewhere_is_refused() -> None:
    other = type("SGD", (torch.optim.SGD,), {"__module__": "elsewhere.optim"})
    with pytest.raises(ConfigError, match=r"elsewhere.optim.SGD has no fused kernel"):
        sharded(other, {"lr": 0.1})


def test_settings_of_the_sharder_come_before_the_defaults_of_the_class() -> None:
    values = trained(sharded(torch.optim.Adagrad, {"lr": 0.3}, fused_params={"eps": 0.1}))
    torch.testing.assert_close(values, by_the_class(torch.optim.Adagrad, {"lr": 0.3, "eps": 0.1}))
    values = trained(sharded(torch.optim.Adagrad, {"lr": 0.3}, fused_params={"learning_rate": 9.0}))
    torch.testing.assert_close(values, by_the_class(torch.optim.Adagrad, {"lr": 0.3}))


def test_a_mode_of_weight_decay_that_a_kernel_would_ignore_is_refused() -> None:
    for optimizer, mode in (("ADAM", "L2"), ("LAMB", "DECOUPLE"), ("LARS_SGD", "L2"), ("PARTIAL_ROWWISE_ADAM", "L2")):
        with pytest.raises(ConfigError, match=f"ignore weight_decay_mode={mode}"):
            FusedSettings.from_params({"optimizer": optimizer, "weight_decay": 0.1, "weight_decay_mode": mode})
        FusedSettings.from_params({"optimizer": optimizer, "weight_decay": 0.0, "weight_decay_mode": mode})
    FusedSettings.from_params({"optimizer": "ADAM", "weight_decay": 0.1, "weight_decay_mode": "DECOUPLE"})
