"""Packed rows: equal to the plain-torch reference bit for bit, sliced without changing a value, refused when non-finite."""

from __future__ import annotations

import pytest
import torch

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant import packing
from recinfer.quant.packing import pack_rows
from recinfer.quant.reference import reference_pack
from recinfer.quant.rows import (
    PACKED_TYPES,
    columns_per_byte,
    quantization_step,
    row_bytes,
    slice_packed_columns,
    unpack_rows,
)

INTEGER = [DataType.INT8, DataType.INT4, DataType.INT2]


def awkward_rows(rows: int, dim: int) -> torch.Tensor:
    """Rows that trip quantizers: constant, zero, tiny range, huge, one-sided, halfway codes."""
    torch.manual_seed(rows * 1000 + dim)
    weight = torch.randn(rows, dim) * torch.logspace(-6, 3, rows).unsqueeze(1)
    if rows >= 8:
        weight[0] = 0
        weight[1] = 3.25
        weight[2] = 1e-9 * torch.arange(dim)
        weight[3] = torch.arange(dim).float() / 2
        weight[4] = 60000.0 * torch.sign(torch.randn(dim))
        weight[5] = -weight[5].abs()
        weight[6] = 1e-7
        weight[6, 0] = 2e-7
    return weight


@pytest.mark.parametrize("data_type", PACKED_TYPES)
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 7, 16, 33, 64, 127])
def test_pack_equals_the_reference_bit_for_bit(data_type: DataType, dim: int) -> None:
    weight = awkward_rows(200, dim)
    if data_type is DataType.FP16:
        weight = weight.clamp(-60000, 60000)
    packed = pack_rows(weight, data_type)
    assert packed.dtype == torch.uint8 and packed.shape == (200, row_bytes(dim, data_type))
    assert torch.equal(packed, reference_pack(weight, data_type))


@pytest.mark.parametrize("data_type", INTEGER)
def test_error_is_within_half_a_step(data_type: DataType) -> None:
    weight = torch.randn(500, 48)
    packed = pack_rows(weight, data_type)
    step = quantization_step(packed, 48, data_type)
    # fp16 rounding of scale and bias comes on top of half a step
    slack = weight.abs().amax(dim=1) * 2**-10
    assert ((unpack_rows(packed, 48, data_type) - weight).abs() <= (step * 0.5 + slack).unsqueeze(1)).all()


@pytest.mark.parametrize("data_type", PACKED_TYPES)
@pytest.mark.parametrize("dim", [5, 12, 33])
def test_any_column_slice_keeps_its_values(data_type: DataType, dim: int) -> None:
    packed = pack_rows(torch.randn(9, dim), data_type)
    whole = unpack_rows(packed, dim, data_type)
    for start in range(dim):
        for stop in range(start + 1, dim + 1):
            part = slice_packed_columns(packed, dim, data_type, start, stop)
            assert part.shape[1] == row_bytes(stop - start, data_type)
            assert torch.equal(unpack_rows(part, stop - start, data_type), whole[:, start:stop])


@pytest.mark.parametrize("data_type", PACKED_TYPES)
def test_row_alignment_pads_with_zeros(data_type: DataType) -> None:
    weight = torch.randn(7, 13)
    plain, aligned = pack_rows(weight, data_type), pack_rows(weight, data_type, row_alignment=16)
    assert aligned.shape[1] % 16 == 0
    assert torch.equal(aligned[:, : plain.shape[1]], plain) and not aligned[:, plain.shape[1] :].any()


def test_chunk_size_does_not_change_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 10)
    whole = pack_rows(weight, DataType.INT4)
    monkeypatch.setattr(packing, "BLOCK_ELEMENTS", 70)
    assert torch.equal(pack_rows(weight, DataType.INT4), whole)
    weight[57, 3] = float("nan")
    with pytest.raises(InputError, match=r"'items', row 1057, column 3: got nan"):
        pack_rows(weight, DataType.INT4, table="items", first_row=1000)


@pytest.mark.parametrize("data_type", PACKED_TYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused_with_table_and_row(data_type: DataType, bad: float) -> None:
    weight = torch.zeros(4, 6)
    weight[2, 5] = bad
    with pytest.raises(InputError, match=r"table 't', row 2, column 5"):
        pack_rows(weight, data_type, table="t")


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16])
def test_what_fp16_cannot_hold_is_refused(data_type: DataType) -> None:
    with pytest.raises(InputError, match=r"table 't', row 1: values from -1e\+06"):
        pack_rows(torch.tensor([[0.0, 1.0], [-1e6, 1.0]]), data_type, table="t")


def test_edges() -> None:
    assert pack_rows(torch.empty(0, 8), DataType.INT8).shape == (0, 12)
    assert pack_rows(torch.ones(1, 1), DataType.INT2).shape == (1, 5)
    assert [columns_per_byte(t) for t in PACKED_TYPES] == [1, 2, 4, 1, 1, 1]
    assert row_bytes(64, DataType.INT8) == 68 and row_bytes(64, DataType.INT8, 16) == 80
    assert row_bytes(100_000_000, DataType.FP32) == 400_000_000
    with pytest.raises(ConfigError, match="INT64"):
        row_bytes(4, DataType.INT64)
    with pytest.raises(InputError, match="floating-point matrix"):
        pack_rows(torch.zeros(3, dtype=torch.int64), DataType.INT8)
    with pytest.raises(InputError, match=r"expected uint8 \[rows, >= 12\]"):
        unpack_rows(torch.zeros(3, 4, dtype=torch.uint8), 8, DataType.INT8)
    with pytest.raises(ConfigError, match="2:9 are not inside"):
        slice_packed_columns(torch.zeros(3, 12, dtype=torch.uint8), 8, DataType.INT8, 2, 9)
