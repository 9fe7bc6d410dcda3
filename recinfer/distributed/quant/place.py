"""Positions of the rows of sharded quantized tables: cut from a quantized module, or packed in an archive's mapping.

An archive's pages stay where :mod:`recinfer.archive.mapping` maps them; :func:`recinfer.quant.buffers.allocate` places
all other rows. On one CPU host, rectangles that are adjacent in memory are merged into whole strips, so that one lookup
serves all ranks, without exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from recinfer.distributed.types.edges import rects_of
from recinfer.distributed.types.kernels import (
    KERNEL_RULES,
    EmbeddingComputeKernel,
    EmbeddingLocation,
    compute_kernel_to_embedding_location,
)
from recinfer.errors import ConfigError, NotFoundError
from recinfer.layout.cuts import column_unit
from recinfer.layout.rect import Rect, Strip, tile
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.quant.buffers import Buffers, Memory, Placed, allocate
from recinfer.quant.kernels import choose_kernel
from recinfer.quant.rows import slice_packed_columns

__all__ = [
    "PackedTables",
    "WholeTables",
    "check_devices",
    "kernel_of",
    "memory_of",
    "on_one_device",
    "place_buffer",
    "place_module",
]

_MEMORY: dict[EmbeddingLocation, Memory] = {
    EmbeddingLocation.DEVICE: "near",
    EmbeddingLocation.MANAGED: "managed",
    EmbeddingLocation.MANAGED_CACHING: "cached",
}
# Rows in a tier that is not a device's or host's memory are pages of their archive when this package looks them up.
_KERNELS = {_MEMORY[rule.location]: rule.kernel for rule in KERNEL_RULES if rule.packed and rule.location in _MEMORY}


def kernel_of(memory: Memory) -> EmbeddingComputeKernel:
    """The compute kernel that reads rows from ``memory``."""
    return _KERNELS[memory]


def memory_of(kernel: EmbeddingComputeKernel | str) -> Memory:
    """The memory in which a compute kernel of a plan keeps its rows, for a GPU."""
    return _MEMORY.get(compute_kernel_to_embedding_location(EmbeddingComputeKernel(kernel)), "near")


@dataclass(frozen=True, eq=False)
class WholeTables:
    """Whole columns of every table in this host's memory: table -> its pieces in ``buffers``."""

    pieces: Mapping[str, Sequence[Placed]]
    buffers: Buffers


@dataclass(frozen=True, eq=False)
class PackedTables:
    """Sharded tables and the positions of their packed rows.

    Attributes:
        shards: every shard that has rows; for a replicated table, the shard that is read.
        rows_of: a shard's packed rows, uint8 ``[rows, row bytes]`` at row alignment 1, on CPU.
        devices: rank -> device.
        buffers: the buffers that the shards' offsets refer to, on CPU; None: shards are cut from whole tables on
            demand.
        whole: tables for one lookup that serves all ranks; None if each rank has its own lookup.
    """

    shards: tuple[Placed, ...]
    rows_of: Callable[[Placed], Tensor]
    devices: Mapping[int, torch.device]
    buffers: Buffers | None
    whole: WholeTables | None


def place_module(
    module: Any, params: Mapping[str, ParameterSharding], env: ShardingEnv, *, fused: bool | None
) -> PackedTables:
    """Shard the tables of a quantized collection by ``params``; rows of ranks on the CPU are not copied.

    Raises:
        ConfigError: a table has no plan, or shards that do not tile it.
    """
    pooled = hasattr(module, "embedding_bag_configs")
    configs = {c.name: c for c in (module.embedding_bag_configs() if pooled else module.embedding_configs())}
    missing = [name for name in configs if name not in params]
    if missing:
        raise ConfigError(f"tables {', '.join(missing)} have no sharding; the plan has: {', '.join(sorted(params))}")
    shards = [
        Placed(rect, config.data_type, memory=memory_of(params[name].compute_kernel))
        for name, config in configs.items()
        for strip in _planned(config, params[name], env.world_size)
        for rect in strip.rects
    ]

    def rows_of(shard: Placed) -> Tensor:
        rect, dim = shard.rect, configs[shard.rect.table].embedding_dim
        rows = module.packed_table(rect.table)[rect.row_start : rect.row_stop].cpu()
        return slice_packed_columns(rows, dim, shard.data_type, rect.col_start, rect.col_stop)

    devices = _rank_devices(params, env)
    whole = None
    if fused is not False and all(d.type in ("cpu", "meta") for d in [*devices.values(), module.device]):
        # Whole rows stay in the unsharded module's memory, shared by the ranks of one host.
        whole = WholeTables({name: (placed,) for name, placed in module.placed.items()}, module.storage)
    return PackedTables(tuple(shards), rows_of, devices, None, whole)


def _planned(config: BaseEmbeddingConfig, sharding: ParameterSharding, world_size: int) -> tuple[Strip, ...]:
    rows, cols = config.num_embeddings, config.embedding_dim
    return tile(
        config.name,
        rows,
        cols,
        rects_of(config.name, rows, cols, sharding, world_size),
        world_size=world_size,
        column_unit=column_unit(config.data_type),
        replicated=sharding.sharding_type == ShardingType.DATA_PARALLEL.value,
    )


