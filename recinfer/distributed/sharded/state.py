"""TableState: parameters of a sharded table in the module tree, and its ShardedTensor in the state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh

from recinfer.distributed.tables.global_tensors import global_tensor
from recinfer.distributed.tables.slots import Tiling
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect
from recinfer.optim.local_tensors import local_pieces

__all__ = ["TableState"]


class TableState(nn.Module):
    """The parameters of one table of a sharded collection.

    ``weight`` is the parameter of the first local rectangle; ``weight_1``, ``weight_2`` ... are the parameters of
    further rectangles (a table cut in columns may have several on a rank). A rank without a rectangle has an empty
    ``weight`` of shape ``[0]``, as in TorchRec, so that parameters have the same names on all ranks, and an optimizer
    never gets an empty list. The state dict always has one entry, ``weight``: a ShardedTensor or DTensor, or the plain
    tensor of a replica.

    Args:
        rects: the local rectangles.
        parameters: their rows, in the same order, views on the kernel's rows; an empty tensor without rectangles.
        tiling: all ranks' rectangles.
        pg: the ranks.
        mesh: the same ranks, where the entry shall be a DTensor.
    """

    def __init__(
        self,
        rects: Sequence[Rect],
        parameters: Sequence[nn.Parameter],
        tiling: Tiling,
        pg: dist.ProcessGroup | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self._rects = tuple(rects)
        self._tiling = tiling
        self._pg = pg
        self._mesh = mesh
        for i, parameter in enumerate(parameters):
            self.register_parameter("weight" if i == 0 else f"weight_{i}", parameter)

    def shards(self) -> list[tuple[Rect, Tensor]]:
        """Each local rectangle with its rows, without autograd."""
        return [(rect, parameter.detach()) for rect, parameter in zip(self._rects, self.parameters())]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableState:
        """Leave the rows as they are: kernels read them in place, in the dtype that they were built for.

        Raises:
            ConfigError: ``fn`` moves tensors to another device.
        """
        for parameter in self.parameters():
            moved = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device)).device
            if moved != parameter.device:
                raise ConfigError(
                    f"a sharded table on {parameter.device} cannot be moved to {moved}: its kernel is for its device; use "
                    "DistributedModelParallel.copy(device), or sharded_model_copy"
                )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._tiling.metadata is None or self._pg is None:
            # The table is a replica, or there is one rank without a process group, where ShardedTensor is not possible.
            destination[prefix + "weight"] = self._whole(keep_vars)
            return
        local = [(rows, self._tiling.shards[rect]) for rect, rows in self.shards()]
        destination[prefix + "weight"] = global_tensor(local, self._tiling.metadata, self._pg, self._mesh)

    def _whole(self, keep_vars: bool) -> Tensor:
        parameters = list(self.parameters())
        if len(parameters) == 1:
            return parameters[0] if keep_vars else parameters[0].detach()
        rows = dict(self.shards())
        return torch.cat([torch.cat([rows[rect] for rect in strip.rects]) for strip in self._tiling.strips], 1)

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
            error_msgs.append(
                f"{key}: assign=True: kernels read their rows in place, so they cannot be replaced; load with "
                "assign=False"
            )
            return
        if key not in state_dict:
            missing_keys.append(key)
            return
        for rect, rows in self.shards():
            given = _given(state_dict[key], rect)
            if _copy_overlaps(rows, rect, given) != rows.numel():
                got = "; ".join(source.text for source, _ in given) or "nothing"
                error_msgs.append(
                    f"{key}: this rank holds {rect.text} but the loaded state has {got}; load a state with the same "
                    "sharding or the whole table, or a checkpoint, which is resharded"
                )


def _given(value: Tensor | ShardedTensor, wanted: Rect) -> list[tuple[Rect, Tensor]]:
    """The parts of a state entry that are on this rank, as rectangles of the table of ``wanted``."""
    return [
        (Rect(wanted.rank, row, row + rows.shape[0], col, col + rows.shape[1], wanted.table), rows)
        for rows, (row, col) in local_pieces(value)
    ]


def _copy_overlaps(target: Tensor, wanted: Rect, sources: Sequence[tuple[Rect, Tensor]]) -> int:
    """Copy the overlaps of ``sources`` with ``wanted``; returns the number of copied elements."""
    copied = 0
    for source, rows in sources:
        if both := wanted.overlap(source):
            _part(target, wanted, both).copy_(_part(rows, source, both))
            copied += both.rows * both.cols
    return copied


def _part(rows: Tensor, of: Rect, part: Rect) -> Tensor:
    """The rows of the rectangle ``part``, cut from the rows of the rectangle ``of``, which contains it."""
    return rows[
        part.row_start - of.row_start : part.row_stop - of.row_start,
        part.col_start - of.col_start : part.col_stop - of.col_start,
    ]
