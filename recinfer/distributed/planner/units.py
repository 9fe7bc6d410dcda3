"""Units of the planner, and the small functions of TorchRec's ``planner.utils``."""

from __future__ import annotations

import math
from collections.abc import Iterable

from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Storage
from recinfer.distributed.types.tiers import TIER_NAMES

__all__ = [
    "bytes_to_gb",
    "bytes_to_mb",
    "gb_to_bytes",
    "mb_to_bytes",
    "prod",
    "reset_shard_rank",
    "storage_repr_in_gb",
]


def bytes_to_gb(num_bytes: float) -> float:
    """Convert bytes to GiB."""
    return float(num_bytes) / 1024**3


def bytes_to_mb(num_bytes: float) -> float:
    """Convert bytes to MiB."""
    return float(num_bytes) / 1024**2


def gb_to_bytes(gb: float) -> int:
    """Convert GiB to bytes."""
    return int(gb * 1024**3)


def mb_to_bytes(mb: float) -> int:
    """Convert MiB to bytes."""
    return int(mb * 1024**2)


def prod(iterable: Iterable[int]) -> int:
    """Product of the factors."""
    return math.prod(iterable)


def reset_shard_rank(proposal: list[ShardingOption]) -> None:
    """Remove the ranks from a proposal."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Text of a storage in GB, for messages."""
    if storage is None:
        return ""
    sizes = (f"{name} = {round(bytes_to_gb(getattr(storage, name)), 3)} GB" for name in TIER_NAMES)
    return f"Storage({', '.join(sizes)})"
