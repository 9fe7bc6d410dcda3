"""Combines the state that a plain optimizer keeps per local shard of a table into one tensor of all ranks.

A table with the kernel ``dense`` is sharded, but its parameter on a rank is an ordinary tensor, and so is the state
that torch's optimizers create for it. Without this conversion, every rank's part would have the same name in a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from recinfer.distributed.tables.global_tensors import dtensor_of, global_tensor
from recinfer.errors import CheckpointError
from recinfer.optim.keyed import KeyedOptimizer
from recinfer.optim.local_tensors import local_pieces

__all__ = ["state_of_all_ranks"]


def state_of_all_ranks(
    optimizer: KeyedOptimizer, names: Mapping[str, str], model: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state dict, with the state of local shards placed in tensors of the whole table.

    Args:
        optimizer: over parameters of the model.
        names: the optimizer's name of a parameter -> the model's name; several names for a table of which this rank
            has several shards.
        model: the model's state dict; sharded tables are ShardedTensors or DTensors in it.

    Returns:
        parameter -> state name -> value, without tables on other ranks. A table of several shards is under the name of
        the first.

    Raises:
        CheckpointError: state with neither one number per element nor one per row of the table.
    """
    states = optimizer.state_dict()["state"]
    names_of: dict[str, list[str]] = {}
    for name in states:
        names_of.setdefault(names[name], []).append(name)
    found = {}
    for key, (name, *more) in names_of.items():
        whole = model.get(key)  # the state of a schedule has no parameter of the model
        values = states[name]
        if isinstance(whole, DTensor | ShardedTensor) and _is_plain(optimizer.params[name]):
            if not local_pieces(whole):
                continue
            parameters = [optimizer.params[each] for each in (name, *more)]
            values = {
                state: _placed(f"{key}: {state}", [states[each][state] for each in (name, *more)], parameters, whole)
                for state in values
            }
        found[name] = values
    return found


def _is_plain(parameter: Tensor | ShardedTensor) -> bool:
    return isinstance(parameter, Tensor) and not isinstance(parameter, DTensor | ShardedTensor)


def _placed(what: str, values: Sequence[Any], parameters: Sequence[Any], whole: ShardedTensor | DTensor) -> Any:
    """One state of all local shards, in a tensor of the whole table."""
    value, parameter = values[0], parameters[0]
    if not isinstance(value, Tensor) or not value.dim():
        return value  # a count of steps: the same on every rank and for every shard
    rows, cols = whole.size()
    by_row = value.shape in ((parameter.shape[0],), (parameter.shape[0], 1)) and parameter.shape[1] == cols
    if value.shape != parameter.shape and not by_row:
        raise CheckpointError(
            f"{what}: has shape {tuple(value.shape)} for a local shard {tuple(parameter.shape)} of {rows} x {cols}; "
            f"expected state per element, or per row for a table that is not sharded by columns. Plan the "
            "table with the kernel fused, or leave this optimizer out of the checkpoint"
        )
    size = torch.Size([rows, *((cols if value.shape == parameter.shape else 1,) * (value.dim() - 1))])
    places = [offsets[: value.dim()] for _, offsets in local_pieces(whole)]
    if isinstance(whole, DTensor):
        return dtensor_of(list(zip(values, places)), size, whole.device_mesh, whole.placements[0])
    metadata = whole.metadata()
    shards = [
        ShardMetadata(
            shard_offsets=shard.shard_offsets[: value.dim()],
            shard_sizes=[min(n, of) for n, of in zip(shard.shard_sizes, size)],
            placement=shard.placement,
        )
        for shard in metadata.shards_metadata
    ]
    properties = replace(metadata.tensor_properties, dtype=value.dtype, requires_grad=False)
    own = [next(s for s in shards if tuple(s.shard_offsets) == tuple(place)) for place in places]
    described = replace(metadata, shards_metadata=shards, size=size, tensor_properties=properties)
    return global_tensor(list(zip(values, own)), described, whole._process_group)
