"""Training resumed with other numbers of ranks and other shardings has the losses of a run in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.checkpoint import CheckpointReader, load_checkpoint, restore, save_checkpoint
from recinfer.checkpoint.torch_file import TensorBytes
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from recinfer.distributed.types import ShardingPlan
from recinfer.optim import optimizers
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.local_tensors import local_pieces
from recinfer.optim.optimizers import in_backward_optimizer_filter
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import EBC, TABLES, AnySharder, make_batch, make_model

STEPS = 2  # of each part of the training
OPTIMIZERS: dict[str, Any] = {
    "adagrad": (optimizers.Adagrad, {"lr": 0.1, "eps": 1e-8}),
    "adam": (optimizers.Adam, {"lr": 0.02, "eps": 1e-6}),
    "rowwise": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
}


def generator(layout: str, at: int, world: int, local: int) -> Any:
    hosts = world // local
    return {
        "rw": lambda: row_wise(),
        "tw": lambda: table_wise(rank=at % world),
        "cw": lambda: column_wise(ranks=[world - 1, 0], size_per_rank=[[4, 4], [5, 3]][at % 2]),
        "twrw": lambda: table_row_wise(host_index=at % hosts),
        "grid": lambda: grid_shard(host_indexes=list(range(hosts))),
        "dp": lambda: data_parallel(compute_kernel="fused"),
    }[layout]()


def build(layout: str, world: int, local: int, optimizer: str, device: str) -> tuple[DistributedModelParallel, Any]:
    model = make_model(device)
    module = model.get_submodule(EBC)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer][0], module.parameters(), OPTIMIZERS[optimizer][1])
    plans = {t.name: generator(layout, at, world, local) for at, t in enumerate(TABLES)}
    made = construct_module_sharding_plan(
        module, plans, AnySharder(), local_size=local, world_size=world, device_type="cpu"
    )
    dmp = DistributedModelParallel(model, plan=ShardingPlan({EBC: made}), sharders=[AnySharder()])
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.05))
    return dmp, CombinedOptimizer([dmp.fused_optimizer, wrapped])


def part(
    rank: int, world: int, layout: str, local: int, optimizer: str, steps: range, source: str | None, target: str
) -> list[float]:
    """A part of the training on these ranks: the loss of this rank's examples in each step."""
    dmp, both = build(layout, world, local, optimizer, "cpu" if source is None else "meta")
    if source is not None:
        reads = Reads()
        with reads:
            report = load_checkpoint(source, dmp.module.model, optimizer=both)
        assert not report.missing and not report.extra
        reads.check(dmp, both, source)
    share, losses = 24 // world, []
    for step in steps:
        both.zero_grad()
        loss, _ = dmp(make_batch(step, rank * share, (rank + 1) * share))
        loss.backward()
        both.step()
        losses.append(float(loss.detach()))
    save_checkpoint(target, dmp.module.model, optimizer=both)
    return losses


class Reads:
    """What a load reads, and that no more than one block of it is in memory beside the shards."""

    limit = 512  # bytes of a block: less than any table has, so that a table read whole would be seen

    def __enter__(self) -> None:
        self.bytes = self.most = 0
        self.before = (TensorBytes.read_rows, restore._BLOCK_BYTES)
        read_rows = TensorBytes.read_rows

        def counted(stored: TensorBytes, start: int, stop: int, out: torch.Tensor) -> None:
            self.bytes += out.nbytes
            self.most = max(self.most, out.nbytes)
            read_rows(stored, start, stop, out)

        TensorBytes.read_rows = counted  # type: ignore[method-assign]
        restore._BLOCK_BYTES = self.limit

    def __exit__(self, *error: object) -> None:
        TensorBytes.read_rows, restore._BLOCK_BYTES = self.before  # type: ignore[method-assign]

    def check(self, dmp: DistributedModelParallel, optimizer: Any, source: str) -> None:
        """Blocks are small; whole rows of what this rank holds were read, and nothing else."""
        assert self.most <= self.limit
        reader = CheckpointReader(source).align(dmp.module.model.state_dict())
        allowed = 0
        for key, value in dmp.module.model.state_dict().items():
            for rows, _ in local_pieces(value):
                width = reader.shape(key)[1] if rows.dim() == 2 else 1
                # A column piece is cut out of whole rows; beside each row lies its state: twice its size at the most,
                # for Adam, and a number a row and piece.
                allowed += rows.shape[0] * (3 * width + 4) * 4 if rows.dim() else 4
        states = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
        allowed += 8 * sum(1 for v in states if isinstance(v, torch.Tensor) and not v.dim())
        assert 0 < self.bytes <= allowed, (self.bytes, allowed)


