"""Reads the weights of a module in memory as a checkpoint, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recinfer.checkpoint.dcp import Chunk, StoredTensor
from recinfer.checkpoint.reader import CheckpointReader
from recinfer.errors import ConfigError

__all__ = ["LiveWeights"]


class LiveWeights(CheckpointReader):
    """The weights of ``model``, whose tables may be sharded by one rank.

    Raises:
        ConfigError: tables that are spread over several ranks; tensors without data.
    """

    def __init__(self, model: nn.Module) -> None:
        self.path = Path("the model in memory")
        self.prefix = ""
        self._tensors = {
            key: _stored(key, value, self.path)
            for key, value in model.state_dict().items()
            if isinstance(value, Tensor) or hasattr(value, "local_shards")
        }
        self.model_json = None
        self.contract = None


class _Rows:
    """A tensor in memory, with the methods of recinfer.checkpoint.torch_file.TensorBytes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    def read_rows(self, start: int, stop: int, out: Tensor) -> None:
        """Copy rows ``start`` to ``stop`` into ``out``; a scalar counts as one row."""
        out.copy_(self._tensor[start:stop] if self.shape else self._tensor)

    def read_blocks(self, start: int, stop: int, block: Tensor) -> Iterator[tuple[int, int]]:
        """Fill the first rows of ``block`` with rows ``start`` to ``stop``, block by block; yields (first, last)."""
        for first in range(start, stop, len(block)):
            last = min(first + len(block), stop)
            block[: last - first].copy_(self._tensor[first:last])
            yield first, last

    def plain(self, dtype: torch.dtype) -> bool:
        """Whether :meth:`read_blocks` gives rows of ``dtype``."""
        return bool(self.shape)


def _stored(key: str, value: Any, path: Path) -> StoredTensor:
    if is_lazy(value) or getattr(value, "is_meta", False):
        why = "is not initialized; call the module once" if is_lazy(value) else "is on the meta device"
        raise ConfigError(
            f"the module has no weights: {key} {why}. Export the trained module, or its checkpoint by `recinfer export`"
        )
    shards: list[tuple[tuple[int, ...], Tensor]]
    if hasattr(value, "local_shards"):
        shards = [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
        shape = tuple(value.metadata().size)
    else:
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        shards, shape = [((0,) * value.dim(), value)], tuple(value.shape)
    if sum(tensor.numel() for _, tensor in shards) < torch.Size(shape).numel():
        raise ConfigError(
            f"{key} is spread over several ranks; save a checkpoint with torch.distributed.checkpoint and export that"
        )
    chunks = tuple(
        Chunk(offsets, tuple(tensor.shape), path, known=_Rows(tensor))  # type: ignore[arg-type]
        for offsets, tensor in shards
    )
    return StoredTensor(shape, shards[0][1].dtype, (key,), chunks)
