"""The storage tiers of rows, one row each, from the nearest to a device to the farthest.

A new tier is a row of :data:`TIERS` and a kernel whose rows lie there (:mod:`recinfer.distributed.types.kernels`). The
planner's estimates, search, checks and reports have one entry per row. Arrays with a dimension M have one entry per tier.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DDR", "HBM", "TIERS", "TIER_NAMES", "Tier", "near_tier"]

_GIB = 1024**3
_GIB_PER_S = _GIB / 1000  # bytes per millisecond


@dataclass(frozen=True)
class Tier:
    """A storage tier.

    Attributes:
        name: field of ``Storage``. ``<name>_cap`` and ``<name>_mem_bw`` are arguments of ``Topology``, and
            ``<name>_bytes`` is an estimate of a plan.
        memory: the tier in messages.
        devices: kinds of devices whose ranks have the tier. A device's own memory is the first tier that it has.
        capacity: default bytes per rank.
        bandwidth: default bytes per millisecond.
    """

    name: str
    memory: str
    devices: tuple[str, ...]
    capacity: int
    bandwidth: float


HBM = Tier("hbm", "device memory", ("cuda", "mtia"), capacity=32 * _GIB, bandwidth=897 * _GIB_PER_S)
DDR = Tier("ddr", "host memory", ("cuda", "mtia", "cpu"), capacity=128 * _GIB, bandwidth=51 * _GIB_PER_S)
# The numbers of the tiers in the planner's arrays are their positions here.
TIERS = (HBM, DDR)
TIER_NAMES = tuple(tier.name for tier in TIERS)


def near_tier(compute_device: str) -> Tier:
    """The tier that is the own memory of a kind of device; the first for a kind that is in no topology."""
    return next((tier for tier in TIERS if compute_device in tier.devices), TIERS[0])
