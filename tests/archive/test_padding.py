"""Rows of an archive, stored without padding, padded while they are copied: what a GPU's tables are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recinfer.modules.embedding_configs import DataType
from recinfer.quant import buffers as buffers_module
from recinfer.quant.buffers import Buffers, allocate
from tests.archive.models import make_archive


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_rows_are_padded_while_copied(tmp_path: Path, precision: DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "_COPY_BYTES", 500)  # several steps a shard
    _, archive = make_archive(tmp_path, precision=precision, kinds=("row_wise", "column_wise"), ranks=2)
    mapped = archive.map_shards()
    stored = Buffers(mapped.buffer)
    shards = mapped.module_shards["ebc"]
    buffers, placed = allocate(shards, torch.device("cpu"), 16)
    assert buffers.managed is None and len(placed) == len(shards)
    for shard, spot in zip(shards, placed):
        buffers.write(spot, stored.rows(shard))
        rows, need = buffers.rows(spot), shard.row_bytes()
        assert rows.shape[1] % 16 == 0
        assert torch.equal(rows[:, :need], stored.rows(shard)) and not rows[:, need:].any()
