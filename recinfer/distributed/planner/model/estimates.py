"""Estimates for arrays of shards: milliseconds by part, and bytes by storage tier.

Every function takes one entry per shard (or scalars that broadcast) and returns one row per shard. The training model is
TorchRec's wall-time model; inference is that of one process that looks one batch up on all its ranks.

Legend: N shards, M storage tiers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recinfer.distributed.planner.constants import (
    BATCHED_COPY_PERF_FACTOR,
    BIGINT_DTYPE,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    QUARTER_BLOCK_PENALTY,
    WEIGHTED_KERNEL_MULTIPLIER,
    kernel_bw_lookup,
)
from recinfer.distributed.planner.model.links import CollectiveType
from recinfer.distributed.planner.model.topology import Topology, tier_bytes
from recinfer.distributed.types import PipelineType
from recinfer.distributed.types.kernels import KERNEL_RULES
from recinfer.distributed.types.sharding_types import SHARDING_RULES, ShardingRule
from recinfer.distributed.types.tiers import DDR, TIERS, near_tier
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.registry import find_row_format, row_format_of_code

__all__ = [
    "NO_ROW_FORMAT",
    "PERF_PARTS",
    "Estimate",
    "ShardArrays",
    "inference_estimate",
    "inference_time",
    "packed_row_bytes",
    "read_bandwidth",
    "row_alignment",
    "row_format_code",
    "row_weights",
    "storage_bytes",
    "training_time",
]

FloatN = npt.NDArray[np.float64]
IntN = npt.NDArray[np.int64]

PERF_PARTS = ("fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "input_dist_comms", "prefetch_compute")
TYPE_NAMES = tuple(rule.kind.value for rule in SHARDING_RULES)
TYPE_CODES = {name: code for code, name in enumerate(TYPE_NAMES)}
KERNELS = tuple(rule.kernel.value for rule in KERNEL_RULES)
KERNEL_CODES = {name: code for code, name in enumerate(KERNELS)}

NO_ROW_FORMAT = 0
"""Code of tables that are not packed: the estimates of training do not ask for their rows."""
_MIN_LOOKUP_DIM = 32  # a warp reads at least this many columns
_INTRA_LINE = {"cpu": 64, "cuda": 32, "mtia": 32}  # bytes that one access to the memory brings


@dataclass(frozen=True)
class ShardArrays:
    """Inputs of the estimates, one entry per shard.

    ``batch_inputs`` are ids of one rank's batch for the whole table (sum of pooling factor x poolings x batch over its
    features), ``batch_outputs`` its vectors. ``misses`` are expected rows fetched from host memory in a global batch.
    """

    kind: IntN  # sharding type code
    rows: IntN  # rows of the shard
    cols: IntN
    table_rows: IntN
    table_cols: IntN
    batch_inputs: FloatN
    batch_outputs: FloatN
    filled_outputs: FloatN  # batch_outputs without empty bags
    features: FloatN
    pooled: npt.NDArray[np.bool_]
    weighted: npt.NDArray[np.bool_]
    element_bytes: FloatN  # bytes of an element of the float table; for inference, of a packed element
    row_format: IntN  # row_format_code of the packed rows
    output_bytes: FloatN  # bytes of an element of the output
    fwd_a2a: FloatN  # bytes per element in each collective
    bwd_a2a: FloatN
    fwd_sr: FloatN
    bwd_sr: FloatN
    device_bw: FloatN  # bytes per ms at which the kernel reads rows
    misses: FloatN
    cached: npt.NDArray[np.bool_]  # rows in host memory behind a device cache
    tier: IntN  # number of the rows' tier in TIERS
    cache_ratio: FloatN
    optimizer_full: FloatN  # optimizer state, in multiples of the table's bytes
    optimizer_row_bytes: FloatN  # further optimizer state, in bytes per row
    id_row_bytes: FloatN  # ids of tables that take raw ids, in bytes per row

    def take(self, index: Any) -> ShardArrays:
        """The entries at ``index``."""
        return ShardArrays(**{name: value[index] for name, value in self.__dict__.items()})


# Milliseconds by part [N, 6], and bytes in each tier [M, N], of every shard.
Estimate = Callable[[ShardArrays], tuple[FloatN, IntN]]


def row_alignment(compute_device: str) -> int:
    """Bytes that packed rows are aligned to: 1 on CPU, 16 on a GPU."""
    return 1 if compute_device == "cpu" else 16


def row_format_code(precision: DataType) -> int:
    """The code of the row format of ``precision``; :data:`NO_ROW_FORMAT` for one that only float tables have."""
    rows = find_row_format(precision)
    return NO_ROW_FORMAT if rows is None else rows.code


def packed_row_bytes(cols: Any, row_formats: Any, alignment: int = 1) -> IntN:
    """Bytes of one packed row; ``row_formats``: :func:`row_format_code` of each."""
    cols, row_formats = np.broadcast_arrays(cols, row_formats)
    size = np.empty(cols.shape, np.int64)
    for code in np.unique(row_formats):
        here = row_formats == code
        size[here] = row_format_of_code(int(code)).row_bytes(cols[here], alignment)
    return size


def _element_bits(row_formats: IntN) -> FloatN:
    """Bits of an element of each row format."""
    codes, at = np.unique(row_formats, return_inverse=True)
    return np.array([row_format_of_code(int(code)).element_bits for code in codes], float)[at]


def of_types(kind: IntN, get: Callable[[ShardingRule], Any]) -> npt.NDArray[Any]:
    """A property of the sharding type of each entry, of which ``kind`` is the code."""
    return np.array([get(rule) for rule in SHARDING_RULES])[kind]


def row_pieces(kind: IntN, topology: Topology) -> IntN:
    """Number of row pieces of the sharding type of each entry."""
    world, local = topology.world_size, topology.local_world_size
    return of_types(kind, lambda rule: rule.row_pieces(world, local))


def read_bandwidth(topology: Topology, kernel: int, caching_ratio: float, prefetch: bool) -> float | None:
    """Bytes per millisecond at which a kernel (number in ``KERNELS``) reads rows; None if the device does not run it."""
    rule, device = KERNEL_RULES[kernel], topology.compute_device
    if device not in rule.devices:
        return None
    if rule.tier not in (None, DDR):
        return topology.tier_bandwidth(rule.tier)
    figures = topology.hbm_mem_bw, topology.ddr_mem_bw, topology.hbm_to_ddr_mem_bw
    return kernel_bw_lookup(device, KERNELS[kernel], *figures, caching_ratio, prefetch)


def row_weights(topology: Topology, tier: int) -> tuple[int, ...] | None:
    """Bytes of each rank in a tier, in proportion to which row-wise tables are cut; None if all ranks have equal
    memory."""
    caps = tuple(tier_bytes(d.storage)[tier] for d in topology.devices)
    return None if len(set(caps)) == 1 else caps


def spread_of(a: ShardArrays, topology: Topology) -> FloatN:
    """Number of ranks that share the ids of a table; if ranks are unequal, rows of the table over rows of the piece."""
    spread = row_pieces(a.kind, topology).astype(float)
    for tier in range(len(TIERS)):
        if row_weights(topology, tier) is not None:
            pieces = of_types(a.kind, lambda r: r.one_row_piece_per_rank) & (np.asarray(a.tier) == tier)
            spread = np.where(pieces, a.table_rows / np.maximum(a.rows, 1), spread)
    return spread


def _block_penalty(cols: IntN) -> FloatN:
    half, quarter = HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY
    return np.where(cols >= FULL_BLOCK_EMB_DIM, 1.0, np.where(cols >= FULL_BLOCK_EMB_DIM // 2, half, quarter))


def training_time(
    a: ShardArrays, topology: Topology, *, forward_only: bool = False, id_bytes: float = BIGINT_DTYPE
) -> FloatN:
    """Milliseconds [N, 6] (``PERF_PARTS``) of data-parallel training with TorchRec's wall-time model.

    Each rank brings a batch; rows are read where they live; pooled vectors travel back by all-to-all (table- and
    column-wise), reduce-scatter (row-wise), or reduce-scatter in the host and all-to-all between hosts.
    """
    world, local = topology.world_size, topology.local_world_size
    num_hosts = world // local
    exchange = topology.collective_bw(CollectiveType.ALL_TO_ALL)
    between = topology.collective_bw(CollectiveType.ALL_TO_ALL, max(num_hosts, 2), 1)  # a rank of each host
    dp, cut = of_types(a.kind, lambda r: r.replicated), of_types(a.kind, lambda r: r.cuts_rows)
    whole, by_host = ~dp & ~cut, of_types(a.kind, lambda r: r.sums_inside_hosts)
    replicas = np.where(dp, 1, world)
    spread = spread_of(a, topology)

    ids = a.batch_inputs / spread
    vectors = np.where(a.pooled, a.filled_outputs, ids)
    fwd_size = np.where(dp, a.element_bytes, np.where(whole | ~a.pooled, a.fwd_a2a, a.fwd_sr))
    bwd_size = np.where(dp, a.element_bytes, np.where(whole | ~a.pooled, a.bwd_a2a, a.bwd_sr))
    read_ids = np.ceil(ids * replicas * id_bytes)
    read = read_ids * np.where(a.weighted, 2, 1)
    lookup_cols = np.where(whole, np.maximum(a.cols, _MIN_LOOKUP_DIM), a.cols)
    lookup = ids * replicas * lookup_cols * a.element_bytes
    fwd_out = vectors * replicas * a.cols * fwd_size
    bwd_out = vectors * replicas * a.cols * bwd_size

    penalty = np.where(whole, _block_penalty(a.cols), 1.0)
    fwd_compute = (read + lookup + fwd_out) * penalty / a.device_bw
    input_comms = np.where(dp, 0.0, np.ceil(a.batch_inputs * world * id_bytes) / exchange)

    def travel(size: Any, by_rows: CollectiveType) -> FloatN:
        inside = topology.collective_bw(by_rows, local, local)
        hosts = size / inside + (size / local / between if local < world else 0.0)
        link = np.where(whole, exchange, topology.collective_bw(by_rows))
        return np.where(by_host, hosts, np.where(dp, 0.0, size / link))

    out = np.zeros((a.kind.size, 6))
    out[:, 0], out[:, 1], out[:, 4] = fwd_compute, travel(fwd_out, CollectiveType.REDUCE_SCATTER), input_comms
    out[:, 5] = a.misses / spread * a.cols * a.element_bytes / topology.hbm_to_ddr_mem_bw
    if forward_only:
        return out

    table_bytes = a.table_rows * a.table_cols * a.element_bytes
    rings = 1.0 if num_hosts == 1 else 1.5 if num_hosts == 2 else 3.0
    reduced = topology.collective_bw(CollectiveType.ALL_REDUCE, max(num_hosts, 2), 1)
    all_reduce = table_bytes * (rings / local / reduced)
    optimizer = table_bytes * DP_ELEMENTWISE_KERNELS_PERF_FACTOR / a.device_bw
    batched_copy = np.where(whole | dp, 0.0, bwd_out * BATCHED_COPY_PERF_FACTOR / a.device_bw)
    bwd = topology.bwd_compute_multiplier * np.where(a.weighted, topology.weighted_feature_bwd_compute_multiplier, 1.0)
    out[:, 2] = fwd_compute * (bwd + np.where(a.weighted, WEIGHTED_KERNEL_MULTIPLIER, 0.0))
    out[:, 3] = np.where(dp, all_reduce + optimizer, travel(bwd_out, CollectiveType.ALL_GATHER) + batched_copy)
    if topology.uneven_sharding_perf_multiplier != 1.0:
        uneven = cut & ((a.table_rows % np.maximum(spread, 1)) != 0)
        out[uneven, :4] *= topology.uneven_sharding_perf_multiplier
    return out


def inference_time(a: ShardArrays, topology: Topology, alignment: int) -> FloatN:
    """Milliseconds [N, 6] of one process that looks up one batch, without a batch per rank and without a backward.

    A rank reads its share of the ids and the packed rows (whole memory lines) and writes its vectors; on a GPU ids come
    and vectors go over the host link. On a CPU all ranks share memory and nothing travels. With a measured profile
    (``topology.hardware``) the compute part is that of the profile.
    """
    ids = a.batch_inputs / spread_of(a, topology)
    vectors = np.where(a.pooled, a.batch_outputs, ids)
    row = packed_row_bytes(a.cols, a.row_format, alignment)
    out = np.zeros((a.kind.size, 6))
    written = vectors * a.cols * a.output_bytes
    id_bytes = ids * BIGINT_DTYPE * np.where(a.weighted, 1.5, 1.0)
    if topology.hardware is not None and topology.hardware.device == topology.compute_device:
        out[:, 0] = topology.hardware.lookup_ms(
            ids=ids,
            bags=vectors,
            row_bytes=row.astype(float),
            bits=_element_bits(a.row_format),
            rows=a.rows.astype(float),
            features=a.features,
        )
        near = near_tier(topology.compute_device)
        out[:, 0] *= np.where(a.tier != TIERS.index(near), topology.tier_bandwidth(near) / a.device_bw, 1.0)
    else:
        line = _INTRA_LINE[topology.compute_device]
        lookup = ids * (-(-row // line) * line)
        out[:, 0] = (id_bytes + lookup + written) / a.device_bw
    if topology.compute_device != "cpu":
        moves = topology.world_size > 1
        out[:, 1] = written / topology.collective_bw(CollectiveType.ALL_TO_ALL) if moves else 0.0
        out[:, 4] = id_bytes / topology.hbm_to_ddr_mem_bw
    out[:, 5] = a.misses / spread_of(a, topology) * row / topology.hbm_to_ddr_mem_bw
    return out


def storage_bytes(
    a: ShardArrays,
    topology: Topology,
    *,
    pipeline_type: PipelineType = PipelineType.NONE,
    run_embedding_at_peak_memory: bool = False,
    is_inference: bool = False,
    alignment: int = 1,
) -> IntN:
    """Bytes [M, N] in each tier of each shard: rows, cache, optimizer state, raw ids, and inputs and outputs of one
    iteration. Raw ids are on the device while training, and in the index in host memory while serving."""
    world = topology.world_size
    replicas = 1 if is_inference else np.where(of_types(a.kind, lambda r: r.replicated), 1, world)
    spread = spread_of(a, topology)
    ids = a.batch_inputs / spread
    vectors = np.where(a.pooled, a.batch_outputs if is_inference else a.filled_outputs, ids)
    inputs = np.ceil(ids * replicas * BIGINT_DTYPE)
    outputs = np.ceil(vectors * replicas * a.cols * a.output_bytes)
    if is_inference:
        table = (packed_row_bytes(a.cols, a.row_format, alignment) * a.rows).astype(float)
        optimizer = np.zeros(a.kind.size)
        in_flight = inputs * np.where(a.weighted, 1.5, 1.0) + outputs
    else:
        table = np.ceil(a.rows * a.cols * a.element_bytes)
        optimizer = np.ceil(table * a.optimizer_full) + a.rows * a.optimizer_row_bytes
        # An all-to-all returns partial sums of row pieces, which are added on the receiving rank: the rank receives as
        # many bytes as its lookup wrote. Inside several hosts a reduce-scatter adds them, without this memory.
        one_host = topology.local_world_size == world
        summed_at_home = of_types(a.kind, lambda r: r.cuts_rows and (one_host or not r.sums_inside_hosts))
        outputs *= np.where(a.pooled & summed_at_home & (world > 1), 2, 1)
        in_flight = _in_flight(inputs, outputs, a.cached, pipeline_type, run_embedding_at_peak_memory)
    # The cache, 4 bytes per row to find it in the cache, and 16 per cache slot for its state.
    cached_rows = np.ceil(table * a.cache_ratio)
    cache = cached_rows + np.ceil(4 * a.rows + 16 * a.rows * a.cache_ratio)
    cache_optimizer = np.ceil(cached_rows * a.optimizer_full + a.rows * a.cache_ratio * a.optimizer_row_bytes)
    if is_inference:
        cache_optimizer = np.zeros(a.kind.size)
    near = TIERS.index(near_tier(topology.compute_device))
    far = a.tier != near
    on_device = np.where(a.cached, cache + cache_optimizer, np.where(far, 0.0, table + optimizer))
    num_bytes = np.zeros((len(TIERS), a.kind.size), np.int64)
    num_bytes[near] = np.where(a.rows > 0, on_device + in_flight, 0.0)
    num_bytes[a.tier[far], np.flatnonzero(far)] = (table + optimizer)[far]
    part = (
        a.cols / np.maximum(a.table_cols, 1) if is_inference else 1.0
    )  # a table has one index, whose rows are its own
    num_bytes[TIERS.index(DDR) if is_inference else near] += np.ceil(a.rows * a.id_row_bytes * part).astype(np.int64)
    return num_bytes


def _in_flight(
    inputs: FloatN, outputs: FloatN, cached: npt.NDArray[np.bool_], pipeline: PipelineType, at_peak: bool
) -> FloatN:
    """Bytes of inputs and outputs alive at the peak: how many batches of input depends on the pipeline's depth."""
    if pipeline in (PipelineType.NONE, PipelineType.TRAIN_BASE):
        return inputs + outputs
    copies: Any = 2
    if pipeline is PipelineType.TRAIN_PREFETCH_SPARSE_DIST:
        copies = np.where(cached, 10, 3)  # the prefetch of a cached table keeps seven more buffers of the input's size
    return copies * inputs + (outputs if at_peak else 0.0)


def inference_estimate(topology: Topology) -> Estimate:
    """The estimator of quantized inference on ``topology``."""
    alignment = row_alignment(topology.compute_device)

    def estimate(arrays: ShardArrays) -> tuple[FloatN, IntN]:
        perf = inference_time(arrays, topology, alignment)
        perf[np.asarray(arrays.rows) == 0] = 0.0  # an empty piece gets no lookup
        return perf, storage_bytes(arrays, topology, is_inference=True, alignment=alignment)

    return estimate
