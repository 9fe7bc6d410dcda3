"""Reference implementations of the quantized kernels in plain torch, for tests.

It is slow and does not use FBGEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.formats.registry import row_format
from recinfer.quant.rows import unpack_rows

__all__ = ["reference_lookup", "reference_pack"]


def reference_pack(weight_RD: Tensor, data_type: DataType) -> Tensor:
    """Pack finite float weights; bit-identical to :func:`recinfer.quant.packing.pack_rows`."""
    return row_format(data_type).reference_pack(weight_RD)


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
