"""Each package continues training from the other's checkpoint (``--torchrec-python`` runs TorchRec's side)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer.checkpoint import CheckpointReader, load_checkpoint, save_checkpoint
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.types import ShardingPlan
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.checkpoint.test_sharded import TORCHREC, TorchRecModel
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import AnySharder

FEATURES = {"f_user": 2000, "f_item": 3000, "f_hist": 3000, "f_cat": 501, "f_country": 37}
RANKS, BATCH, LR = 2, 6, 0.02
Batch = tuple[list[str], Tensor, Tensor, Tensor, Tensor]  # keys, ids, lengths, numbers, labels


def batches(rank: int, steps: int, seed: int) -> list[Batch]:
    """A rank's batches; ids come from a few rows, so that steps meet in them."""
    made = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + 10 * step + rank)
        lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
        counts = lengths.view(len(FEATURES), BATCH).sum(1)
        ids = [
            torch.randint(0, 12, (int(n),), generator=generator) * (rows // 12)
            for n, rows in zip(counts, FEATURES.values())
        ]
        numbers = torch.randn(BATCH, 4, generator=generator)
        made.append((list(FEATURES), torch.cat(ids), lengths, numbers, torch.randn(BATCH, generator=generator)))
    return made


def build(device: str) -> tuple[DistributedModelParallel, Any]:
    torch.manual_seed(3)
    model = TorchRecModel(device)
    ebc = model.sparse_arch.ebc
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": LR, "eps": 1e-8})
    plans = {
        "user_id": row_wise(),
        "item_id": table_wise(rank=1),
        "category": column_wise(ranks=[0, 1]),
        "country": row_wise(),
    }
    made = construct_module_sharding_plan(ebc, plans, AnySharder(), local_size=2, world_size=2, device_type="cpu")
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"sparse_arch.ebc": made}), sharders=[AnySharder()])
    return dmp, torch.optim.SGD([p for n, p in dmp.named_parameters() if "sparse_arch" not in n], lr=0.1)


def train(dmp: Any, dense: torch.optim.Optimizer, steps: list[Batch]) -> list[Tensor]:
    logits = []
    for keys, values, lengths, numbers, labels in steps:
        dense.zero_grad()
        out = dmp(numbers, KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
        (out - labels).pow(2).mean().backward()
        dense.step()
        logits.append(out.detach().clone())
    return logits


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


# --------------------------------------------------------------------------------------------------- theirs, here


def resume_theirs(rank: int, world_size: int, out: str) -> list[Tensor]:
    dmp, dense = build("meta")
    # TorchRec steps replicas elsewhere, so its checkpoint has no sums for country.
    load_checkpoint(TORCHREC / "dcp_sharded_tensor", dmp.module, optimizer=dmp.fused_optimizer, strict=False)
    logits = train(dmp, dense, batches(rank, 3, seed=500))
    save_checkpoint(out, dmp.module, optimizer=dmp.fused_optimizer)
    return logits


def resume_by_hand() -> tuple[list[list[Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """The same three steps with plain tensors: row-wise Adagrad written out, one sum a row and column piece."""
    model = TorchRecModel("cpu")
    model.load_state_dict(torch.load(TORCHREC / "plain.pt", weights_only=True))
    reader = CheckpointReader(TORCHREC / "dcp_sharded_tensor", prefix="optim.sparse_arch.ebc.embedding_bags.")
    tables = {n: model.sparse_arch.ebc.embedding_bags[n].weight for n in ("user_id", "item_id", "category", "country")}
    sums = {n: reader.read(f"{n}.weight::{n}.momentum1") for n in ("user_id", "item_id", "category")}
    sums["category"] = sums["category"].view(2, -1)
    sums["country"] = torch.zeros(37)
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if "sparse_arch" not in n], lr=0.1)
    logits: list[list[Tensor]] = [[], []]
    for step in range(3):
        model.zero_grad()
        for rank in range(RANKS):
            keys, values, lengths, numbers, labels = batches(rank, 3, seed=500)[step]
            out = model(numbers, KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
            ((out - labels).pow(2).mean() / RANKS).backward()
            logits[rank].append(out.detach().clone())
        dense.step()
        with torch.no_grad():
            for name, table in tables.items():
                assert table.grad is not None
                pieces = 2 if name == "category" else 1
                of_pieces = table.grad.view(len(table), pieces, -1)
                state = sums[name].view(pieces, -1)
                state += of_pieces.pow(2).mean(2).T
                table -= (LR * of_pieces / (state.T.sqrt() + 1e-8)[:, :, None]).view(table.shape)
    return logits, {n: t.detach() for n, t in tables.items()}, sums


@pytest.mark.skipif(not TORCHREC.exists(), reason=f"no checkpoint of TorchRec's at {TORCHREC}")
def test_torchrecs_training_goes_on_here(tmp_path: Path) -> None:
    found = run_ranks(RANKS, resume_theirs, str(tmp_path / "ckpt"))
    logits, tables, sums = resume_by_hand()
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    reader = CheckpointReader(tmp_path / "ckpt", prefix="")
    at = "sparse_arch.ebc.embedding_bags."
    close({n: reader.read(f"model.{at}{n}.weight") for n in tables}, tables)
    states = {n: reader.read(f"optim.state.{at}{n}.weight.{n}.momentum1") for n in sums}
    close({n: states[n].view_as(s) for n, s in sums.items()}, sums)


# --------------------------------------------------------------------------------------------------- ours, there


def train_ours(rank: int, world_size: int, folder: str) -> list[Tensor]:
    dmp, dense = build("cpu")
    train(dmp, dense, batches(rank, 2, seed=900))
    save_checkpoint(f"{folder}/ours", dmp.module, optimizer=dmp.fused_optimizer)
    logits = train(dmp, dense, batches(rank, 2, seed=700))
    save_checkpoint(f"{folder}/wanted", dmp.module, optimizer=dmp.fused_optimizer)
    return logits


def load_theirs(rank: int, world_size: int, folder: str) -> None:
    dmp, _ = build("meta")
    report = load_checkpoint(f"{folder}/theirs", dmp.module, optimizer=dmp.fused_optimizer)
    assert not report.missing and not report.extra
    save_checkpoint(f"{folder}/again", dmp.module, optimizer=dmp.fused_optimizer)


def torchrec_python(given: str | None) -> str:
    if given is None and importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed; --torchrec-python PATH names an interpreter that has it")
    return given or sys.executable


def test_our_training_goes_on_in_torchrec_and_comes_back(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    python = torchrec_python(request.config.getoption("--torchrec-python"))
    torch.save([batches(rank, 2, seed=700) for rank in range(RANKS)], tmp_path / "batches.pt")
    wanted = run_ranks(RANKS, train_ours, str(tmp_path))
    script = Path(__file__).with_name("torchrec_side.py")
    done = subprocess.run(
        [python, str(script), str(tmp_path)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [torch.load(tmp_path / f"logits-{rank}.pt") for rank in range(RANKS)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    run_ranks(RANKS, load_theirs, str(tmp_path))
    theirs, ours = (CheckpointReader(tmp_path / name, prefix="") for name in ("again", "wanted"))
    close({k: theirs.read(k) for k in theirs.stored_keys()}, {k: ours.read(k) for k in ours.stored_keys()})
