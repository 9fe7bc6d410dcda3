"""The compiled row-wise Adagrad: the same rows as FBGEMM's kernel gives, for every kind of lookup; no id outside a table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.tables import rowwise_adagrad
from recinfer.distributed.tables.cpu import TableGroup, TableShape
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import PoolingType

SUM, MEAN, NONE = PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE
MIXED = [TableShape("a", 50, 8, 2), TableShape("empty", 0, 4), TableShape("b", 70_000, 20), TableShape("c", 1, 4, 3)]
ONE_DIM = [TableShape("a", 50, 16, 2), TableShape("b", 7, 16)]


def lookup(shapes: list[TableShape], pooling: PoolingType, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, offsets and the gradient of the output, of 64 bags a feature."""
    random = torch.Generator().manual_seed(7)
    rows = torch.tensor([s.rows for s in shapes for _ in range(s.num_features)]).repeat_interleave(64)
    lengths = torch.randint(0, 6, rows.shape, generator=random) * (rows > 0)
    ids = (torch.rand(int(lengths.sum()), generator=random) * rows.repeat_interleave(lengths)).to(dtype)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(dtype)
    columns = sum(s.dim * s.num_features for s in shapes)
    shape = (ids.numel(), shapes[0].dim) if pooling is NONE else (64, columns)
    return ids, offsets, torch.randn(shape, generator=random)


def stepped(
    shapes: list[TableShape], pooling: PoolingType, call: tuple[Tensor, Tensor, Tensor], weighted: bool
) -> list:  # type: ignore[type-arg]
    ids, offsets, gradient = call
    settings = FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD", "learning_rate": 0.1, "eps": 1e-3})
    group = TableGroup(shapes, pooling, settings)
    weights = torch.linspace(0.5, 2.0, ids.numel()) if weighted else None
    for _ in range(3):
        group.update(ids, offsets, weights, gradient)
    return [*group.table_weights(), *(state["momentum1"] for state in group.table_states())]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("shapes", "pooling", "weighted"),
    [(MIXED, SUM, False), (MIXED, SUM, True), (MIXED, MEAN, False), (ONE_DIM, NONE, False)],
)
def test_as_fbgemm(
    shapes: list[TableShape], pooling: PoolingType, weighted: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = lookup(shapes, pooling, dtype)
    monkeypatch.setattr(rowwise_adagrad, "_THREADS", torch.get_num_threads())
    ours = stepped(shapes, pooling, call, weighted)
    monkeypatch.setattr(rowwise_adagrad, "_THREADS", 0)
    for mine, theirs in zip(ours, stepped(shapes, pooling, call, weighted)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_an_id_outside_its_table_changes_nothing(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise_adagrad, "_THREADS", torch.get_num_threads())
    group = TableGroup([TableShape("a", 50, 8)], SUM, FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD"}))
    with pytest.raises(InputError, match=f"table 'a': id {wrong} at 1 is outside a table of 50 rows"):
        group.update(torch.tensor([3, wrong]), torch.tensor([0, 2]), None, torch.ones(1, 8))
    assert not group.weights.any()


def test_offsets_that_fall_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise_adagrad, "_THREADS", torch.get_num_threads())
    group = TableGroup([TableShape("a", 50, 8)], SUM, FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD"}))
    with pytest.raises(InputError, match="offsets fall after bag 0"):
        group.update(torch.tensor([3, 4]), torch.tensor([2, 0, 2]), None, torch.ones(2, 8))
    assert not group.weights.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [[0, 1, 3], [0, 2, 1 << 30], [-1, 0, 2]])
@pytest.mark.parametrize("pooling", [SUM, NONE])
def test_offsets_that_leave_the_ids_change_nothing(
    pooling: PoolingType, wrong: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise_adagrad, "_THREADS", torch.get_num_threads())
    group = TableGroup([TableShape("a", 50, 8)], pooling, FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD"}))
    ids, offsets = torch.tensor([3, 4], dtype=dtype), torch.tensor(wrong, dtype=dtype)
    with pytest.raises(InputError, match=f"offsets from {wrong[0]} to {wrong[-1]} are not within 2 ids"):
        group.update(ids, offsets, None, torch.ones(2, 8))
    with pytest.raises(InputError, match="1 weights for 2 ids"):
        group.update(ids, torch.tensor([0, 1, 2], dtype=dtype), torch.ones(1), torch.ones(2, 8))
    assert not group.weights.any()
