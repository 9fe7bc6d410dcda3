"""Where the rows of sharded quantized tables are: cut from a quantized module, or packed in an archive's buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.embedding_types import (
    EmbeddingComputeKernel,
    EmbeddingLocation,
    compute_kernel_to_embedding_location,
)
from recinfer.distributed.planner.plan import ShardRect, TablePlan
from recinfer.distributed.quant_buffers import column_parts, fused_pieces, joined_pieces
from recinfer.distributed.quant_layout import PackedShard, shard_name
from recinfer.distributed.types import ParameterSharding, ShardingEnv
from recinfer.errors import ConfigError, NotFoundError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.quant.lookup import ColumnPiece
from recinfer.quant.rows import row_bytes, slice_packed_columns
from recinfer.quant.tbe import Memory

__all__ = ["PackedSource", "Placed", "kernel_of", "memory_of", "place_buffer", "place_module"]

_MEMORY: dict[EmbeddingLocation, Memory] = {
    EmbeddingLocation.DEVICE: "near",
    EmbeddingLocation.MANAGED: "managed",
    EmbeddingLocation.MANAGED_CACHING: "cached",
}
_KERNELS = {
    "near": EmbeddingComputeKernel.QUANT,
    "managed": EmbeddingComputeKernel.QUANT_UVM,
    "cached": EmbeddingComputeKernel.QUANT_UVM_CACHING,
}


def kernel_of(memory: Memory) -> EmbeddingComputeKernel:
    """The compute kernel that reads rows from ``memory``."""
    return _KERNELS[memory]


def memory_of(kernel: EmbeddingComputeKernel | str) -> Memory:
    """Where a GPU keeps the rows that a compute kernel (of a plan) reads."""
    return _MEMORY[compute_kernel_to_embedding_location(EmbeddingComputeKernel(kernel))]


@dataclass(frozen=True)
class PackedSource:
    """Packed shards and where their bytes are.

    Attributes:
        shards: every shard of every rank. ``offset`` counts only when ``buffer`` holds the shards themselves.
        rows_of: a shard's packed rows, uint8 [rows, row_bytes at alignment 1] on CPU.
        buffer: the uint8 buffer (row alignment 1, CPU) that holds the shards at their offsets, or None when the shards
            are cut from whole tables on demand.
    """

    shards: tuple[PackedShard, ...]
    rows_of: Callable[[PackedShard], Tensor]
    buffer: Tensor | None


@dataclass(frozen=True)
class Placed:
    """Tables ready to be looked up.

    Attributes:
        source: every rank's shards.
        pieces: whole column pieces of every table in this host's memory, for one lookup of all ranks; None where each
            rank looks up its own.
        buffer, managed: what holds ``pieces``.
        row_alignment: of their rows.
        devices: rank -> device.
    """

    source: PackedSource
    pieces: Mapping[str, Sequence[ColumnPiece]] | None
    buffer: Tensor
    managed: Tensor | None
    row_alignment: int
    devices: Mapping[int, torch.device]


def place_module(
    module: Any, params: Mapping[str, ParameterSharding], env: ShardingEnv, *, fused: bool | None
) -> Placed:
    """The tables of a quantized collection of ours, cut as ``params`` say; nothing is copied for ranks on the CPU."""
    configs = _configs_of(module)
    plans = table_plans(configs, params, env)
    devices = rank_devices(params, env)
    pieces = None
    if fused is not False and all(d.type in ("cpu", "meta") for d in [*devices.values(), module.device]):
        # Whole rows stay where the unsharded module has them: the ranks of one host share memory.
        pieces = {c.name: (ColumnPiece(0, c.embedding_dim, module.table_offsets[c.name]),) for c in configs}
    source = source_of_module(module, shards_of_plan(plans))
    return Placed(source, pieces, module.buffer, None, module.row_alignment, devices)


def place_buffer(
    tables: Sequence[BaseEmbeddingConfig],
    shards: Sequence[PackedShard],
    buffer: Tensor,
    *,
    world_size: int,
    device: torch.device | str,
    fused: bool | None,
    kernels: Mapping[str, str] | None,
    join_columns: bool,
) -> Placed:
    """Packed shards that lie in ``buffer`` (an archive's mapping); see ``from_packed`` of the sharded collections.

    Raises:
        ConfigError: the shards of a table do not cover it exactly once, or one does not lie in ``buffer`` or is on no rank.
        NotFoundError: shards of unknown tables.
    """
    memory = {table: memory_of(kernel) for table, kernel in (kernels or {}).items()}
    shards = [replace(shard, memory=memory.get(shard.table, "near")) for shard in shards]
    source = source_of_buffer(tables, shards, buffer)
    parts = column_parts(tables, shards)
    _check_places(tables, shards, buffer, world_size)
    kind = torch.device(device).type
    devices = {r: torch.device("cpu") if kind == "cpu" else torch.device(kind, r) for r in range(world_size)}
    pieces = fused_pieces(tables, parts) if kind == "cpu" and fused is not False else None
    managed = None
    if pieces is not None and join_columns:
        pieces, buffer, managed = joined_pieces(tables, pieces, buffer)
    return Placed(source, pieces, buffer, managed, 1, devices)


def _check_places(
    tables: Sequence[BaseEmbeddingConfig], shards: Sequence[PackedShard], buffer: Tensor, world_size: int
) -> None:
    types = {config.name: config.data_type for config in tables}
    for shard in shards:
        if not 0 <= shard.rank < world_size:
            raise ConfigError(f"shard {shard_name(shard)}: rank {shard.rank}; expected 0 to {world_size - 1}")
        end = shard.offset + shard.rows * row_bytes(shard.cols, types[shard.table])
        if shard.offset < 0 or end > buffer.numel():
            raise ConfigError(
                f"shard {shard_name(shard)} is bytes {shard.offset}:{end} of a buffer of {buffer.numel()}; give the "
                "buffer that the offsets were made for"
            )


def source_of_buffer(
    configs: Sequence[BaseEmbeddingConfig], shards: Sequence[PackedShard], buffer: Tensor
) -> PackedSource:
    """Shards that lie in ``buffer`` (an archive's mapping)."""
    types = {config.name: config.data_type for config in configs}
    unknown = sorted({s.table for s in shards} - types.keys())
    if unknown:
        raise NotFoundError(f"shards of unknown tables {', '.join(unknown)}; there are: {', '.join(sorted(types))}")

    def rows_of(shard: PackedShard) -> Tensor:
        width = row_bytes(shard.cols, types[shard.table])
        return buffer[shard.offset : shard.offset + shard.rows * width].view(shard.rows, width)

    return PackedSource(tuple(shards), rows_of, buffer)


def shards_of_plan(tables: Sequence[TablePlan]) -> list[PackedShard]:
    """The rectangles of a plan's tables, rank by rank inside a table; offsets are not known yet (0)."""

    def shard(table: TablePlan, rect: ShardRect) -> PackedShard:
        memory = memory_of(table.compute_kernel)
        return PackedShard(
            table.table, rect.row_start, rect.row_stop, rect.col_start, rect.col_stop, rect.rank, 0, memory
        )

    return [shard(table, rect) for table in tables for rect in table.shards]


def source_of_module(module: Any, shards: Sequence[PackedShard]) -> PackedSource:
    """Shards cut from a quantized collection of ours, whose scales and biases come from whole rows."""
    configs = {c.name: c for c in _configs_of(module)}

    def rows_of(shard: PackedShard) -> Tensor:
        config = configs[shard.table]
        rows = module.packed_table(shard.table)[shard.row_start : shard.row_stop].cpu()
        return slice_packed_columns(rows, config.embedding_dim, config.data_type, shard.col_start, shard.col_stop)

    return PackedSource(tuple(shards), rows_of, None)


def _configs_of(module: Any) -> list[BaseEmbeddingConfig]:
    pooled = hasattr(module, "embedding_bag_configs")
    return list(module.embedding_bag_configs() if pooled else module.embedding_configs())


def table_plans(
    configs: Sequence[BaseEmbeddingConfig], params: Mapping[str, ParameterSharding], env: ShardingEnv
) -> list[TablePlan]:
    """The checked rectangles of every table of a module."""
    from recinfer.distributed.planner.plan.table_plan import table_plan

    missing = [c.name for c in configs if c.name not in params]
    if missing:
        raise ConfigError(f"tables {', '.join(missing)} have no sharding; the plan has: {', '.join(sorted(params))}")
    return [table_plan("", c, params[c.name], c.data_type, env.world_size) for c in configs]


def rank_devices(params: Mapping[str, ParameterSharding], env: ShardingEnv) -> dict[int, torch.device]:
    """Rank -> device, read from the shards' placements; CPU where a placement names none."""
    devices = {rank: torch.device("cpu") for rank in range(env.world_size)}
    for sharding in params.values():
        for piece in getattr(sharding.sharding_spec, "shards", []):
            if piece.placement is not None and piece.placement.device() is not None:
                devices[piece.placement.rank()] = piece.placement.device()
    return devices
