"""Estimators of options as objects: milliseconds and bytes of shards, computed by ``estimates``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from recinfer.distributed.planner.constants import kernel_bw_lookup
from recinfer.distributed.planner.interfaces import ShardEstimator
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.estimates import (
    KERNEL_CODES,
    NO_ROW_FORMAT,
    TYPE_CODES,
    FloatN,
    IntN,
    ShardArrays,
    inference_time,
    row_alignment,
    storage_bytes,
    training_time,
)
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.sharders import sharder_name
from recinfer.distributed.planner.model.tables import facts_of_option
from recinfer.distributed.planner.model.topology import Perf, Topology, storage_of
from recinfer.distributed.planner.solve.space import SearchSpace, shard_arrays
from recinfer.distributed.types import CacheStatistics, ModuleSharder, PipelineType
from recinfer.distributed.types.kernels import kernels_where, tier_code
from recinfer.distributed.types.sharding_types import rule_of
from recinfer.errors import ConfigError

__all__ = ["EmbeddingOffloadStats", "EmbeddingPerfEstimator", "EmbeddingStorageEstimator"]

SharderMap = dict[str, ModuleSharder[nn.Module]]


def _arrays_of_options(
    options: list[ShardingOption],
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None,
    sharder_map: SharderMap | None,
) -> ShardArrays:
    facts = []
    for o in options:
        sharder = (sharder_map or {}).get(sharder_name(type(o.module[1])))
        facts.append(facts_of_option(o, sharder, constraints))
    num = np.array([o.num_shards for o in options], np.int64)
    index = np.arange(len(options))
    rect = np.array([[s.offset[0], s.size[0], s.offset[1], s.size[1]] for o in options for s in o.shards], np.int64)
    space = SearchSpace(
        facts,
        np.arange(len(options) + 1),
        index,
        np.array([TYPE_CODES[o.sharding_type] for o in options], np.int64),
        np.array([KERNEL_CODES[o.compute_kernel] for o in options], np.int64),
        np.concatenate([[0], np.cumsum(num)]).astype(np.int64),
        np.repeat(index, num),
        rect.reshape(-1, 4),
        np.full(int(num.sum()), -1, np.int64),
    )
    return shard_arrays(space, topology)


class EmbeddingPerfEstimator(ShardEstimator):
    """Estimates the milliseconds of each shard.

    Training (``is_inference=False``) follows TorchRec's wall-time model. Inference means one process that looks up one
    batch on all ranks: the batch is not multiplied by the world size, rows are packed, and there is no backward.

    Args:
        topology: hardware.
        constraints: by table name.
        is_inference: planning for inference.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._is_inference = is_inference

    def estimate_arrays(self, arrays: ShardArrays) -> FloatN:
        """[N, 6] milliseconds of shards given as arrays."""
        if self._is_inference:
            return inference_time(arrays, self._topology, row_alignment(self._topology.compute_device))
        return training_time(arrays, self._topology)

    def estimate(self, sharding_options: list[ShardingOption], sharder_map: SharderMap | None = None) -> None:
        """Fill in ``shard.perf``.

        Args:
            sharding_options: options to estimate.
            sharder_map: ``sharder_name(type(module))`` -> sharder.
        """
        if not sharding_options:
            return
        arrays = _arrays_of_options(sharding_options, self._topology, self._constraints, sharder_map)
        rows = iter(self.estimate_arrays(arrays).tolist())
        for option in sharding_options:
            for shard in option.shards:
                shard.perf = Perf(*next(rows))

    @classmethod
    def perf_func_emb_wall_time(
        cls,
        shard_sizes: list[list[int]],
        compute_kernel: str,
        compute_device: str,
        sharding_type: str,
        batch_sizes: list[int],
        world_size: int,
        local_world_size: int,
        input_lengths: list[float],
        input_data_type_size: float,
        table_data_type_size: float,
        output_data_type_size: float,
        fwd_a2a_comm_data_type_size: float,
        bwd_a2a_comm_data_type_size: float,
        fwd_sr_comm_data_type_size: float,
        bwd_sr_comm_data_type_size: float,
        num_poolings: list[float],
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        intra_host_bw: float,
        inter_host_bw: float,
        bwd_compute_multiplier: float,
        weighted_feature_bwd_compute_multiplier: float,
        is_pooled: bool,
        is_weighted: bool = False,
        caching_ratio: float | None = None,
        is_inference: bool = False,
        prefetch_pipeline: bool = False,
        expected_cache_fetches: float = 0,
        uneven_sharding_perf_multiplier: float = 1.0,
    ) -> list[Perf]:
        """Relative wall time of each shard of one option, with TorchRec's model.

        Args:
            shard_sizes: [rows, columns] of each shard.
            compute_kernel, compute_device, sharding_type: enum values.
            batch_sizes, input_lengths, num_poolings: one per feature; samples per rank, ids per bag, bags per sample.
            world_size, local_world_size: ranks in all and a host.
            input_data_type_size: bytes of an id.
            table_data_type_size: bytes of an element of the table.
            output_data_type_size: bytes of an element of the output (not used: the model writes elements of the
                collective's size).
            fwd_a2a_comm_data_type_size ... bwd_sr_comm_data_type_size: bytes of an element in each collective.
            hbm_mem_bw ... inter_host_bw: bytes per millisecond.
            bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier: backward over forward compute.
            is_pooled, is_weighted: kind of lookup.
            caching_ratio, prefetch_pipeline, expected_cache_fetches: of rows in host memory behind a cache.
            is_inference, uneven_sharding_perf_multiplier: no backward; slowdown of unevenly cut tables.

        Raises:
            ConfigError: a kernel that does not run on the device, or an unknown sharding type.
        """
        memory_bw = hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw
        bandwidth = _checked_bandwidth(
            sharding_type, compute_device, compute_kernel, memory_bw, caching_ratio, prefetch_pipeline
        )
        topology = Topology(
            world_size,
            compute_device,
            local_world_size=local_world_size,
            hbm_mem_bw=hbm_mem_bw,
            ddr_mem_bw=ddr_mem_bw,
            hbm_to_ddr_mem_bw=hbm_to_ddr_mem_bw,
            intra_host_bw=intra_host_bw,
            inter_host_bw=inter_host_bw,
            bwd_compute_multiplier=bwd_compute_multiplier,
            weighted_feature_bwd_compute_multiplier=weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier=uneven_sharding_perf_multiplier,
        )
        arrays = _arrays_of_shards(
            np.array(shard_sizes, np.int64).reshape(-1, 2),
            sharding_type,
            **_batch_figures(input_lengths, num_poolings, batch_sizes),
            pooled=is_pooled,
            weighted=is_weighted,
            element_bytes=table_data_type_size,
            row_format=NO_ROW_FORMAT,
            output_bytes=output_data_type_size,
            fwd_a2a=fwd_a2a_comm_data_type_size,
            bwd_a2a=bwd_a2a_comm_data_type_size,
            fwd_sr=fwd_sr_comm_data_type_size,
            bwd_sr=bwd_sr_comm_data_type_size,
            device_bw=bandwidth,
            **_memory_figures(compute_kernel, compute_device, caching_ratio, expected_cache_fetches),
        )
        rows = training_time(arrays, topology, forward_only=is_inference, id_bytes=input_data_type_size)
        return [Perf(*row) for row in rows.tolist()]


