"""Rows packed block by block: FBGEMM's bytes whatever the rows are, and errors that agree with the unpacked rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant import _rows as rows
from recinfer.quant import packing
from recinfer.quant.formats.floats import FP16
from recinfer.quant.formats.integers import INT8, quantize_rows
from recinfer.quant.packing import RowError, RowPacker, pack_rows
from recinfer.quant.rows import PACKED_TYPES, quantization_step, row_bytes, unpack_rows

DIMS = [1, 2, 3, 8, 33, 64, 128]
INTEGERS = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}


def packed_by(packer: RowPacker, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """All of ``weight``, block by block."""
    if out is None:
        out = torch.empty(len(weight), row_bytes(packer.dim, packer.data_type), dtype=torch.uint8)
    for start in range(0, len(weight), len(packer.block)):
        block = weight[start : start + len(packer.block)]
        packer.block[: len(block)] = block
        packer.pack(len(block), out[start : start + len(block)], table="t", first_row=start)
    return out


def hard_rows(seed: int, rows: int, dim: int) -> dict[str, Tensor]:
    """Rows by the difficulty that they test."""
    torch.manual_seed(seed)
    plain = torch.randn(rows, dim)
    some = torch.rand(rows, dim) < 0.5
    zeros = torch.where(some, torch.tensor(0.0), torch.tensor(-0.0))
    return {
        "plain": plain,
        "many sizes": plain * 10 ** (torch.rand(rows, 1) * 13 - 9),
        "sparse and positive": plain.abs() * some,
        "far from zero": torch.randn(rows, 1) * 10 ** (torch.rand(rows, 1) * 8 - 4) + plain * 1e-5,
        "zeros of both signs": zeros + (torch.rand(rows, 1) < 0.3) * torch.rand(rows, 1),
        "halfway between codes": (plain * 300).round() / 8,
        "constant": torch.randn(rows, 1).expand(rows, dim) * torch.where(torch.rand(rows, 1) < 0.1, -0.0, 1.0),
        "below fp16": plain * 1e-7 * 10 ** (torch.rand(rows, 1) * 4 - 3),
    }


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, and ragged ends."""
    monkeypatch.setattr(packing, "BLOCK_ELEMENTS", 3000)


@pytest.mark.parametrize("data_type", INTEGERS)
@pytest.mark.parametrize("dim", DIMS)
def test_integer_rows_are_those_of_fbgemm(data_type: DataType, dim: int) -> None:
    for name, weight in hard_rows(dim, 300, dim).items():
        weight = weight.clamp(-60000, 60000).contiguous()
        found = packed_by(RowPacker(dim, data_type), weight)
        assert torch.equal(found, quantize_rows(weight, INTEGERS[data_type])), name


@pytest.mark.parametrize("data_type", PACKED_TYPES)
@pytest.mark.parametrize("dim", [3, 8, 64])
def test_the_error_is_that_of_the_unpacked_rows(data_type: DataType, dim: int) -> None:
    for name, weight in hard_rows(dim + 1, 300, dim).items():
        weight = weight.clamp(-60000, 60000)
        packed = pack_rows(weight, data_type)
        packer = RowPacker(dim, data_type, measure=True)
        assert torch.equal(packed_by(packer, weight), packed), name
        difference = (unpack_rows(packed, dim, data_type) - weight).double()
        rounding = 1e-6 * float(weight.abs().max())
        assert packer.error.largest == pytest.approx(float(difference.abs().max()), rel=1e-3, abs=rounding), name
        squares = float(difference.square().sum())
        assert packer.error.squares == pytest.approx(squares, rel=1e-2, abs=rounding**2 * weight.numel()), name
        assert packer.error.weight_squares == pytest.approx(float(weight.double().square().sum()), rel=1e-4), name
        assert packer.error.step == max(0.0, float(quantization_step(packed, dim, data_type).max())), name


def test_longer_rows_keep_what_is_behind() -> None:
    weight = torch.randn(50, 7)
    for data_type in PACKED_TYPES:
        width = row_bytes(7, data_type)
        out = torch.full((50, width + 5), 77, dtype=torch.uint8)
        packed_by(RowPacker(7, data_type), weight, out)
        assert torch.equal(out[:, :width], pack_rows(weight, data_type)) and bool((out[:, width:] == 77).all())


@pytest.mark.parametrize("data_type", INTEGERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e6])
def test_what_cannot_be_packed_names_its_row(data_type: DataType, bad: float) -> None:
    weight = torch.randn(300, 33)
    weight[201] *= 1e-3
    weight[201, 7] = bad
    if bad == 1e6:
        weight[201, 8] = -bad  # the bias has to be an fp16 number
    with pytest.raises(InputError, match="table 't', row 201"):
        packed_by(RowPacker(33, data_type), weight)


def test_the_compiled_loop_refuses_arrays_of_another_shape() -> None:
    weight, out, odd = np.zeros((4, 8), np.float32), np.zeros((4, 12), np.uint8), np.zeros(4, np.int32)
    int8 = INT8.code
    assert rows.pack_rows(weight, out, int8, odd, 0.0, 0.0)[0] == 0
    for wrong in (
        (weight[:3], out, int8, odd),
        (weight[0], out, int8, odd),
        (weight, out[:, :11], int8, odd),
        (weight, out.astype(np.int32), int8, odd),
        (weight, out, FP16.code, odd),
        (weight, out, 8, odd),
        (weight, out, 0, odd),
        (weight, out, int8, odd[:3]),
        (weight.astype(np.float64), out, int8, odd),
    ):
        with pytest.raises(ValueError, match="expected float32"):
            rows.pack_rows(*wrong, 0.0, 0.0)
    with pytest.raises((ValueError, BufferError)):
        rows.pack_rows(weight.T, out, int8, odd, 0.0, 0.0)


def test_errors_of_two_parts_add_up() -> None:
    left, right = RowError(0.5, 0.25, 2.0, 8.0), RowError(0.25, 0.5, 1.0, 1.0)
    left.merge(right)
    assert left == RowError(0.5, 0.5, 3.0, 9.0)


def test_a_large_finite_block_is_looked_at_twice() -> None:
    """The sum of squares overflows or is above fp16's square, and yet every row fits."""
    weight = torch.full((60, 64), 60000.0)
    weight[:, 0] = -60000.0
    assert torch.equal(pack_rows(weight, DataType.INT8), quantize_rows(weight, 8))
    assert torch.equal(pack_rows(weight * 1e15, DataType.FP32).view(torch.float32), weight * 1e15)
