"""What stands in the module tree for a sharded table: its local parameters, and a ShardedTensor in the state dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.device_mesh import DeviceMesh

from recinfer.distributed.global_tensors import global_tensor
from recinfer.distributed.sharding.layout import Piece
from recinfer.optim.local_tensors import local_pieces

__all__ = ["TableState"]

Rect = tuple[int, int, int, int]  # row start, row stop, column start, column stop


class TableState(nn.Module):
    """One table of a sharded collection.

    ``weight`` is the parameter of the first local rectangle and ``weight_1``, ``weight_2`` ... those of further ones (a
    table cut in columns may have several on a rank). A rank without a rectangle has an empty ``weight``, of shape
    ``[0]``, as in TorchRec: so the ranks' parameters have the same names, and an optimizer over them is never one of no
    parameters. The state dict always has one entry, ``weight``: a ShardedTensor or DTensor, or the plain tensor of a
    replica.

    Args:
        pieces: the local rectangles.
        parameters: their rows, in the same order, views on what the kernel reads; an empty one where there are none.
        metadata: all ranks' rectangles; None for a replica.
        pg: the ranks.
        mesh: the same ranks, where the entry shall be a DTensor.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        parameters: Sequence[nn.Parameter],
        metadata: ShardedTensorMetadata | None,
        pg: dist.ProcessGroup | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self._pieces = tuple(pieces)
        self._metadata = metadata
        self._pg = pg
        self._mesh = mesh
        for i, parameter in enumerate(parameters):
            self.register_parameter("weight" if i == 0 else f"weight_{i}", parameter)

    def shards(self) -> list[tuple[Piece, Tensor]]:
        """Each local rectangle with its rows, without autograd."""
        return [(piece, parameter.detach()) for piece, parameter in zip(self._pieces, self.parameters())]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._metadata is None or self._pg is None:
            # A replica; or a world of one without a process group, where a ShardedTensor cannot be.
            destination[prefix + "weight"] = self._whole(keep_vars)
            return
        local = [(rows, piece.metadata) for piece, rows in self.shards() if piece.metadata is not None]
        destination[prefix + "weight"] = global_tensor(local, self._metadata, self._pg, self._mesh)

    def _whole(self, keep_vars: bool) -> Tensor:
        parameters = list(self.parameters())
        if len(parameters) == 1:
            return parameters[0] if keep_vars else parameters[0].detach()
        columns: dict[int, list[tuple[int, Tensor]]] = {}
        for piece, rows in self.shards():
            columns.setdefault(piece.col_start, []).append((piece.row_start, rows))
        return torch.cat(
            [torch.cat([r for _, r in sorted(columns[c], key=lambda p: p[0])]) for c in sorted(columns)], 1
        )

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if local_metadata.get("assign_to_params_buffers"):
            error_msgs.append(f"{key}: assign=True, but a kernel reads its rows where they are; load with assign=False")
            return
        if key not in state_dict:
            missing_keys.append(key)
            return
        sources = _rectangles(state_dict[key])
        for piece, rows in self.shards():
            wanted = (piece.row_start, piece.row_stop, piece.col_start, piece.col_stop)
            if _copy_overlaps(rows, wanted, sources) != rows.numel():
                got = "; ".join(f"[{a}:{b}, {c}:{d}]" for (a, b, c, d), _ in sources) or "nothing"
                error_msgs.append(
                    f"{key}: this rank holds [{wanted[0]}:{wanted[1]}, {wanted[2]}:{wanted[3]}] but the state given to it "
                    f"has {got}; give the state of the same sharding or the whole table, or load a checkpoint, which "
                    "reshards"
                )


def _rectangles(value: Tensor | ShardedTensor) -> list[tuple[Rect, Tensor]]:
    """The parts of a state entry that are on this rank, with their places in the table."""
    return [(_rect(offsets, rows.shape), rows) for rows, offsets in local_pieces(value)]


def _rect(offset: Sequence[int], shape: Sequence[int]) -> Rect:
    return (offset[0], offset[0] + shape[0], offset[1], offset[1] + shape[1])


def _copy_overlaps(target: Tensor, wanted: Rect, sources: Sequence[tuple[Rect, Tensor]]) -> int:
    """Copy what ``sources`` have of ``wanted``; gives the number of elements copied."""
    copied = 0
    for (top, bottom, left, right), rows in sources:
        r0, r1 = max(top, wanted[0]), min(bottom, wanted[1])
        c0, c1 = max(left, wanted[2]), min(right, wanted[3])
        if r0 < r1 and c0 < c1:
            part = rows[r0 - top : r1 - top, c0 - left : c1 - left]
            target[r0 - wanted[0] : r1 - wanted[0], c0 - wanted[2] : c1 - wanted[2]].copy_(part)
            copied += part.numel()
    return copied
