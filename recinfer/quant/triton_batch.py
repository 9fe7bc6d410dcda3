"""Runs the Triton kernel behind the interface of ``TableBatch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from recinfer.errors import UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.buffers import Buffers, Placed
from recinfer.quant.triton_lookup import Read, TritonTables

__all__ = ["TritonBatch"]


class TritonBatch:
    """One launch over packed tables of any precision and width; see :class:`recinfer.quant.tbe.TableBatch`.

    Differences: columns have no padding, unpooled tables may have several widths, ids may come from the host (they are
    copied through pinned memory), and ids out of range give zeros, which :meth:`out_of_range` counts.
    """

    knows_rows = False
    real_columns: Tensor | None = None

    def __init__(
        self,
        reads: Sequence[Placed],
        pooling: PoolingType,
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.reads, self.tables = tuple(reads), tuple(dict.fromkeys(reads))
        self.pooling, self.storage, self.output_dtype, self.weights = pooling, buffers, output_dtype, buffers.near
        local = [Read(placed, key, pooling) for key, placed in enumerate(self.reads)]
        self._lookup = TritonTables(local, buffers, output_dtype=output_dtype)
        self.widths = [placed.rect.cols for placed in self.reads]
        self.total_dim = self._lookup.total_dim
        self._bad = self._lookup.new_counter()

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """As ``TableBatch.forward``: ``[B, columns]``, or ``[N, widest]`` when unpooled. Does not wait for the GPU."""
        ids, edges, weights = (self._here(tensor) for tensor in (indices, offsets, per_sample_weights))
        assert ids is not None and edges is not None
        batch = (edges.numel() - 1) // len(self.reads)
        out = self._lookup(ids, edges, weights, batch=batch, bad=self._bad)
        return out if self._lookup.pooled else out[0]

    __call__ = forward
    traced = forward

    def _here(self, tensor: Tensor | None) -> Tensor | None:
        device = self.weights.device
        if tensor is None or tensor.device == device:
            return tensor
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def out_of_range(self) -> list[int]:
        """Number of ids that each read skipped since the last call. Waits for the device."""
        counts: list[int] = self._bad.tolist()
        self._bad.zero_()
        return counts

    def without_padding(self, out_BD: Tensor) -> Tensor:
        """Returns ``out_BD``, which has no padding."""
        return out_BD

    def use_threads(self, threads: int) -> None:
        """No effect: only FBGEMM on the CPU uses threads."""

    def forget_cached(self) -> None:
        """No effect: rows in host memory are not cached."""

    def fbgemm_module(self) -> NoReturn:
        """Raises UnavailableError: Triton has no TBE module."""
        raise UnavailableError("the Triton kernel has no TBE module; set RECINFER_KERNEL=fbgemm")
