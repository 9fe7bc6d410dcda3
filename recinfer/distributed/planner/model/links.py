"""Bandwidths of collectives (bytes per millisecond), by kind of collective and group of ranks."""

from __future__ import annotations

import abc
from enum import Enum

from recinfer.distributed.planner.constants import CROSS_NODE_BANDWIDTH, INTRA_NODE_BANDWIDTH

__all__ = ["BasicCommsBandwidths", "CollectiveType", "GeneralizedCommsBandwidth"]


class CollectiveType(Enum):
    """Kinds of collective."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(abc.ABC):
    """Bandwidth of a collective as a function of its group; subclass it to model a network.

    A subclass needs only :meth:`get_bw`.
    """

    @abc.abstractmethod
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Bytes per millisecond of the collective over ``world_size`` ranks, ``local_world_size`` a host."""

    @property
    def intra_host_bw(self) -> float:
        """Bytes per millisecond within a host; 0 when not given separately."""
        return 0.0

    @property
    def inter_host_bw(self) -> float:
        """Bytes per millisecond between hosts; 0 when not given separately."""
        return 0.0


class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """Two bandwidths: inside a host, and between hosts for groups that span hosts."""

    def __init__(
        self, inter_host_bw: float = CROSS_NODE_BANDWIDTH, intra_host_bw: float = INTRA_NODE_BANDWIDTH
    ) -> None:
        self._inter_host_bw = inter_host_bw
        self._intra_host_bw = intra_host_bw

    def __str__(self) -> str:
        return f"inter_host_bw={self._inter_host_bw} intra_host_bw={self._intra_host_bw}"

    @property
    def inter_host_bw(self) -> float:
        """Between hosts."""
        return self._inter_host_bw

    @property
    def intra_host_bw(self) -> float:
        """Within a host."""
        return self._intra_host_bw

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """The slower link that the group needs."""
        return self._inter_host_bw if world_size > local_world_size else self._intra_host_bw
