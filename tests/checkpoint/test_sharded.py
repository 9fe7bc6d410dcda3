"""Checkpoints of sharded models: load at another world size and sharding, optimizer state too; TorchRec's as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.checkpoint import CheckpointReader, load_checkpoint, save_checkpoint, save_checkpoint_async
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recinfer.distributed.types import ShardingPlan
from recinfer.errors import CheckpointError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import (
    EBC,
    TABLES,
    AnySharder,
    full_state,
    make_batch,
    make_model,
    optimizer_of,
)

TORCHREC = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "torchrec_ckpt"
LAYOUTS = {
    "tw": lambda at, world: table_wise(rank=at % world),
    "rw": lambda at, world: row_wise(),
    "cw": lambda at, world: column_wise(ranks=[r % world for r in range(2)]),
    "mixed": lambda at, world: [row_wise(), table_wise(rank=0), column_wise(ranks=[0, world - 1]), row_wise()][at],
}


def build(layout: str, world_size: int, device: str = "cpu") -> tuple[DistributedModelParallel, Any]:
    model = make_model(device)
    apply_optimizer_in_backward(RowWiseAdagrad, model.get_submodule(EBC).parameters(), {"lr": 0.05, "eps": 1e-8})
    module = model.get_submodule(EBC)
    plans = {t.name: LAYOUTS[layout](at, world_size) for at, t in enumerate(TABLES)}
    made = construct_module_sharding_plan(
        module, plans, AnySharder(), local_size=world_size, world_size=world_size, device_type="cpu"
    )
    dmp = DistributedModelParallel(model, plan=ShardingPlan({EBC: made}), sharders=[AnySharder()])
    return dmp, optimizer_of(dmp)


def train(dmp: DistributedModelParallel, optimizer: Any, rank: int, world_size: int, steps: range) -> None:
    share = 24 // world_size
    for step in steps:
        optimizer.zero_grad()
        dmp(make_batch(step, rank * share, (rank + 1) * share))[0].backward()
        optimizer.step()


def write(rank: int, world_size: int, layout: str, folder: str) -> Any:
    dmp, optimizer = build(layout, world_size)
    train(dmp, optimizer, rank, world_size, range(2))
    save_checkpoint(folder, dmp.module.model, optimizer=optimizer, model_name="m")


def read_and_write(rank: int, world_size: int, layout: str, folder: str, out: str) -> None:
    dmp, optimizer = build(layout, world_size, device="meta")
    report = load_checkpoint(folder, dmp.module.model, optimizer=optimizer)
    assert not report.missing and not report.extra
    save_checkpoint(out, dmp.module.model, optimizer=optimizer)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder, prefix="")
    return {key: reader.read(key) for key in reader.stored_keys()}


@pytest.mark.parametrize(
    ("first", "writers", "second", "readers"),
    [("rw", 4, "tw", 2), ("mixed", 2, "rw", 3), ("tw", 2, "cw", 2), ("cw", 2, "tw", 1), ("cw", 2, "cw", 3)],
)
def test_a_checkpoint_loads_at_any_world_size_and_sharding(
    tmp_path: Path, first: str, writers: int, second: str, readers: int
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_ranks(writers, write, first, str(one))
    run_ranks(readers, read_and_write, second, str(one), str(two))
    before, after = stored(one), stored(two)
    assert set(before) == set(after)
    for name, value in before.items():
        if not name.startswith("optim") or "embedding_bags" not in name:
            assert torch.equal(after[name], value), name
            continue
        table = name.split(".embedding_bags.")[1].split(".")[0]
        rows = next(t.num_embeddings for t in TABLES if t.name == table)
        pieces, others = value.view(-1, rows), after[name].view(-1, rows)  # one number a row and column piece
        assert pieces.abs().sum() > 0
        if len(others) == 1:
            torch.testing.assert_close(others[0], pieces.mean(0))  # pieces are of one width here
        elif len(pieces) == 1:
            assert torch.equal(others, pieces.expand_as(others))
        else:
            torch.testing.assert_close(others, pieces)


def resume(rank: int, world_size: int, folder: str) -> Any:
    dmp, optimizer = build("rw", world_size)
    train(dmp, optimizer, rank, world_size, range(2))
    save_checkpoint(folder, dmp.module.model, optimizer=optimizer)
    train(dmp, optimizer, rank, world_size, range(2, 4))
    unbroken = full_state(dmp.state_dict())
    again, optimizer = build("rw", world_size, device="meta")
    load_checkpoint(folder, again.module.model, optimizer=optimizer)
    train(again, optimizer, rank, world_size, range(2, 4))
    resumed = full_state(again.state_dict())
    return rank != 0 or [name for name in unbroken if not torch.equal(unbroken[name], resumed[name])]


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    assert run_ranks(2, resume, str(tmp_path / "ckpt"))[0] == []


def test_one_process_reads_what_ranks_wrote(tmp_path: Path) -> None:
    run_ranks(2, write, "mixed", str(tmp_path / "ckpt"))
    expected = stored(tmp_path / "ckpt")
    model = make_model("cpu", seed=5).model
    tables = list(model.sparse_arch.parameters())
    adagrad = RowWiseAdagrad(tables, lr=0.1)
    load_checkpoint(tmp_path / "ckpt", model, optimizer=adagrad)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[f"model.{name}"]), name
    sums = next(v for k, v in expected.items() if k.startswith("optim") and "embedding_bags.t1" in k)
    assert torch.equal(adagrad.state[tables[1]]["sum"].view(-1), sums.view(-1))  # table-wise: one number a row


def write_behind(rank: int, world_size: int, folder: str) -> Any:
    dmp, optimizer = build("mixed", world_size)
    train(dmp, optimizer, rank, world_size, range(1))
    before = full_state(dmp.state_dict())
    future = save_checkpoint_async(folder, dmp.module.model, optimizer=optimizer)
    train(dmp, optimizer, rank, world_size, range(1, 4))  # what is written is what was there at the call
    future.result(60)
    torch.distributed.barrier()
    again, _ = build("rw", world_size, device="meta")
    load_checkpoint(folder, again.module.model)
    after = full_state(again.state_dict())
    changed = full_state(dmp.state_dict())
    if rank:
        return True
    return all(torch.equal(before[k], after[k]) for k in before) and any(
        not torch.equal(before[k], changed[k]) for k in before
    )


def test_an_async_save_holds_the_state_of_its_call(tmp_path: Path) -> None:
    assert run_ranks(2, write_behind, str(tmp_path / "ckpt")) == [True, True]


def test_mismatches_are_named_and_change_nothing(tmp_path: Path) -> None:
    model = make_model().model
    save_checkpoint(tmp_path / "ckpt", model)
    other = make_model(seed=3).model
    other.stray = nn.Linear(1, 1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"2 keys are missing \(stray\.bias, stray\.weight\)"):
        load_checkpoint(tmp_path / "ckpt", other)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match="states of the optimizer are missing"):
        load_checkpoint(tmp_path / "ckpt", model, optimizer=adam)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    assert len(load_checkpoint(tmp_path / "ckpt", other, strict=False).missing) == 2


class TorchRecModel(nn.Module):
    """The model of the checkpoint that TorchRec wrote."""

    def __init__(self, device: str) -> None:
        super().__init__()

        def table(name: str, rows: int, dim: int, features: list[str], pooling: PoolingType) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling
            )

        self.sparse_arch = nn.Module()
        self.sparse_arch.ebc = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                table("user_id", 2000, 16, ["f_user"], PoolingType.SUM),
                table("item_id", 3000, 32, ["f_item", "f_hist"], PoolingType.SUM),
                table("category", 501, 32, ["f_cat"], PoolingType.MEAN),
                table("country", 37, 16, ["f_country"], PoolingType.SUM),
            ],
        )
        self.dense_arch = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.sparse_arch.ebc(sparse)
        parts = [pooled[f] for f in ("f_user", "f_item", "f_hist", "f_cat", "f_country")]
        return self.over_arch(torch.cat([self.dense_arch(dense), *parts], dim=1)).squeeze(1)


def continue_torchrec(rank: int, world_size: int, out: str) -> Any:
    model = TorchRecModel("meta")
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.ebc.parameters(), {"lr": 0.02, "eps": 1e-8})
    plans = {
        "user_id": row_wise(),
        "item_id": column_wise(ranks=[0, world_size - 1]),
        "category": table_wise(rank=0),
        "country": data_parallel(),
    }
    made = construct_module_sharding_plan(
        model.sparse_arch.ebc, plans, AnySharder(), local_size=world_size, world_size=world_size, device_type="cpu"
    )
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"sparse_arch.ebc": made}), sharders=[AnySharder()])
    fused = dmp.fused_optimizer
    load_checkpoint(TORCHREC / "dcp_sharded_tensor", dmp.module, optimizer=fused, strict=False)
    save_checkpoint(out, dmp.module, optimizer=fused)
    kjt = KeyedJaggedTensor(
        keys=["f_user", "f_item", "f_hist", "f_cat", "f_country"],
        values=torch.arange(10) % 37,
        lengths=torch.ones(10, dtype=torch.int64),
    )
    logits = dmp(torch.ones(2, 4), kjt)
    logits.sum().backward()
    return logits.detach()


@pytest.mark.skipif(not TORCHREC.exists(), reason=f"no checkpoint of TorchRec's at {TORCHREC}")
def test_torchrecs_checkpoint_loads_with_its_optimizer_and_trains_on(tmp_path: Path) -> None:
    logits = run_ranks(2, continue_torchrec, str(tmp_path / "ckpt"))[0]
    assert torch.isfinite(logits).all()
    found, plain = stored(tmp_path / "ckpt"), torch.load(TORCHREC / "plain.pt", weights_only=True)
    for name, value in plain.items():
        assert torch.equal(found[f"model.{name}"], value), name
    theirs = CheckpointReader(TORCHREC / "dcp_sharded_tensor", prefix="optim.sparse_arch.ebc.embedding_bags.")
    ours = {
        t: next(v for k, v in found.items() if k.startswith("optim") and f".{t}.weight" in k)
        for t in ("user_id", "item_id", "category")
    }
    assert torch.equal(ours["user_id"].view(-1), theirs.read("user_id.weight::user_id.momentum1").view(-1))
    item = theirs.read("item_id.weight::item_id.momentum1")  # row-wise there, two column pieces here
    assert torch.equal(ours["item_id"].view(2, -1), item.expand(2, -1))
    category = theirs.read("category.weight::category.momentum1").view(2, -1)  # two column pieces there, whole here
    torch.testing.assert_close(ours["category"].view(-1), category.mean(0))
