"""Rows of an archive, stored without padding, padded while they are copied: what a GPU's tables are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recinfer.distributed import quant_buffers
from recinfer.distributed.quant_buffers import place_shards
from recinfer.distributed.quant_layout import PackedShard
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.rows import row_bytes
from tests.archive.models import make_archive


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_rows_are_padded_on_the_way(tmp_path: Path, precision: DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_buffers, "_COPY_BYTES", 500)  # several steps a shard
    _, archive = make_archive(tmp_path, precision=precision, kinds=("row_wise", "column_wise"), ranks=2)
    mapped = archive.map_shards()
    configs = archive.manifest.configs("ebc")
    types = {config.name: config.data_type for config in configs}
    shards = mapped.module_shards["ebc"]

    def rows_of(shard: PackedShard) -> torch.Tensor:
        width = row_bytes(shard.cols, types[shard.table])
        return mapped.buffer[shard.offset : shard.offset + shard.rows * width].view(-1, width)

    buffer, managed, placed = place_shards(configs, shards, rows_of, torch.device("cpu"), 16)
    assert managed is None and len(placed) == len(shards)
    for shard, spot in zip(shards, placed):
        width = row_bytes(shard.cols, types[shard.table], 16)
        rows = buffer[spot.offset : spot.offset + shard.rows * width].view(-1, width)
        need = row_bytes(shard.cols, types[shard.table])
        assert width % 16 == 0
        assert torch.equal(rows[:, :need], rows_of(shard)) and not rows[:, need:].any()