def _rank_devices(params: Mapping[str, ParameterSharding], env: ShardingEnv) -> dict[int, torch.device]:
    """Rank -> device, read from the shards' placements; CPU where a placement names none."""
    devices = {rank: torch.device("cpu") for rank in range(env.world_size)}
    for sharding in params.values():
        for piece in getattr(sharding.sharding_spec, "shards", []):
            if piece.placement is not None and piece.placement.device() is not None:
                devices[piece.placement.rank()] = piece.placement.device()
    return devices


def check_devices(devices: Mapping[int, torch.device]) -> None:
    """Raise ConfigError for a plan with GPUs that this machine does not have."""
    have = torch.cuda.device_count()
    for rank, device in sorted(devices.items()):
        if device.type == "cuda" and (device.index or 0) >= have:
            raise ConfigError(
                f"rank {rank} is planned on {device}, but this machine has {have} CUDA devices; "
                "plan for that many ranks, or for compute_device='cpu'"
            )


def place_buffer(
    tables: Sequence[BaseEmbeddingConfig],
    shards: Sequence[Placed],
    buffer: Tensor,
    *,
    world_size: int,
    device: torch.device | str,
    fused: bool | None,
    kernels: Mapping[str, str] | None,
) -> PackedTables:
    """Packed shards that lie in ``buffer`` (an archive's mapping); see ``from_packed`` of the sharded collections.

    Raises:
        ConfigError: the shards of a table do not tile it, or one does not lie in ``buffer`` or is on no rank.
        NotFoundError: shards of unknown tables.
    """
    by_rect: dict[str, dict[Rect, Placed]] = {config.name: {} for config in tables}
    unknown = sorted({s.rect.table for s in shards} - by_rect.keys())
    if unknown:
        raise NotFoundError(f"shards of unknown tables {', '.join(unknown)}; there are: {', '.join(sorted(by_rect))}")
    memory = {table: memory_of(kernel) for table, kernel in (kernels or {}).items()}
    rects: dict[str, list[Rect]] = {config.name: [] for config in tables}
    for shard in shards:
        table = shard.rect.table
        rects[table].append(shard.rect)
        by_rect[table][shard.rect] = replace(shard, memory=memory.get(table, "near"))
    strips = {
        c.name: tile(c.name, c.num_embeddings, c.embedding_dim, rects[c.name], world_size=world_size) for c in tables
    }
    for shard in shards:
        end = shard.offset + shard.bytes()
        if shard.offset < 0 or end > buffer.numel():
            raise ConfigError(
                f"shard {shard.rect.text} is bytes {shard.offset}:{end} of a buffer of {buffer.numel()}; pass the "
                "buffer for which the offsets were computed"
            )
    placed = [by_rect[name][rect] for name, found in strips.items() for strip in found for rect in strip.rects]
    kind, here = torch.device(device).type, Buffers(buffer)
    devices = {r: torch.device("cpu") if kind == "cpu" else torch.device(kind, r) for r in range(world_size)}
    # recinfer's kernel copies ids from the host itself; with FBGEMM's kernel, the steps copy the ids.
    if kind == "cuda" and world_size == 1 and fused is not False:
        check_devices(devices)  # checked before a kernel is chosen
        if choose_kernel(device).name == "triton":
            whole: WholeTables | None = on_one_device(tables, strips, by_rect, here, devices[0])
            return PackedTables(tuple(placed), here.rows, devices, here, whole)
    whole = _merged(strips, by_rect, here) if kind == "cpu" and fused is not False else None
    return PackedTables(tuple(placed), here.rows, devices, here, whole)


def on_one_device(
    configs: Sequence[BaseEmbeddingConfig],
    strips: Mapping[str, Sequence[Strip]],
    by_rect: Mapping[str, Mapping[Rect, Placed]],
    here: Buffers,
    device: torch.device,
) -> WholeTables:
    """Copies of all tables on the single device of the plan, for one lookup; each column piece becomes a table.

    Rows of kernels for host memory stay there; the device reads them from it.
    """
    spots, pieces = [], []
    for config in configs:
        for strip in strips[config.name]:
            shards = [by_rect[config.name][rect] for rect in strip.rects]
            rect = replace(shards[0].rect, row_start=0, row_stop=strip.edges[-1])
            spots.append(replace(shards[0], rect=rect, offset=0))
            pieces.append(shards)
    buffers, placed = allocate(spots, device)
    found: dict[str, list[Placed]] = {}
    for spot, shards in zip(placed, pieces):
        found.setdefault(spot.rect.table, []).append(spot)
        width = spot.row_bytes(buffers.row_alignment)
        for shard in shards:
            part = replace(spot, rect=shard.rect, offset=spot.offset + shard.rect.row_start * width)
            buffers.write(part, here.rows(shard))
    return WholeTables(found, buffers)


def _merged(
    strips: Mapping[str, Sequence[Strip]], by_rect: Mapping[str, Mapping[Rect, Placed]], buffers: Buffers
) -> WholeTables | None:
    """Whole strips of every table, or None if the row pieces of a strip are not adjacent in memory."""
    pieces: dict[str, list[Placed]] = {}
    for name, of_table in strips.items():
        for strip in of_table:
            first, *others = (by_rect[name][rect] for rect in strip.rects)
            width = first.row_bytes()
            if any(other.offset != first.offset + other.rect.row_start * width for other in others):
                return None
            whole = replace(first.rect, row_stop=strip.edges[-1])
            pieces.setdefault(name, []).append(replace(first, rect=whole, memory="near"))
    return WholeTables(pieces, buffers)