def unsharded(optimizer: str, steps: int) -> tuple[list[float], nn.Module, Any]:
    """The same training in one process on the whole batch; tables step the rows that were looked up."""
    model = make_model()
    tables = list(model.get_submodule(EBC).parameters())
    rest = [p for p in model.parameters() if all(p is not t for t in tables)]
    kind, numbers = OPTIMIZERS[optimizer]
    both = [kind(tables, **numbers), torch.optim.Adagrad(rest, lr=0.05)]
    losses = []
    for step in range(steps):
        model.zero_grad()
        batch = make_batch(step, 0, 24)
        loss, _ = model(batch)
        loss.backward()
        for config, table in zip(TABLES, tables):
            rows = torch.cat([batch.sparse_features[name].values() for name in config.feature_names]).unique()
            assert table.grad is not None
            table.grad = torch.sparse_coo_tensor(rows[None], table.grad[rows], table.shape)
        for one in both:
            one.step()
        losses.append(float(loss.detach()))
    return losses, model, both[0]


CHAINS = [
    ("adagrad", [("rw", 8, 8), ("tw", 2, 2), ("cw", 3, 3)]),
    ("adam", [("grid", 4, 2), ("cw", 2, 2), ("twrw", 3, 3)]),
    ("rowwise", [("twrw", 4, 2), ("dp", 2, 2), ("tw", 3, 3), ("rw", 2, 2)]),
]


@pytest.mark.parametrize(("optimizer", "parts"), CHAINS, ids=["rw8-tw2-cw3", "grid4-cw2-twrw3", "twrw4-dp2-tw3-rw2"])
def test_training_goes_on_at_another_size_and_sharding(
    tmp_path: Path, optimizer: str, parts: list[tuple[str, int, int]]
) -> None:
    expected, model, tables = unsharded(optimizer, STEPS * len(parts))
    losses: list[float] = []
    source: Path | None = None
    for at, (layout, world, local) in enumerate(parts):
        steps, target = range(STEPS * at, STEPS * (at + 1)), tmp_path / str(at)
        of_ranks = run_ranks(
            world, part, layout, local, optimizer, steps, source and str(source), str(target),
            env={"LOCAL_WORLD_SIZE": str(local)},
        )  # fmt: skip
        losses += [sum(column) / world for column in zip(*of_ranks)]
        source = target
    assert losses == pytest.approx(expected, rel=1e-5)
    assert abs(losses[0] - losses[-1]) > 1e-3  # it learned, so that a state which was lost would be seen
    check_final(source, model.model, tables, optimizer)


def check_final(folder: Path | None, model: nn.Module, tables: Any, optimizer: str) -> None:
    """One process reads the last checkpoint, the optimizer too: values and state are those of its own run."""
    assert folder is not None
    again = make_model(seed=9).model
    parameters = list(again.sparse_arch.parameters())
    kind, numbers = OPTIMIZERS[optimizer]
    fresh = kind(parameters, **numbers)
    load_checkpoint(folder, again, optimizer=fresh)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            again.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
        )
    for one, other in zip(parameters, model.sparse_arch.parameters()):
        states = {k: v for k, v in tables.state[other].items() if k != "step"}
        assert states
        for name, value in states.items():
            torch.testing.assert_close(fresh.state[one][name].view_as(value), value, rtol=1e-4, atol=1e-7)
