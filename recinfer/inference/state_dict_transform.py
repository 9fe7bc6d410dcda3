"""Gathers the state of a sharded model into plain tensors, or moves it to another device and process group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from recinfer.errors import InputError

__all__ = ["state_dict_all_gather_keys", "state_dict_gather", "state_dict_to_device"]


def state_dict_gather(src: Mapping[str, Tensor | ShardedTensor], dst: Mapping[str, Tensor]) -> None:
    """Copy the values of ``src`` into the tensors of ``dst``, key by key; all ranks of a ShardedTensor's group call it.

    Args:
        src: a rank's state; keys that ``dst`` lacks are left out.
        dst: plain tensors of the whole shapes. ShardedTensors are gathered into rank 0's; other ranks' stay as they are.

    Raises:
        InputError: a key that ``src`` lacks, or a value that is neither a Tensor nor a ShardedTensor.
    """
    for key, target in dst.items():
        if key not in src:
            raise InputError(f"{key!r} is missing in the state to gather from, which has {len(src)} keys")
        source = src[key]
        if isinstance(source, ShardedTensor):
            source.gather(out=target if dist.get_rank() == 0 else None, dtype=target.dtype)
        else:
            target.copy_(_tensor(key, source))


def state_dict_all_gather_keys(state_dict: Mapping[str, Tensor | ShardedTensor], pg: dist.ProcessGroup) -> list[str]:
    """The keys of all ranks' states, sorted; all ranks of ``pg`` call it."""
    keys: list[list[str]] = [[] for _ in range(dist.get_world_size(pg))]
    dist.all_gather_object(keys, list(state_dict), pg)
    return sorted({key for of_rank in keys for key in of_rank})


def state_dict_to_device(
    state_dict: Mapping[str, Tensor | ShardedTensor], pg: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor | ShardedTensor]:
    """A copy of the state on ``device``, its ShardedTensors over the ranks of ``pg``; all of them call it.

    Raises:
        InputError: a value that is neither a Tensor nor a ShardedTensor.
    """
    rank, moved = dist.get_rank(pg), {}
    for key in state_dict_all_gather_keys(state_dict, pg):
        value = state_dict.get(key)
        if value is not None and not isinstance(value, ShardedTensor):
            moved[key] = _tensor(key, value).to(device)
            continue
        # A rank that lacks the key has no piece of that table, and takes part in the exchange of the pieces' places.
        pieces = value.local_shards() if value is not None else []
        shards = [
            Shard.from_tensor_and_offsets(p.tensor.to(device), list(p.metadata.shard_offsets), rank) for p in pieces
        ]
        size = list(value.size()) if value is not None else []
        moved[key] = ShardedTensor._init_from_local_shards(shards, size, process_group=pg)
    return moved


def _tensor(key: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{key!r} is a {type(value).__name__}; expected a Tensor or a ShardedTensor")
    return value
