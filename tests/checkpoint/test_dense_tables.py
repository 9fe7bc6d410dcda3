"""Checkpoints of sharded tables that a user's optimizer trains: its state loads with the rows, in any sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer.checkpoint import load_checkpoint, save_checkpoint
from recinfer.distributed.sharding_plan import column_wise, row_wise, table_wise
from recinfer.optim.keyed import KeyedOptimizerWrapper
from recinfer.optim.optimizers import in_backward_optimizer_filter
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from recinfer.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tests.distributed.spawn import RankError, run_ranks
from tests.distributed.test_plans_by_hand import NAMES, STEPS, Model, by_hand, train, whole

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "RowWiseAdagrad": lambda params: RowWiseAdagrad(params, lr=0.1),
}
PLANS: dict[str, Callable[[], Any]] = {
    "rows": lambda: dict.fromkeys(NAMES, row_wise()),
    "tables": lambda: {"t0": table_wise(0), "t1": table_wise(1), "t2": table_wise(0)},
    "columns": lambda: dict.fromkeys(NAMES, column_wise(ranks=[1, 0])),
    "several shards on a rank": lambda: dict.fromkeys(NAMES, column_wise(ranks=[0, 1, 0], size_per_rank=[1, 1, 2])),
}


def part(rank: int, world_size: int, layout: str, optimizer: str, source: str | None, target: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    dmp = by_hand(Model(), PLANS[layout](), world_size)
    users = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    both = KeyedOptimizerWrapper(users, OPTIMIZERS[optimizer])
    if source is not None:
        load_checkpoint(source, dmp.module, optimizer=both)
    train(dmp, both, rank, world_size)
    save_checkpoint(target, dmp.module, optimizer=both)
    return whole(dmp.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "layouts"),
    [
        ("Adam", ["rows", "columns", "tables"]),
        ("Adam", ["columns", "rows"]),
        ("Adam", ["several shards on a rank", "rows", "several shards on a rank"]),
        ("RowWiseAdagrad", ["rows", "tables"]),
    ],
)
def test_training_goes_on_at_another_sharding(optimizer: str, layouts: list[str], tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = Model()
    alone = OPTIMIZERS[optimizer](plain.parameters())
    source = None
    for layout in layouts:
        train(plain, alone)
        target = str(tmp_path / layout)
        found = run_ranks(2, part, layout, optimizer, source, target)[0]
        source = target
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert STEPS > 1
    again = Model()
    steps = OPTIMIZERS[optimizer](again.parameters())
    load_checkpoint(source or "", again, optimizer=steps)
    for mine, wanted in zip(again.parameters(), plain.parameters()):
        for key, value in alone.state[wanted].items():
            torch.testing.assert_close(steps.state[mine][key], value, rtol=1e-4, atol=1e-5)


def test_state_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"t0.weight: sum: has shape \(12, 1\) for a local shard \(12, 2\) of 12 x 4"):
        run_ranks(2, part, "columns", "RowWiseAdagrad", None, str(tmp_path / "c"))


def test_a_schedule_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def made() -> tuple[Model, WarmupOptimizer]:
        torch.manual_seed(1)
        model = Model()
        inner = KeyedOptimizerWrapper(dict(model.named_parameters()), OPTIMIZERS["Adam"])
        return model, WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, 3 * STEPS, 0.25)], lr=0.5)

    (model, optimizer), (again, loaded) = made(), made()
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer=optimizer)
    load_checkpoint(tmp_path / "c", again, optimizer=loaded)
    rates = [next(iter(each.param_groups))["lr"] for each in (optimizer, loaded)]
    assert rates[0] == rates[1] == 0.5 * (0.25 + 0.75 / 3)
    train(model, optimizer)
    train(again, loaded)
    for mine, wanted in zip(again.parameters(), model.parameters()):
        torch.testing.assert_close(mine, wanted)