def _checked_bandwidth(
    sharding_type: str,
    compute_device: str,
    compute_kernel: str,
    memory_bw: tuple[float, float, float],
    caching_ratio: float | None,
    prefetch_pipeline: bool,
) -> float:
    """Bytes per millisecond at which the kernel reads rows; raises ConfigError for an unknown type or kernel."""
    if sharding_type not in TYPE_CODES:
        raise ConfigError(f"sharding type {sharding_type!r}; expected one of {sorted(TYPE_CODES)}")
    bandwidth = kernel_bw_lookup(compute_device, compute_kernel, *memory_bw, caching_ratio, prefetch_pipeline)
    if bandwidth is None:
        raise ConfigError(f"kernel {compute_kernel!r} does not run on {compute_device!r}")
    return bandwidth


def _batch_figures(input_lengths: list[float], num_poolings: list[float], batch_sizes: list[int]) -> dict[str, float]:
    """Ids, vectors, vectors of bags that are not empty, and features of one batch, as ShardArrays names them."""
    figures = list(zip(input_lengths, num_poolings, batch_sizes))
    return {
        "batch_inputs": sum(n * p * b for n, p, b in figures),
        "batch_outputs": sum(p * b for _, p, b in figures),
        "filled_outputs": sum(min(n, 1) * p * b for n, p, b in figures),
        "features": len(input_lengths),
    }


def _memory_figures(
    compute_kernel: str, compute_device: str, caching_ratio: float | None, misses: float
) -> dict[str, float | bool]:
    """The fields of ShardArrays about a kernel's memory; times do not depend on the optimizer's state."""
    return {
        "misses": misses,
        "cached": compute_kernel in kernels_where(lambda rule: rule.cached),
        "tier": tier_code(compute_kernel, compute_device),
        "cache_ratio": caching_ratio or 0.0,
        "optimizer_full": 0.0,
        "optimizer_row_bytes": 0.0,
        "id_row_bytes": 0.0,
    }


