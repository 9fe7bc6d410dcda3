"""How fast ranks exchange: kinds of collective, and their bandwidth by who takes part (bytes per millisecond)."""

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
    """Bandwidth of a collective as a function of the group; derive from it to model a real network.

    A class that defines :meth:`get_bw` alone is enough: the two figures below come from it then.
    """

    @abc.abstractmethod
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Bytes per millisecond of the collective over ``world_size`` ranks, ``local_world_size`` a host."""

    @property
    def intra_host_bw(self) -> float:
        """Bytes per millisecond within a host; 0 when not known apart."""
        return 0.0

    @property
    def inter_host_bw(self) -> float:
        """Bytes per millisecond between hosts; 0 when not known apart."""
        return 0.0


class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """Two figures: the slower one as soon as the group spans hosts."""

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
