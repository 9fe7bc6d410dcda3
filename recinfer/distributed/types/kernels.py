"""The compute kernels of tables, one row each: float or packed rows, and their storage tier.

A new kernel is a member of :class:`EmbeddingComputeKernel` and a row of :data:`KERNEL_RULES`, which sharders, the planner
and plans by hand read. A kernel of device or host memory has its bandwidth in
:func:`recinfer.distributed.planner.constants.kernel_bw_lookup`, any other kernel that of its tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import NoReturn

from recinfer.distributed.types.tiers import DDR, TIERS, Tier, near_tier
from recinfer.errors import ConfigError

__all__ = [
    "KERNEL_RULES",
    "EmbeddingComputeKernel",
    "EmbeddingLocation",
    "KernelRule",
    "compute_kernel_to_embedding_location",
    "kernels_where",
    "tier_code",
    "tier_of_rows",
]


@unique
class EmbeddingComputeKernel(Enum):
    """Kernels of tables, with the memory of their rows."""

    DENSE = "dense"  # nn.EmbeddingBag, gradients as tensors
    FUSED = "fused"  # batched lookup with the optimizer in the backward; rows on the device
    FUSED_UVM = "fused_uvm"  # FUSED with rows in host memory
    FUSED_UVM_CACHING = "fused_uvm_caching"  # FUSED with rows in host memory and a cache on the device
    QUANT = "quant"  # inference, packed rows on the device
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = ", ".join(kernel.value for kernel in cls)
        raise ConfigError(f"compute kernel {value!r} is not supported; expected one of: {known}")


@unique
class EmbeddingLocation(Enum):
    """Memory of a table's rows (FBGEMM's values)."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3


@dataclass(frozen=True)
class KernelRule:
    """A compute kernel.

    Attributes:
        kernel: the kernel.
        location: the memory of its rows for FBGEMM.
        packed: rows are packed, for inference.
        dense: gradients are tensors; the kernel has no optimizer in the backward.
        tier: the storage tier of its rows; None: the device's own memory.
        devices: kinds of devices that run it.
    """

    kernel: EmbeddingComputeKernel
    location: EmbeddingLocation
    packed: bool = False
    dense: bool = False
    tier: Tier | None = None
    devices: tuple[str, ...] = ("cuda", "mtia", "cpu")

    @property
    def cached(self) -> bool:
        """Whether a cache on the device holds a part of the rows."""
        return self.location is EmbeddingLocation.MANAGED_CACHING


_K, _L, _GPU = EmbeddingComputeKernel, EmbeddingLocation, ("cuda",)
# The numbers of the kernels in the planner's arrays are their positions here.
KERNEL_RULES = (
    KernelRule(_K.DENSE, _L.DEVICE, dense=True),
    KernelRule(_K.FUSED, _L.DEVICE),
    KernelRule(_K.FUSED_UVM, _L.MANAGED, tier=DDR, devices=_GPU),
    KernelRule(_K.FUSED_UVM_CACHING, _L.MANAGED_CACHING, tier=DDR, devices=_GPU),
    KernelRule(_K.QUANT, _L.DEVICE, packed=True),
    KernelRule(_K.QUANT_UVM, _L.MANAGED, packed=True, tier=DDR, devices=_GPU),
    KernelRule(_K.QUANT_UVM_CACHING, _L.MANAGED_CACHING, packed=True, tier=DDR, devices=_GPU),
)
_RULES = {rule.kernel.value: rule for rule in KERNEL_RULES}


def tier_of_rows(compute_kernel: str, compute_device: str) -> Tier:
    """The storage tier of a kernel's rows on a kind of device; the device's own memory for a kernel without a row."""
    rule = _RULES.get(compute_kernel)
    return near_tier(compute_device) if rule is None or rule.tier is None else rule.tier


def tier_code(compute_kernel: str, compute_device: str) -> int:
    """The number of :func:`tier_of_rows` in the planner's arrays."""
    return TIERS.index(tier_of_rows(compute_kernel, compute_device))


def kernels_where(condition: Callable[[KernelRule], bool]) -> list[str]:
    """The values of the kernels whose row meets ``condition``, in the order of the table."""
    return [rule.kernel.value for rule in KERNEL_RULES if condition(rule)]


def compute_kernel_to_embedding_location(compute_kernel: EmbeddingComputeKernel) -> EmbeddingLocation:
    """The memory of a kernel's rows: the device, host memory, or host memory behind a device cache."""
    return _RULES[compute_kernel.value].location
