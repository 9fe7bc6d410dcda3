"""Optimizer interface of fused groups: names, state as sharded tensors, and learning rates.

Keys are TorchRec's: parameter ``<table>.weight``, state ``<table>.momentum1`` and ``<table>.exp_avg_sq``. State with
one number per row has one dimension; column pieces of a table have separate state, which is concatenated, ``rows``
numbers each. ``<table>.iter`` counts the steps of Adam or LAMB. TorchRec does not write it, so checkpoints without it
can be loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh

from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.tables.cpu import TableGroup
from recinfer.distributed.tables.global_tensors import global_tensor
from recinfer.distributed.types.tables import ShardedEmbeddingTable
from recinfer.errors import ConfigError
from recinfer.optim.fused import FusedOptimizer

__all__ = ["GroupFusedOptimizer", "TablePiece", "UnnamedOptimizer", "sharded_or_local"]

_STEPS = "iter"


@dataclass(frozen=True)
class TablePiece:
    """A local shard of a table, with its rows and state in its group."""

    table: ShardedEmbeddingTable
    parameter: nn.Parameter
    state: dict[str, Tensor]


class UnnamedOptimizer:
    """Raises in the first backward of fused tables whose settings name neither an optimizer nor a learning rate.

    SGD would update the tables at FBGEMM's default rate, and the caller's own optimizer would have no effect. A rate
    that was set later in the kernel's ``param_groups`` counts as named.

    Args:
        group: the tables.
        names: their names.

    ``guard(vectors)`` returns the looked-up ``vectors``; their backward raises ConfigError.
    """

    def __init__(self, group: TableGroup, names: Iterable[str]) -> None:
        self._group = group
        self._names = tuple(dict.fromkeys(names))
        self._refuses = True

    def __call__(self, vectors: Tensor) -> Tensor:
        guarded: Tensor = _Guard.apply(vectors, self)
        return guarded

    def check(self) -> None:
        """Called in a backward, before the tables are updated."""
        if self._refuses and self._group.param_group["lr"] == FusedSettings.learning_rate:
            raise ConfigError(
                f"backward through fused tables that have no optimizer: {', '.join(self._names)}. Call "
                "apply_optimizer_in_backward for their parameters before they are sharded, or pass the sharder "
                'fused_params={"optimizer": ..., "learning_rate": ...}; or plan them with the kernel dense, to train them '
                "with your own optimizer. To evaluate, use torch.no_grad()"
            )
        self._refuses = False


class _Guard(torch.autograd.Function):
    """The identity; its backward lets an :class:`UnnamedOptimizer` check."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, unnamed: UnnamedOptimizer) -> Tensor:
        ctx.unnamed = unnamed
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.unnamed.check()
        return grad_output, None


class GroupFusedOptimizer(FusedOptimizer):
    """The optimizer of fused groups, which runs in their backward.

    Args:
        groups: each group with its pieces, in the group's order.
        pg: the ranks that hold the other shards; without it the state is local.
        mesh: the same ranks, if parameters and state are DTensors.

    ``param_groups`` has one entry per group; setting its ``"lr"`` acts on the group's next update.
    """

    def __init__(
        self,
        groups: Sequence[tuple[TableGroup, Sequence[TablePiece]]],
        pg: dist.ProcessGroup | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._groups = [group for group, _ in groups]
        by_table: dict[str, list[TablePiece]] = defaultdict(list)
        group_of: dict[str, TableGroup] = {}
        for group, pieces in groups:
            for piece in pieces:
                by_table[piece.table.name].append(piece)
                group_of.setdefault(piece.table.name, group)
        counted = set(map(id, group_of.values()))
        self._counted_elsewhere = [
            (group, group_of[pieces[0].table.name])
            for group, pieces in groups
            if group.steps is not None and id(group) not in counted
        ]
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        for name, pieces in by_table.items():
            params[f"{name}.weight"] = parameter = sharded_or_local(pieces, [p.parameter for p in pieces], pg, mesh)
            state[parameter] = {
                f"{name}.{key}": sharded_or_local(pieces, [p.state[key] for p in pieces], pg, mesh)
                for key in pieces[0].state
            }
            steps = group_of[name].steps
            if steps is not None:
                state[parameter][f"{name}.{_STEPS}"] = steps
        param_groups = []
        for group, pieces in groups:
            group.param_group["params"] = [params[f"{n}.weight"] for n in dict.fromkeys(p.table.name for p in pieces)]
            param_groups.append(group.param_group)
        super().__init__(params, state, param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No effect: the backward has updated the rows, with the rates of ``param_groups``."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """No effect: there are no gradients."""

    def _optional_state(self, key: str) -> bool:
        return key.endswith(f".{_STEPS}")

    def post_load_state_dict(self) -> None:
        """Apply loaded step counts to the groups. The state has one count per table: that of its first group, which its
        pieces of other widths share."""
        for group, first in self._counted_elsewhere:
            assert group.steps is not None and first.steps is not None
            group.steps.copy_(first.steps)
        for group in self._groups:
            group.steps_loaded()

    def set_optimizer_step(self, step: int) -> None:
        """Set the step count of every group that has one."""
        for group in self._groups:
            if group.steps is not None:
                group.steps.fill_(step)
        self.post_load_state_dict()


def sharded_or_local(
    pieces: Sequence[TablePiece],
    tensors: Sequence[Tensor],
    pg: dist.ProcessGroup | None,
    mesh: DeviceMesh | None = None,
) -> Tensor | ShardedTensor:
    """A tensor of all ranks from one table's pieces, or the first piece if the pieces have no metadata."""
    whole, places = pieces[0].table.global_metadata, [p.table.local_metadata for p in pieces]
    if pg is None or whole is None or None in places:
        return tensors[0]
    if tensors[0].dim() == 1:
        own = [_rowwise_place(place, whole.shards_metadata) for place in places if place is not None]
        whole = _rowwise_metadata(whole)
    else:
        own = [place for place in places if place is not None]
    metadata = ShardedTensorMetadata(
        shards_metadata=whole.shards_metadata,
        size=whole.size,
        tensor_properties=TensorProperties(dtype=tensors[0].dtype, requires_grad=tensors[0].requires_grad),
    )
    return global_tensor(list(zip(tensors, own)), metadata, pg, mesh)


def _rows_of(shards: Iterable[ShardMetadata]) -> int:
    return max(s.shard_offsets[0] + s.shard_sizes[0] for s in shards)


def _rowwise_place(place: ShardMetadata, shards: Sequence[ShardMetadata]) -> ShardMetadata:
    columns = sorted({s.shard_offsets[1] for s in shards})
    offset = columns.index(place.shard_offsets[1]) * _rows_of(shards) + place.shard_offsets[0]
    return ShardMetadata(shard_offsets=[offset], shard_sizes=[place.shard_sizes[0]], placement=place.placement)


def _rowwise_metadata(whole: ShardedTensorMetadata) -> ShardedTensorMetadata:
    shards = whole.shards_metadata
    places = [_rowwise_place(shard, shards) for shard in shards]
    num_columns = len({s.shard_offsets[1] for s in shards})
    return ShardedTensorMetadata(
        shards_metadata=sorted(places, key=lambda s: s.shard_offsets[0]),
        size=torch.Size([num_columns * _rows_of(shards)]),
    )
