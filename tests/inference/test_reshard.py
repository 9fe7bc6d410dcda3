"""Resharding against a fresh export by the same plan: the same bytes; and what it must refuse."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer.archive.reader import Archive, open_archive
from recinfer.archive.rows import RowReader
from recinfer.distributed.planner import plan_inference
from recinfer.errors import ArchiveError, ConfigError
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.inference.reshard import plan_archive, reshard_archive
from recinfer.inference.verify import verify
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import join_packed_columns, slice_packed_columns
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import RANKER_ROWS, Everything, Ranker, make_archive, make_plan, make_request, save_weights

KINDS = ("table_wise", "row_wise", "column_wise", "grid_shard")


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.BF16])
def test_resharded_files_are_those_of_an_export_by_that_plan(tmp_path: Path, precision: DataType) -> None:
    torch.manual_seed(3)
    model = Ranker()
    _, archive = make_archive(tmp_path / "a", model=model, ranks=3, precision=precision, kinds=KINDS)
    plan = make_plan(model, 2, precision, ("column_wise", "grid_shard", "row_wise"))
    moved = reshard_archive(archive.root, plan, tmp_path / "moved.rqa", progress=False, max_chunk_bytes=1000)
    reader = save_weights(model, tmp_path)
    fresh = export_archive(model, reader, plan, tmp_path / "fresh.rqa", name="small", version="7", progress=False)
    for rank in range(2):
        name = f"shards/rank-{rank:05d}.safetensors"
        assert (moved.root / name).read_bytes() == (fresh.root / name).read_bytes()
    assert verify(moved.root).ok
    assert moved.manifest.plan_hash == fresh.manifest.plan_hash
    assert [t.quantization for t in moved.manifest.tables] == [t.quantization for t in archive.manifest.tables]


def test_every_kind_of_module_moves_there_and_back(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path, model=Everything(), ranks=2, kinds=("row_wise", "column_wise"))
    wide = reshard_archive(
        archive.root, plan_archive(archive.manifest, world_size=3), tmp_path / "w.rqa", progress=False
    )
    back = reshard_archive(wide.root, archive.plan, tmp_path / "b.rqa", progress=False)
    for file in archive.manifest.files:
        assert (back.root / file.path).read_bytes() == (archive.root / file.path).read_bytes()


class Twins(nn.Module):
    """Two modules with a table of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.user = EmbeddingBagCollection(tables=[EmbeddingBagConfig(40, 8, "t", feature_names=["user"])])
        self.item = EmbeddingBagCollection(tables=[EmbeddingBagConfig(30, 8, "t", feature_names=["item"])])

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor) -> torch.Tensor:
        return self.user(users)["user"] * self.item(items)["item"]


def test_tables_of_one_name_keep_their_precisions(tmp_path: Path) -> None:
    model, precisions = Twins(), {"user.t": DataType.INT8, "item.t": DataType.INT4}
    plan = plan_inference(model, world_size=1, per_table_precision=precisions)
    archive = export_archive(
        model, save_weights(model, tmp_path), plan, tmp_path / "a.rqa", name="m", version="1", progress=False
    )
    planned = plan_archive(archive.manifest, world_size=2)
    assert {table.name: table.precision for table in planned.tables} == precisions
    assert verify(reshard_archive(archive.root, planned, tmp_path / "b.rqa", progress=False).root).ok


def test_lookups_are_the_same_bit_for_bit(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    archive = small[1]
    plan = plan_archive(archive.manifest, world_size=4)
    moved = reshard_archive(archive.root, plan, tmp_path / "m.rqa", progress=False)
    request = make_request(RANKER_ROWS, 17)
    before, after = load(archive.root), load(moved.root)
    assert torch.equal(before.lookup(request).pooled.values(), after.lookup(request).pooled.values())


def test_default_rows_setting_is_kept_or_changed(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    archive = small[1]
    assert archive.manifest.missing_shards == "reject"
    assert "missing_shards" not in (archive.root / "manifest.json").read_text()  # older readers know no such key
    allowing = reshard_archive(
        archive.root, archive.plan, tmp_path / "a.rqa", missing_shards="default_rows", progress=False
    )
    assert allowing.manifest.missing_shards == "default_rows"
    again = reshard_archive(allowing.root, archive.plan, tmp_path / "b.rqa", progress=False)
    assert again.manifest.missing_shards == "default_rows"
    back = reshard_archive(again.root, archive.plan, tmp_path / "c.rqa", missing_shards="reject", progress=False)
    assert back.manifest.missing_shards == "reject"


def test_damaged_rows_get_no_new_hash(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    root = tmp_path / "damaged.rqa"
    shutil.copytree(small[1].root, root)
    shard = root / "shards/rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArchiveError) as caught:
        reshard_archive(root, plan_archive(small[1].manifest, world_size=2), tmp_path / "out.rqa", progress=False)
    assert caught.value.rule == "F5"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.rqa"]


def test_another_precision_is_refused(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    model, archive = small
    with pytest.raises(ConfigError, match="export from the checkpoint"):
        reshard_archive(archive.root, make_plan(model, 2, DataType.INT4), tmp_path / "out.rqa", progress=False)


def test_rows_read_back_are_the_packed_ones(small: tuple[nn.Module, Archive]) -> None:
    model, archive = small
    weights = {"users": 0, "item": 1, "cats": 2}
    with RowReader(open_archive(archive.root)) as reader:
        for table in archive.plan.tables:
            assert table.table in weights
            weight = model.ebc.embedding_bags[table.table].weight
            assert torch.equal(reader.read(table, 5, 50), pack_rows(weight[5:50].detach(), table.precision))


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32])
@pytest.mark.parametrize("cuts", [(0, 3, 7, 19), (0, 4, 8, 19), (0, 19)])
def test_columns_rejoin(data_type: DataType, cuts: tuple[int, ...]) -> None:
    packed = pack_rows(torch.randn(23, 19), data_type)
    pieces = [(a, b, slice_packed_columns(packed, 19, data_type, a, b)) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(join_packed_columns(pieces[::-1], 19, data_type), packed)
