"""Packed rows are the ones in TorchRec's quantized modules, byte for byte; skipped where torchrec is not installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import row_bytes

pytest.importorskip("torchrec", reason="torchrec is not installed: rows are compared with FBGEMM's in test_rowwise.py")

TYPES = {
    DataType.INT8: torch.qint8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
    DataType.FP16: torch.float16,
    DataType.FP32: torch.float32,
}


def special_rows(dim: int) -> Tensor:
    """Rows of every size, and those that trip quantizers."""
    torch.manual_seed(dim)
    plain = torch.randn(400, dim)
    huge = torch.where(torch.rand(40, dim) < 0.5, 60000.0, -5000.0)
    parts = [
        plain * 0.05,
        plain * 10 ** (torch.rand(400, 1) * 12 - 9),
        torch.zeros(3, dim),
        -torch.zeros(3, dim),
        torch.where(torch.rand(40, dim) < 0.5, 0.0, -0.0),
        torch.randn(40, 1).expand(40, dim),
        torch.randn(40, 1) * 100 + plain[:40] * 1e-4,
        huge,
        plain[:40] * 1e-40,  # denormal in fp32
        plain[:40] * 1e-7,  # a scale that is denormal in fp16, or nothing
        (plain[:40] * 300).round() / 8,
        plain[:40].abs(),
        -plain[:40].abs(),
    ]
    return torch.cat(parts).clamp(-60000, 60000).contiguous()


def torchrec_rows(weight: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """What TorchRec stores for ``weight``, without the padding behind each row."""
    import torchrec  # type: ignore[import-not-found, unused-ignore]
    from torchrec.inference.modules import quantize_inference_model  # type: ignore[import-not-found, unused-ignore]

    rows, dim = weight.shape
    config = torchrec.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name="t", feature_names=["f"])
    model: Any = torch.nn.Sequential(torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu")))
    with torch.no_grad():
        model[0].embedding_bags["t"].weight.copy_(weight)
    quantized = quantize_inference_model(copy.deepcopy(model), quantization_dtype=dtype, fp_weight_dtype=dtype)
    (tbe,) = quantized[0]._emb_modules
    ((packed, *_),) = tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)
    return packed[:, :width]


DIMS = [1, 2, 3, 7, 8, 12, 20, 33, 36, 64, 100, 128, 260]
BITS = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}
# TorchRec cannot quantize rows of an odd number of bytes ("ncols needs to be multiple of 2 Bytes").
CASES = [(kind, dim) for kind in TYPES for dim in DIMS if dim * BITS.get(kind, 16) % 16 == 0]


@pytest.mark.parametrize(("data_type", "dim"), CASES)
def test_rows_are_those_of_torchrec(data_type: DataType, dim: int) -> None:
    weight = special_rows(dim)
    mine = pack_rows(weight, data_type)
    theirs = torchrec_rows(weight, TYPES[data_type], row_bytes(dim, data_type))
    different = (mine != theirs).any(1).nonzero().squeeze(1)
    assert len(different) == 0, (len(different), different[:5], weight[different[:2]])
