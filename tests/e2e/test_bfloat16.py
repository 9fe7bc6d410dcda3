"""BF16 tables from a float model to every way of looking them up.

The reference is an archive of the same model with FP32 tables whose weights torch has rounded to bfloat16, cut in the same
way: vectors and predictions are equal bit for bit.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer.archive.reader import Archive
from recinfer.distributed.planner import Plan
from recinfer.errors import InputError
from recinfer.inference.delta import make_delta
from recinfer.inference.modules import quantize_embeddings
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.reshard import plan_archive, reshard_archive
from recinfer.inference.verify import verify
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import pack_rows
from recinfer.serving.wire import codec
from tests.archive.models import (
    EVERYTHING_ROWS,
    NUM_DENSE,
    RANKER_ROWS,
    Everything,
    Ranker,
    make_archive,
    make_request,
    save_weights,
)
from tests.e2e.commands import run_json
from tests.serving.remote.fleet import remote
from tests.serving.test_direct import BytePath, decoded, service_of

KINDS = ("table_wise", "row_wise", "column_wise", "grid_shard")


def rounded(model: nn.Module) -> nn.Module:
    """The model with the weights of its tables rounded to bfloat16 by torch."""
    new = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if "embedding" in name and parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16().float())
    return new


def both(folder: Path, model: nn.Module, **options: object) -> tuple[Archive, Archive]:
    """The archive with BF16 tables, and the reference."""
    _, found = make_archive(folder / "bf16", model=model, precision=DataType.BF16, **options)  # type: ignore[arg-type]
    _, expected = make_archive(folder / "fp32", model=rounded(model), precision=DataType.FP32, **options)  # type: ignore[arg-type]
    return found, expected


def same(
    found: Predictor, expected: Predictor, rows: dict[str, int], num_dense: int = NUM_DENSE, most: int = 40
) -> None:
    for batch, longest in ((1, 2), (33, min(5, most)), (300, most)):
        request = make_request(rows, batch, seed=batch, longest=longest)
        mine, theirs = found.lookup(request), expected.lookup(request)
        if theirs.pooled is not None:
            assert mine.pooled is not None
            assert torch.equal(mine.pooled.values(), theirs.pooled.values())
        for name, vectors in theirs.sequences.items():
            assert torch.equal(mine.sequences[name].values(), vectors.values())
        dense = torch.randn(batch, num_dense)
        outputs = expected.predict(dense, request)
        assert all(torch.equal(found.predict(dense, request)[name], value) for name, value in outputs.items())


def test_every_cut_delta_and_reshard(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = Ranker()
    found, expected = both(tmp_path, model, kinds=KINDS)
    assert found.manifest.precision == "bf16"
    assert verify(found.root).ok
    predictor, reference = load(found.root), load(expected.root)
    same(predictor, reference, RANKER_ROWS)
    for table in found.manifest.tables:
        weight = model.get_submodule(f"ebc.embedding_bags.{table.name}").weight
        assert table.quantization.max_abs_error == float((weight.bfloat16().float() - weight).abs().max())
        assert table.quantization.max_step == 0

    moved = reshard_archive(
        found.root, plan_archive(found.manifest, world_size=2), tmp_path / "moved.rqa", progress=False
    )
    assert verify(moved.root).ok
    same(load(moved.root), reference, RANKER_ROWS)

    new = copy.deepcopy(model)
    with torch.no_grad():
        new.ebc.embedding_bags["item"].weight[5:50] += 0.5
    (tmp_path / "new").mkdir()
    make_delta(found.root, new, save_weights(new, tmp_path / "new"), tmp_path / "d.rqd", progress=False)
    predictor.apply_delta(tmp_path / "d.rqd")
    _, after = make_archive(tmp_path / "after", model=rounded(new), precision=DataType.FP32, kinds=KINDS)
    same(predictor, load(after.root), RANKER_ROWS)
    predictor.undo_delta()
    same(predictor, reference, RANKER_ROWS)


def test_sequences_and_weights(tmp_path: Path) -> None:
    torch.manual_seed(8)
    found, expected = both(tmp_path, Everything(), ranks=2, kinds=("row_wise", "column_wise"))
    same(load(found.root), load(expected.root), EVERYTHING_ROWS, 2, most=4)


def test_shard_servers_and_the_byte_path(tmp_path: Path) -> None:
    torch.manual_seed(9)
    found, expected = both(tmp_path, Ranker(), kinds=("row_wise", "column_wise", "table_wise"))
    here, reference = service_of(found.root), service_of(expected.root)
    for longest in (1, 2, 9):
        data = codec.encode_lookup_request(make_request(RANKER_ROWS, 17, longest=longest))
        assert BytePath(here).lookup(data) == decoded(here, "Lookup", data) == decoded(reference, "Lookup", data)
    groups = ((0,), (1, 2))
    with (
        remote(found.root, groups, tmp_path / "bf16") as far,
        remote(expected.root, groups, tmp_path / "fp32") as other,
    ):
        same(far, other, RANKER_ROWS)


def test_mixed_with_other_precisions(tmp_path: Path) -> None:
    """Tables of FBGEMM and of the compiled loop in one module: each is that of an archive of its own precision alone."""
    torch.manual_seed(10)
    model = Ranker()
    chosen = {"users": torch.qint8, "item": torch.bfloat16, "cats": torch.quint4x2}
    module = quantize_embeddings(model, torch.float32, False, per_table_weight_dtype=chosen).ebc
    columns = {"users": slice(0, 12), "item": slice(12, 44), "cats": slice(44, 64)}
    request = make_request(RANKER_ROWS, 40, longest=7)
    mixed = module(request).values()
    for name, precision in chosen.items():
        alone = quantize_embeddings(model, precision, False).ebc
        assert torch.equal(mixed[:, columns[name]], alone(request).values()[:, columns[name]])


def test_by_the_command_line(tmp_path: Path) -> None:
    checkpoint, plan, archive = tmp_path / "model.ckpt", tmp_path / "plan.json", tmp_path / "model.rqa"
    run_json(
        "train", "--format", "synthetic", "--limit", 300, "--embedding-dim", 8, "--batch-size", 128, "--out", checkpoint
    )
    run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, "--precision", "bf16", "--out", plan)
    run_json("plan", "--checkpoint", checkpoint, "--world-size", 2, "--precision", "fp16", "--out", tmp_path / "h")
    by_shards = [[table.shards for table in Plan.load(tmp_path / name).tables] for name in ("plan.json", "h")]
    assert by_shards[0] == by_shards[1]  # rows of the same size
    run_json("export", "--checkpoint", checkpoint, "--plan", plan, "--precision", "bf16", "--out", archive)
    assert {t["precision"] for t in run_json("inspect", archive)["tables"]} == {"bf16"}
    assert run_json("verify", archive)["ok"]


def test_weights_that_bfloat16_cannot_hold_are_refused() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert torch.equal(
        pack_rows(torch.full((2, 4), largest), DataType.BF16).view(torch.bfloat16).float()[0, 0], torch.tensor(largest)
    )
    with pytest.raises(InputError, match=r"exceed the range of BF16 \(bf16 ends at 3.39e38\)"):
        pack_rows(torch.tensor([[0.0, 3.4e38]]), DataType.BF16)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="expected finite weights"):
            pack_rows(torch.tensor([[0.0, bad]]), DataType.BF16)
