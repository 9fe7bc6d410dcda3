"""An archive answered by the Triton kernel: the same answers as FBGEMM's, and no need of FBGEMM."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.distributed.quant.place import on_one_device
from recinfer.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import ConfigError, UnavailableError
from recinfer.inference.predictor import load
from recinfer.layout.rect import Rect, tile
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.buffers import Placed, allocate
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.kernels import choose_kernel
from recinfer.quant.lookup import PooledLookup, SequenceTables
from recinfer.quant.reference import reference_pack
from recinfer.quant.rows import slice_packed_columns
from recinfer.quant.triton_batch import TritonBatch
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive, make_request
from tests.distributed.test_quant_sharded import plan_for
from tests.quant.cases import MIXED, float_bags, quantized_sequences, random_features

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this on a GPU")

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4])
@pytest.mark.parametrize("kinds", [("table_wise",), ("row_wise", "column_wise")])
def test_an_archive_gives_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: DataType, kinds: tuple[str, ...]
) -> None:
    _, archive = make_archive(tmp_path, precision=precision, ranks=2, kinds=kinds)
    request, dense = make_request(RANKER_ROWS, 5, seed=9), torch.ones(5, NUM_DENSE)
    theirs = load(archive.root)
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    mine = load(archive.root)
    assert isinstance(mine._state.lookups.parts[0].run.__self__.batch, TritonBatch)
    one, other = mine.lookup(request).pooled, theirs.lookup(request).pooled
    assert one is not None and other is not None
    torch.testing.assert_close(one.values(), other.values(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.predict(dense, request)["output"], theirs.predict(dense, request)["output"])


def test_an_archive_needs_no_fbgemm(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path, precision=DataType.INT8, ranks=1, kinds=("table_wise",))
    program = f"""
import sys
sys.modules["fbgemm_gpu"] = None  # as if it were not installed
import torch, recinfer
from recinfer.quant.buffers import Placed, allocate
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.kernels import choose_kernel
from recinfer.quant.lookup import PooledLookup
from recinfer.quant.rows import slice_packed_columns
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_request
print(choose_kernel("cuda"))
model = recinfer.load({str(archive.root)!r})
print(model.predict(torch.ones(3, NUM_DENSE), make_request(RANKER_ROWS, 3, seed=1))["output"].shape)
assert sys.modules["fbgemm_gpu"] is None
"""
    environment = {**os.environ, "RECINFER_KERNEL": "triton", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch.Size([3" in done.stdout


def test_sums_and_means_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's operator sums all, and the means are scaled after it; on a GPU that would be a copy of its own."""
    sums = [PoolingType.SUM, PoolingType.MEAN, PoolingType.MEAN, PoolingType.SUM]
    module = EmbeddingBagCollection.from_float(float_bags(sums), data_type=DataType.INT8)
    configs = module.embedding_bag_configs()
    pieces = {name: (placed,) for name, placed in module.placed.items()}
    features = random_features(configs, 9)
    theirs = PooledLookup(configs, pieces, module.storage)
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    mine = PooledLookup(configs, pieces, module.storage)
    assert mine.op_is_all and not theirs.op_is_all
    torch.testing.assert_close(mine(features).values(), theirs(features).values(), rtol=1e-6, atol=1e-6)
    again = copy.deepcopy(mine)
    assert torch.equal(again(features).values(), mine(features).values())


def test_unpooled_tables_of_several_widths_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [(DataType.INT8, 8), (DataType.INT4, 12), (DataType.FP16, 4), (DataType.INT8, 8)]
    wanted = [Placed(Rect(0, 0, 37, 0, dim, f"t{i}"), kind) for i, (kind, dim) in enumerate(kinds)]
    buffers, placed = allocate(wanted, torch.device("cpu"))
    for table, (kind, dim) in zip(placed, kinds):
        buffers.write(table, reference_pack(torch.randn(37, dim), kind))
    features = KeyedJaggedTensor(["a", "b", "c"], torch.arange(30), lengths=torch.tensor([5, 0, 2, 7, 9, 7]))
    keys = [2, 0, 1, 2]  # one key for two tables
    theirs = SequenceTables(placed, keys, buffers)
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    mine = SequenceTables(placed, keys, buffers)
    assert (len(mine.calls), len(theirs.calls)) == (1, 3)
    for one, other, key, (_, dim) in zip(mine(features), theirs(features), keys, kinds):
        assert one.shape == ((5, 9, 16)[key], dim)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "unpooled"])
