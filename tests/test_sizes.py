"""Sizes as text: the unit fits, what is printed is enough, and errors of the planner compare sizes that differ in print."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology
from recinfer.errors import RecinferError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sizes import exact_size, round_up_to_printed, size_text


def test_the_unit_fits() -> None:
    sizes = [0, 80, 1023, 1024, 67584, 3 << 19, 46 << 30, 5000 << 30, -2048, 80.9]
    assert [size_text(size) for size in sizes] == [
        *("0 bytes", "80 bytes", "1023 bytes", "1.0 KiB", "66.0 KiB", "1.5 MiB", "46.0 GiB", "5,000.0 GiB"),
        *("-2.0 KiB", "80 bytes"),
    ]
    assert [exact_size(size) for size in (80, 67584)] == ["80 bytes", "66.000 KiB (67584 bytes)"]


@pytest.mark.parametrize("size", [1, 80.5, 1023.5, 67584, 67585, 123456789, 382886478.3, (1 << 30) - 1, 3 << 33])
def test_the_printed_size_is_enough(size: float) -> None:
    up = round_up_to_printed(size)
    number, unit = exact_size(up).split()[:2]
    printed = float(number.replace(",", "")) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert size <= up <= size * 1.001 + 1 and printed == pytest.approx(up, abs=1)


def refused(hbm_cap: int) -> str:
    config = EmbeddingBagConfig(1000, 64, "t", feature_names=["f"])
    model = nn.Sequential(EmbeddingBagCollection([config], device=torch.device("meta")))
    sharder: Any = EmbeddingBagCollectionSharder()
    topology = Topology(world_size=2, compute_device="cuda", hbm_cap=hbm_cap, ddr_cap=512)
    with pytest.raises(RecinferError) as error:
        EmbeddingShardingPlanner(topology=topology).plan(model, [sharder])
    return str(error.value)


def test_a_capacity_given_in_gb_instead_of_bytes_is_seen() -> None:
    text = refused(80)
    assert "need 80.012 KiB (81932 bytes) of hbm, of which rank 0 has 80 bytes" in text


def test_so_is_a_small_one_where_no_plan_fits() -> None:
    text = refused(200 << 10)
    assert " 0.000 " not in text and "needs 250.000 KiB (256000 bytes) of ddr; rank 0 has 512 bytes" in text
