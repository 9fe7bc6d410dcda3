"""TorchRec's sharded checkpoint, read without torchrec, against its unsharded state dict and its own answers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.errors import CheckpointError
from recinfer.sparse import KeyedJaggedTensor
from tests.checkpoint.conftest import Ranker

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ITEM = "sparse_arch.ebc.embedding_bags.item_id.weight"  # row-wise over two ranks
CATEGORY = "sparse_arch.ebc.embedding_bags.category.weight"  # column-wise over two ranks


@pytest.fixture(params=["dcp_sharded_tensor", "plain.pt"])
def reader(request: pytest.FixtureRequest, torchrec_checkpoint: Path) -> CheckpointReader:
    return CheckpointReader(torchrec_checkpoint / request.param)


@pytest.fixture(scope="module")
def plain(torchrec_checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(torchrec_checkpoint / "plain.pt", weights_only=True)


def test_every_tensor_is_the_unsharded_one(reader: CheckpointReader, plain: dict[str, torch.Tensor]) -> None:
    assert reader.keys() == sorted(plain)
    for key, expected in plain.items():
        assert reader.shape(key) == tuple(expected.shape)
        assert reader.dtype(key) == expected.dtype
        assert torch.equal(reader.read(key), expected)
    assert reader.num_bytes() == sum(t.nbytes for t in plain.values())


def test_slices_of_rows_are_slices_of_the_table(reader: CheckpointReader, plain: dict[str, torch.Tensor]) -> None:
    for key, expected in plain.items():
        rows = len(expected)
        for start, stop in [(0, rows), (0, 0), (rows, rows), (rows // 3, rows - rows // 4), (rows // 2, rows // 2 + 1)]:
            assert torch.equal(reader.read_rows(key, start, stop), expected[start:stop]), (key, start, stop)


def test_a_slice_goes_into_memory_of_the_callers(reader: CheckpointReader, plain: dict[str, torch.Tensor]) -> None:
    out = torch.full((40, 40), -1.0, dtype=torch.float64)
    reader.read_into(CATEGORY, out[10:20, 4:36], 300, 310)
    assert torch.equal(out[10:20, 4:36], plain[CATEGORY][300:310].double())
    out[10:20, 4:36] = -1.0
    assert bool((out == -1).all())


def test_ours_and_torchs_loader_agree(torchrec_checkpoint: Path) -> None:
    folder = torchrec_checkpoint / "dcp_sharded_tensor"
    reader = CheckpointReader(folder, prefix="")
    into = {k: torch.empty(reader.shape(k), dtype=reader.dtype(k)) for k in reader.stored_keys()}
    groups: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optim": {}}
    for key, tensor in into.items():
        group, _, name = key.partition(".")
        groups[group][name] = tensor
    dcp.load(groups, checkpoint_id=folder, no_dist=True)
    for key, tensor in into.items():
        assert torch.equal(reader.read(key), tensor), key


def test_shards_are_where_the_plan_put_them(torchrec_checkpoint: Path) -> None:
    described = json.loads((torchrec_checkpoint / "keys_sharded_tensor.json").read_text())["model"]
    reader = CheckpointReader(torchrec_checkpoint / "dcp_sharded_tensor")
    assert reader.keys() == sorted(described)
    for key, entry in described.items():
        assert list(reader.shape(key)) == entry["shape"]


def test_only_the_shards_that_overlap_are_touched(
    torchrec_checkpoint: Path, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = tmp_path / "half"
    shutil.copytree(torchrec_checkpoint / "dcp_sharded_tensor", folder)
    folder.chmod(0o755)
    (folder / "__1_0.distcp").unlink()
    reader = CheckpointReader(folder)
    assert torch.equal(reader.read_rows(ITEM, 100, 1500), plain[ITEM][100:1500])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: cannot be opened"):
        reader.read_rows(ITEM, 100, 1501)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        reader.read_rows(CATEGORY, 0, 1)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_our_module_with_its_weights_gives_its_answers(
    reader: CheckpointReader, device: str, torchrec_checkpoint: Path
) -> None:
    module = Ranker(device)
    report = load_into(reader, module)
    assert sorted(report.loaded) == reader.keys()
    assert not report.missing
    assert not report.extra
    reference = torch.load(torchrec_checkpoint / "reference.pt", weights_only=True)
    kjt = KeyedJaggedTensor(reference["keys"], reference["values"], lengths=reference["lengths"])
    with torch.no_grad():
        pooled = module.sparse_arch.ebc(kjt).to_dict()
        logits = module(reference["dense"], kjt)
    for name, expected in reference["pooled"].items():
        torch.testing.assert_close(pooled[name], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits, reference["logits"], rtol=0, atol=1e-6)


def test_torchrec_itself_is_not_needed(reader: CheckpointReader) -> None:
    reader.read(ITEM)
    assert "torchrec" not in sys.modules