def test_ranks_with_a_lookup_each_give_what_one_does(monkeypatch: pytest.MonkeyPatch, pooled: bool) -> None:
    """The steps of several GPUs: tables cut by rows, by columns and by both, ids rebased to each piece's rows."""
    module: Any
    if pooled:
        module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, MEAN, SUM], True), per_table=MIXED)
    else:
        module = quantized_sequences(MIXED)
    kind = ShardedQuantEmbeddingBagCollection if pooled else ShardedQuantEmbeddingCollection
    features = random_features(
        module.embedding_bag_configs() if pooled else module.embedding_configs(), 5, weighted=pooled
    )
    want = module(features)
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    sharded = kind(module, plan_for(module, "mixed", 2), ShardingEnv.from_local(2, 0), fused=False)
    assert all(isinstance(group.batch, TritonBatch) for lookup in sharded._built().lookups for group in lookup.kernels)
    got = sharded(features)
    for name in want.keys():  # noqa: SIM118 - a KeyedTensor is no dict
        mine, theirs = (found[name] if pooled else found[name].values() for found in (got, want))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_which_kernel_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECINFER_KERNEL", raising=False)
    assert choose_kernel("cpu").name == "fbgemm"
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    assert choose_kernel("cuda:3") == ("triton", "RECINFER_KERNEL=triton")
    monkeypatch.setenv("RECINFER_KERNEL", "cutlass")
    with pytest.raises(ConfigError, match="RECINFER_KERNEL='cutlass'; expected fbgemm or triton"):
        choose_kernel("cpu")
    monkeypatch.delenv("RECINFER_KERNEL")
    monkeypatch.setattr("recinfer.fbgemm.HAS_CUDA", True)
    assert choose_kernel("cuda").name == "fbgemm"
    monkeypatch.setattr("recinfer.fbgemm.HAS_CUDA", False)  # as of fbgemm-gpu-cpu, whatever the machine
    assert choose_kernel("cpu").name == "fbgemm"
    assert choose_kernel("cuda") == (
        "triton",
        "the installed FBGEMM is built for the CPU only, and Triton is installed",
    )
    monkeypatch.setenv("RECINFER_KERNEL", "fbgemm")
    with pytest.raises(
        UnavailableError, match="RECINFER_KERNEL=fbgemm, but the installed FBGEMM is built for the CPU only"
    ):
        choose_kernel("cuda")
    monkeypatch.delenv("RECINFER_KERNEL")
    monkeypatch.setattr("recinfer.fbgemm.INSTALLED", False)
    assert choose_kernel("cuda").name == "triton"
    with pytest.raises(UnavailableError, match=r"install it: pip install 'recinfer\[cpu\]'"):
        choose_kernel("cpu")


def test_one_device_holds_whole_tables_whatever_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that a single GPU gets, made on the CPU: row pieces are joined, column pieces stay pieces."""
    module = EmbeddingBagCollection.from_float(float_bags(), data_type=DataType.INT8)
    configs = {c.name: c for c in module.embedding_bag_configs()}
    rows, dim = configs["c"].num_embeddings, configs["c"].embedding_dim
    rects = [Rect(0, a, b, c, d, "c") for c, d in ((0, 8), (8, dim)) for a, b in ((0, 100), (100, rows))]
    here, placed = allocate([Placed(rect, DataType.INT8) for rect in rects], torch.device("cpu"))
    packed = module.packed_table("c")
    for spot in placed:
        r = spot.rect
        here.write(spot, slice_packed_columns(packed[r.row_start : r.row_stop], dim, DataType.INT8, r.col_start, r.col_stop))  # fmt: skip
    strips = {"c": tile("c", rows, dim, rects)}
    by_rect = {"c": {spot.rect: spot for spot in placed}}
    whole = on_one_device([configs["c"]], strips, by_rect, here, torch.device("cpu"))
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    lookup = PooledLookup([configs["c"]], whole.pieces, whole.buffers)
    features = random_features([configs["c"]], 6)
    assert lookup(features).keys() == ["f2", "f3"]
    monkeypatch.setenv("RECINFER_KERNEL", "fbgemm")
    alone = PooledLookup([configs["c"]], {"c": (module.placed["c"],)}, module.storage)
    torch.testing.assert_close(lookup(features).values(), alone(features).values(), rtol=1e-6, atol=1e-6)


def test_inspect_says_which_kernel_a_gpu_would_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, archive = make_archive(tmp_path, precision=DataType.INT8, ranks=1, kinds=("table_wise",))
    monkeypatch.setattr("recinfer.fbgemm.INSTALLED", False)
    monkeypatch.delenv("RECINFER_KERNEL", raising=False)
    done = CliRunner().invoke(app, ["inspect", str(archive.root), "--device", "cuda", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["kernel"], found["kernel_reason"]) == ("triton", "FBGEMM is not installed, and Triton is installed")
