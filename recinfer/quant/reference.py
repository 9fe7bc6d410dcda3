"""Reference implementations of the quantized kernels in plain torch, for tests.

It is slow and does not use FBGEMM. Formulas: row-wise asymmetric quantization with fp16 scale and
bias, rounding half to even, as FBGEMM's ``FloatToFusedNBitRowwiseQuantizedSBHalf`` does on its scalar path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.rows import QPARAM_BYTES, padded_dim, row_bytes, unpack_rows

__all__ = ["reference_lookup", "reference_pack"]

_BITS = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}


def reference_pack(weight_RD: Tensor, data_type: DataType) -> Tensor:
    """Pack finite float weights; bit-identical to :func:`recinfer.quant.packing.pack_rows`."""
    rows, dim = weight_RD.shape
    if data_type not in _BITS:
        dtype = torch.float16 if data_type is DataType.FP16 else torch.float32
        return weight_RD.to(dtype).contiguous().view(torch.uint8)
    bits = _BITS[data_type]
    weight = weight_RD.float()
    low_R1 = weight.min(dim=1, keepdim=True).values.half().float()
    high_R1 = weight.max(dim=1, keepdim=True).values
    spread = high_R1 - low_R1
    top = (1 << bits) - 1
    scale_R1 = torch.where(spread == 0, torch.ones_like(spread), spread / top).half().float()
    scale_R1 = torch.where(scale_R1 == 0, torch.ones_like(scale_R1), scale_R1)
    inverse_R1 = 1.0 / scale_R1
    # A subnormal fp16 scale can have an infinite inverse; the kernel then falls back to scale 1.
    scale_R1 = torch.where(torch.isinf(inverse_R1), torch.ones_like(scale_R1), scale_R1)
    inverse_R1 = torch.where(torch.isinf(inverse_R1), torch.ones_like(inverse_R1), inverse_R1)
    codes = torch.round((weight - low_R1) * inverse_R1).clamp(0, top).to(torch.uint8)
    out = torch.zeros((rows, row_bytes(dim, data_type)), dtype=torch.uint8)
    out[:, :QPARAM_BYTES] = torch.cat([scale_R1, low_R1], dim=1).half().view(torch.uint8)
    full = torch.zeros((rows, padded_dim(dim, data_type)), dtype=torch.uint8)
    full[:, :dim] = codes
    per_byte = 8 // bits
    for k in range(per_byte):
        out[:, QPARAM_BYTES:] |= full[:, k::per_byte] << (bits * k)
    return out


def reference_lookup(
    packed_RP: Tensor,
    dim: int,
    data_type: DataType,
    indices: Tensor,
    offsets: Tensor,
    pooling: PoolingType = PoolingType.SUM,
    weights: Tensor | None = None,
) -> Tensor:
    """One feature's lookup: float32 [bags, dim], or [ids, dim] for ``PoolingType.NONE``.

    An empty bag gives zeros; MEAN divides by the number of ids in the bag, weighted or not.
    """
    rows = unpack_rows(packed_RP, dim, data_type)[indices.long()]
    if pooling is PoolingType.NONE:
        return rows
    if weights is not None:
        rows = rows * weights.float().unsqueeze(1)
    lengths = (offsets[1:] - offsets[:-1]).long()
    bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    out = torch.zeros((len(lengths), dim)).index_add_(0, bag, rows)
    return out / lengths.clamp(min=1).unsqueeze(1) if pooling is PoolingType.MEAN else out
