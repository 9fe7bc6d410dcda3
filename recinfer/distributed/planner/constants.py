"""Default figures of the planner: bandwidths in bytes per millisecond, capacities in bytes, and model factors.

Names and values are TorchRec's, so that estimates agree.
"""

from __future__ import annotations

from recinfer.distributed.types.tiers import DDR, HBM

__all__ = [
    "BATCHED_COPY_PERF_FACTOR",
    "BATCH_SIZE",
    "BIGINT_DTYPE",
    "BWD_COMPUTE_MULTIPLIER",
    "CROSS_NODE_BANDWIDTH",
    "DDR_CAP",
    "DDR_MEM_BW",
    "DP_ELEMENTWISE_KERNELS_PERF_FACTOR",
    "FULL_BLOCK_EMB_DIM",
    "HALF_BLOCK_PENALTY",
    "HBM_CAP",
    "HBM_MEM_BW",
    "HBM_TO_DDR_MEM_BW",
    "INTRA_NODE_BANDWIDTH",
    "MAX_SIZE",
    "MIN_CW_DIM",
    "NUM_POOLINGS",
    "POOLING_FACTOR",
    "QUARTER_BLOCK_PENALTY",
    "UVM_CACHING_RATIO",
    "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER",
    "WEIGHTED_KERNEL_MULTIPLIER",
    "kernel_bw_lookup",
]

_GB_S = 1024**3 / 1000  # bytes per millisecond in one GiB/s

MAX_SIZE: int = 2**63 - 1
INTRA_NODE_BANDWIDTH: float = 600 * _GB_S
CROSS_NODE_BANDWIDTH: float = 12.5 * _GB_S
HBM_CAP: int = HBM.capacity
DDR_CAP: int = DDR.capacity
HBM_MEM_BW: float = HBM.bandwidth
DDR_MEM_BW: float = DDR.bandwidth
HBM_TO_DDR_MEM_BW: float = 32 * _GB_S

BATCH_SIZE: int = 512
POOLING_FACTOR: float = 1.0
NUM_POOLINGS: float = 1.0
MIN_CW_DIM: int = 128
UVM_CACHING_RATIO: float = 0.2
BIGINT_DTYPE: int = 8  # bytes of an id

BWD_COMPUTE_MULTIPLIER: float = 2
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER: float = 1
WEIGHTED_KERNEL_MULTIPLIER: float = 1.1
BATCHED_COPY_PERF_FACTOR: float = 2.455
DP_ELEMENTWISE_KERNELS_PERF_FACTOR: float = 9.22
FULL_BLOCK_EMB_DIM: int = 128
HALF_BLOCK_PENALTY: float = 1.15
QUARTER_BLOCK_PENALTY: float = 1.75

_DEVICE_KERNELS = ("fused", "quant")


def kernel_bw_lookup(
    compute_device: str,
    compute_kernel: str,
    hbm_mem_bw: float,
    ddr_mem_bw: float,
    hbm_to_ddr_mem_bw: float,
    caching_ratio: float | None = None,
    prefetch_pipeline: bool = False,
) -> float | None:
    """Bytes per millisecond at which ``compute_kernel`` reads rows; None when the device does not run that kernel.

    ``dense`` counts half of the memory's bandwidth; host-memory kernels a tenth of the link's, as their reads are
    scattered; behind a cache the two are mixed by ``caching_ratio``, and a prefetch pipeline hides the link.
    """
    memory = ddr_mem_bw if compute_device == "cpu" else hbm_mem_bw
    if compute_kernel == "dense":
        return 0.5 * memory
    if compute_kernel in _DEVICE_KERNELS:
        return memory
    if compute_device != "cuda":
        return None
    if compute_kernel.endswith("_uvm"):
        return hbm_to_ddr_mem_bw / 10
    if compute_kernel.endswith("_uvm_caching"):
        if prefetch_pipeline and compute_kernel.startswith("fused"):
            return hbm_mem_bw
        ratio = caching_ratio or UVM_CACHING_RATIO
        return (ratio * hbm_mem_bw + (1 - ratio) * hbm_to_ddr_mem_bw) / 10
    return None
