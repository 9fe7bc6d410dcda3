"""Shard files: any safetensors reader can read them, and equal exports give equal bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from recinfer.archive.rank_files import rank_file, rects_by_rank
from recinfer.archive.reader import Archive
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan
from recinfer.modules.embedding_configs import DataType
from tests.archive.models import make_archive


def test_safetensors_reads_the_same_rows(small: tuple[nn.Module, Archive]) -> None:
    archive = small[1]
    mapped = archive.map_shards()
    for file in archive.rank_files:
        with safe_open(archive.root / file.path, "pt") as opened:
            assert opened.metadata()["plan_hash"] == archive.plan.hash
            keys = {key for key in opened.keys() if not key.startswith("__pad__/")}  # noqa: SIM118 - not a dict
            assert keys == {piece.key for piece in file.rects}
            for piece in file.rects:
                tensor = opened.get_tensor(piece.key)
                assert tensor.dtype == torch.uint8
                assert tensor.shape == (piece.rect.rows, piece.row_bytes)
                shard = next(s for s in mapped.shards if s.rect == piece.rect)
                assert torch.equal(tensor.flatten(), mapped.buffer[shard.offset : shard.offset + piece.bytes])


def test_the_layout_of_a_small_plan_to_the_byte() -> None:
    shards = (ShardRect(0, 0, 3, 0, 8), ShardRect(0, 3, 5, 0, 8))
    plan = Plan(1, "cpu", (TablePlan("m", "t", "row_wise", "quant", DataType.INT8, 5, 8, shards),))
    layout = rank_file(rects_by_rank(plan)[0], 0, plan.hash)
    assert len(layout.header) == 4096
    assert int.from_bytes(layout.header[:8], "little") == 4088
    assert json.loads(layout.header[8:]) == {
        "__metadata__": {"format": "recinfer.shard/1", "rank": "0", "plan_hash": plan.hash},
        "m/t/r0-c0": {"dtype": "U8", "shape": [3, 12], "data_offsets": [0, 36]},
        "m/t/r3-c0": {"dtype": "U8", "shape": [2, 12], "data_offsets": [36, 60]},
    }
    assert [piece.start for piece in layout.rects] == [4096, 4132]
    assert layout.bytes == 4156


def test_gaps_are_padding_tensors() -> None:
    shards = (ShardRect(0, 0, 3, 0, 8), ShardRect(0, 0, 3, 8, 16))
    plan = Plan(1, "cpu", (TablePlan("m", "t", "column_wise", "quant", DataType.INT8, 3, 16, shards),))
    layout = rank_file(rects_by_rank(plan)[0], 0, plan.hash)
    header = json.loads(layout.header[8:])
    assert header["__pad__/1"] == {"dtype": "U8", "shape": [4060], "data_offsets": [36, 4096]}
    assert header["m/t/r0-c8"]["data_offsets"] == [4096, 4132]


def test_ranks_without_rows_store_nothing() -> None:
    shards = (ShardRect(0, 0, 2, 0, 8), ShardRect(1, 2, 2, 0, 8))
    plan = Plan(2, "cpu", (TablePlan("m", "t", "row_wise", "quant", DataType.INT8, 2, 8, shards),))
    assert [len(rects) for rects in rects_by_rank(plan)] == [1, 0]


def test_chunk_size_changes_no_byte(tmp_path: Path) -> None:
    small_chunks = make_archive(tmp_path / "a", max_chunk_bytes=1000)[1]
    one_chunk = make_archive(tmp_path / "b")[1]
    hashes = [{f.path: f.sha256 for f in a.manifest.files} for a in (small_chunks, one_chunk)]
    for path in ("shards/rank-00000.safetensors", "shards/rank-00001.safetensors", "plan.json", "dense/model.onnx"):
        assert hashes[0][path] == hashes[1][path]
    assert hashes[0]["check/answers.safetensors"] == hashes[1]["check/answers.safetensors"]
