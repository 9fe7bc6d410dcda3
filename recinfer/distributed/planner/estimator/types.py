"""The hardware and the shard that a performance estimate is for, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recinfer.distributed.planner.constants import kernel_bw_lookup
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology

__all__ = ["HardwarePerfConfig", "ShardPerfContext"]


class HardwarePerfConfig:
    """The performance of one kind of hardware; subclasses give other bandwidths.

    Attributes:
        name: name of the hardware.
    """

    name: str = "default"

    def get_device_bw(
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        ssd_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        caching_ratio: float | None = None,
        prefetch_pipeline: bool = False,
    ) -> float | None:
        """Bytes per millisecond at which a kernel reads rows, see
        :func:`recinfer.distributed.planner.constants.kernel_bw_lookup`.

        Args:
            ssd_mem_bw: not used: no kernel keeps rows on SSD.
        """
        return kernel_bw_lookup(
            compute_device, compute_kernel, hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, caching_ratio, prefetch_pipeline
        )


@dataclass
class ShardPerfContext:
    """A shard to estimate.

    Attributes:
        sharding_type, compute_kernel: of its option.
        hash_size, emb_dim: its rows and columns.
        device_bw: bytes per millisecond at which its device reads rows; 0 if the device does not run the kernel.
    """

    sharding_type: str = ""
    compute_kernel: str = ""
    hash_size: int = 0
    emb_dim: int = 0
    device_bw: float = 0.0

    @classmethod
    def build_shard_perf_contexts(
        cls,
        config: HardwarePerfConfig,
        shard_sizes: Sequence[Sequence[int]],
        sharding_option: ShardingOption,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None,
        *others: Any,
        **named: Any,
    ) -> list[ShardPerfContext]:
        """One context per shard.

        Args:
            shard_sizes: rows and columns of each shard.
            constraints, others, named: not used.
        """
        bandwidth = config.get_device_bw(
            topology.compute_device,
            sharding_option.compute_kernel,
            topology.hbm_mem_bw,
            topology.ddr_mem_bw,
            0.0,
            topology.hbm_to_ddr_mem_bw,
            sharding_option.cache_load_factor,
        )
        kinds = sharding_option.sharding_type, sharding_option.compute_kernel
        return [cls(*kinds, rows, columns, bandwidth or 0.0) for rows, columns in shard_sizes]