def _arrays_of_shards(sizes: npt.NDArray[np.int64], sharding_type: str, **figures: float | bool) -> ShardArrays:
    """Shards [N, 2] of one table that differ in their sizes alone."""
    rule = rule_of(sharding_type)
    whole_rows, by_columns = not rule.cuts_rows, rule.cuts_columns and not rule.cuts_rows
    num = sizes.shape[0]
    same = {n: np.full(num, v, bool if isinstance(v, bool) else np.float64) for n, v in figures.items()}
    return ShardArrays(
        kind=np.full(num, TYPE_CODES[sharding_type]),
        rows=sizes[:, 0],
        cols=sizes[:, 1],
        table_rows=np.full(num, sizes[0, 0] if whole_rows else sizes[:, 0].sum()),
        table_cols=np.full(num, sizes[:, 1].sum() if by_columns else sizes[0, 1]),
        **same,
    )


class EmbeddingStorageEstimator(ShardEstimator):
    """Estimates the bytes of each shard.

    Args:
        topology: hardware.
        constraints: by table name.
        pipeline_type: decides how many batches of input are in memory at once.
        run_embedding_at_peak_memory: count the outputs too; only with a ``pipeline_type``.
        is_inference: packed rows (scale, bias and alignment included), no optimizer, one process's inputs and outputs.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        run_embedding_at_peak_memory: bool = False,
        is_inference: bool = False,
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._pipeline_type = pipeline_type
        self._at_peak = run_embedding_at_peak_memory
        self._is_inference = is_inference

    def estimate_arrays(self, arrays: ShardArrays) -> IntN:
        """Bytes [M, N] in each storage tier of shards given as arrays."""
        return storage_bytes(
            arrays,
            self._topology,
            pipeline_type=self._pipeline_type,
            run_embedding_at_peak_memory=self._at_peak,
            is_inference=self._is_inference,
            alignment=row_alignment(self._topology.compute_device),
        )

    def estimate(self, sharding_options: list[ShardingOption], sharder_map: SharderMap | None = None) -> None:
        """Fill in ``shard.storage``.

        Args:
            sharding_options: options to estimate.
            sharder_map: ``sharder_name(type(module))`` -> sharder.
        """
        if not sharding_options:
            return
        arrays = _arrays_of_options(sharding_options, self._topology, self._constraints, sharder_map)
        sizes = iter(self.estimate_arrays(arrays).T.tolist())
        for option in sharding_options:
            for shard in option.shards:
                shard.storage = storage_of(next(sizes))


class EmbeddingOffloadStats(CacheStatistics):
    """Cache statistics computed from a miss-ratio histogram.

    Args:
        cacheability: area under the miss curve, 0 (all hits) to 1.
        expected_lookups: distinct rows in a global batch.
        mrc_hist_counts: lookups that a cache of each size class would add as hits; the classes cut [0, height] evenly.
        height: rows of the table that the last class ends at.
    """

    def __init__(self, cacheability: float, expected_lookups: int, mrc_hist_counts: torch.Tensor, height: int) -> None:
        if mrc_hist_counts.dim() != 1 or not mrc_hist_counts.numel():
            raise ConfigError(
                f"mrc_hist_counts has shape {tuple(mrc_hist_counts.shape)}; expected one dimension, not empty"
            )
        if height <= 0:
            raise ConfigError(f"height {height}; expected at least 1 row")
        self._cacheability = cacheability
        self._expected_lookups = expected_lookups
        self._hist = mrc_hist_counts
        self._bins = torch.linspace(0, height, mrc_hist_counts.numel() + 1)
        self.height = height

    @property
    def expected_lookups(self) -> int:
        """Distinct rows in a global batch."""
        return self._expected_lookups

    @property
    def cacheability(self) -> float:
        """Area under the miss curve."""
        return self._cacheability

    def expected_miss_rate(self, clf: float) -> float:
        """Share of lookups that miss a cache of the fraction ``clf`` of the rows."""
        size = torch.tensor([clf * self.height])
        return float(self.estimate_cache_miss_rate(size, self._hist, self._bins)[0])

    @staticmethod
    def estimate_cache_miss_rate(cache_sizes: torch.Tensor, hist: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
        """Miss rate of each of ``cache_sizes`` [N]: one minus the share of ``hist`` up to its class of ``bins``."""
        hits = torch.cumsum(torch.cat([torch.zeros(1), hist.to(torch.float32)]), 0)
        reached = torch.bucketize(cache_sizes.to(torch.float32), bins.to(torch.float32))
        return 1.0 - hits[reached.clamp(max=hist.numel())] / hist.sum()
