"""Communication between ranks: TorchRec's helpers for hosts and their process groups, and the transport of tensors. See
docs/explanation/request.md."""

from __future__ import annotations

from recinfer.distributed.comm.ranks import (
    get_group_rank,
    get_local_rank,
    get_local_size,
    get_num_groups,
    intra_and_cross_node_pg,
)

__all__ = ["get_group_rank", "get_local_rank", "get_local_size", "get_num_groups", "intra_and_cross_node_pg"]
