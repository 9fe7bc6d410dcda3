"""Plans written by hand: one generator per table (table_wise, row_wise ...), combined to a module's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from recinfer import env
from recinfer.distributed.fused_params import names_optimizer
from recinfer.distributed.planner.constants import MIN_CW_DIM
from recinfer.distributed.sharded.kernel_settings import has_optimizer_in_backward
from recinfer.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingType,
)
from recinfer.distributed.types.default_sharders import get_module_to_default_sharders
from recinfer.distributed.types.edges import placement, sharding_spec
from recinfer.distributed.types.kernels import EmbeddingComputeKernel, kernels_where
from recinfer.distributed.types.sharding_types import rule_of
from recinfer.errors import ConfigError
from recinfer.layout.cuts import column_width, even_rows, grid, heights_in_proportion
from recinfer.layout.rect import Rect

__all__ = [
    "ParameterShardingGenerator",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_sharding_constructor_from_type",
    "grid_shard",
    "row_wise",
    "table_row_wise",
    "table_wise",
]

# (parameter, ranks per host, ranks, device type, sharder) -> sharding of the parameter
ParameterShardingGenerator = Callable[[Any, int, int, str, ModuleSharder[nn.Module]], ParameterSharding]

_QUANTIZED = kernels_where(lambda rule: rule.packed)
_FLOAT = kernels_where(lambda rule: not rule.packed)


def calculate_shard_sizes_and_offsets(
    tensor: torch.Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: list[int] | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes and offsets ([rows, columns]) of the shards of a table.

    Args:
        tensor: weight [R, D].
        sharding_type: a ``ShardingType`` value.
        col_wise_shard_dim: minimum columns per piece; default 128.
        device_memory_sizes: row-wise only: memory of each rank; rows are divided in proportion.
    """
    rows, cols = tensor.shape
    rule = rule_of(ShardingType(sharding_type).value)
    widths = [cols]
    if rule.replicated:
        return [[rows, cols]] * world_size, [[0, 0]] * world_size
    if rule.one_row_piece_per_rank and device_memory_sizes is not None:
        heights = heights_in_proportion(rows, device_memory_sizes)
    else:
        heights = _evenly(rows, rule.row_pieces(world_size, local_world_size))
    if rule.cuts_columns:
        width = column_width(cols, col_wise_shard_dim or MIN_CW_DIM)
        widths = [width] * (cols // width)
    rects = grid(heights, widths, [0] * (len(heights) * len(widths)))
    return [[r.rows, r.cols] for r in rects], [[r.row_start, r.col_start] for r in rects]


def _evenly(rows: int, parts: int) -> list[int]:
    heights: list[int] = even_rows(rows, parts, np.arange(parts))[1].tolist()
    return heights


def _kernel(param: Any, sharder: ModuleSharder[nn.Module], kind: ShardingType, device: str, asked: str | None) -> str:
    """The requested kernel, or the default.

    The default is ``quant`` for quantized tables, and ``fused`` for a table whose optimizer runs in the backward: noted on
    ``param`` by apply_optimizer_in_backward, or named in the sharder's ``fused_params``. Any other table is ``dense``:
    the caller's own optimizer steps its parameter. The rule holds for replicas too, as in TorchRec.
    """
    quantized = EmbeddingComputeKernel.QUANT.value in sharder.compute_kernels(kind.value, device)
    known = _QUANTIZED if quantized else _FLOAT
    if asked is not None:
        if asked not in known:
            raise ConfigError(
                f"compute_kernel {asked!r}; expected one that {type(sharder).__name__} supports: {', '.join(known)}"
            )
        return asked
    if quantized:
        return EmbeddingComputeKernel.QUANT.value
    in_backward = has_optimizer_in_backward(param) or names_optimizer(getattr(sharder, "fused_params", None))
    fused = in_backward and kind != ShardingType.DATA_PARALLEL
    return (EmbeddingComputeKernel.FUSED if fused else EmbeddingComputeKernel.DENSE).value


def _sharding(
    param: Any,
    rects: list[Rect],
    kind: ShardingType,
    local_size: int,
    device_type: str,
    sharder: ModuleSharder[nn.Module],
    compute_kernel: str | None = None,
    devices: list[str] | None = None,
) -> ParameterSharding:
    # The types that a sharder offers on CPU are the planner's candidates; other types run too.
    allowed = list(dict.fromkeys([*sharder.sharding_types(device_type), *sharder.sharding_types("cuda")]))
    if kind.value not in allowed:
        raise ConfigError(
            f"{kind.value} is not supported by {type(sharder).__name__} on {device_type}; expected {allowed}"
        )
    kernel = _kernel(param, sharder, kind, device_type, compute_kernel)
    spec = None
    if kind != ShardingType.DATA_PARALLEL:
        kinds = devices or [device_type] * len(rects)
        spec = sharding_spec(rects, [placement(kinds[i], rect.rank, local_size) for i, rect in enumerate(rects)])
    ranks = [rect.rank for rect in rects]
    return ParameterSharding(sharding_type=kind.value, compute_kernel=kernel, ranks=ranks, sharding_spec=spec)


def _check_ranks(ranks: list[int], world_size: int) -> None:
    wrong = [r for r in ranks if not 0 <= r < world_size]
    if wrong:
        raise ConfigError(f"ranks {wrong} are outside the world of {world_size} ranks")


def data_parallel(compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """The whole table on every rank.

    Args:
        compute_kernel: ``dense`` (default): the caller's own optimizer steps it. ``fused``: its optimizer runs in the
            backward, and ranks exchange ids and gradients of vectors instead of whole tables.
    """

    def generate(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        rows, cols = param.shape
        rects = [Rect(rank, 0, rows, 0, cols) for rank in range(world_size)]
        return _sharding(param, rects, ShardingType.DATA_PARALLEL, local_size, device_type, sharder, compute_kernel)

    return generate


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """The whole table on ``rank``."""

    def generate(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        _check_ranks([rank], world_size)
        rows, cols = param.shape
        rects = grid([rows], [cols], [rank])
        kinds = [device] if device is not None else None
        return _sharding(param, rects, ShardingType.TABLE_WISE, local_size, device_type, sharder, compute_kernel, kinds)

    return generate


def row_wise(
    sizes_placement: tuple[list[int], str | list[str]] | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Rows over all ranks: evenly, or (sizes, device kinds) in ``sizes_placement``.

    Size ``i`` goes to rank ``i`` modulo the number of ranks.
    """

    def generate(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        rows, cols = param.shape
        devices = None
        if sizes_placement is None:
            heights = _evenly(rows, world_size)
        else:
            heights, kinds = sizes_placement
            if sum(heights) != rows:
                raise ConfigError(f"row_wise sizes sum to {sum(heights)}; the table has {rows} rows")
            devices = [kinds] * len(heights) if isinstance(kinds, str) else list(kinds)
            if len(devices) != len(heights):
                raise ConfigError(
                    f"row_wise has {len(heights)} sizes and {len(devices)} device kinds; expected one kind for each size"
                )
        rects = grid(heights, [cols], [i % world_size for i in range(len(heights))])
        return _sharding(param, rects, ShardingType.ROW_WISE, local_size, device_type, sharder, compute_kernel, devices)

    return generate


def column_wise(
    ranks: list[int] | None = None,
    size_per_rank: list[int] | None = None,
    compute_kernel: str | None = None,
    device_types: list[str] | None = None,
) -> ParameterShardingGenerator:
    """Columns over ``ranks``: evenly, or ``size_per_rank`` columns each (over ranks 0, 1, ... when only sizes are given)."""
    if ranks is None and size_per_rank is None:
        raise ConfigError("column_wise needs ranks, size_per_rank, or both")

    def generate(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        rows, cols = param.shape
        places = list(ranks) if ranks is not None else list(range(len(size_per_rank or [])))
        _check_ranks(places, world_size)
        if size_per_rank is not None:
            widths = list(size_per_rank)
            if len(widths) != len(places) or sum(widths) != cols or min(widths) < 1:
                raise ConfigError(
                    f"column_wise sizes {widths} on ranks {places}; expected one size for each rank, with sum {cols}"
                )
        else:
            if cols % len(places):
                raise ConfigError(
                    f"column_wise: {cols} columns do not divide over {len(places)} ranks; pass size_per_rank"
                )
            widths = [cols // len(places)] * len(places)
        rects = grid([rows], widths, places)
        return _sharding(
            param,
            rects,
            ShardingType.COLUMN_WISE,
            local_size,
            device_type,
            sharder,
            compute_kernel,
            device_types,
        )

    return generate


def table_row_wise(host_index: int) -> ParameterShardingGenerator:
    """Rows over the ranks of host ``host_index``."""

    def generate(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        ranks = list(range(host_index * local_size, (host_index + 1) * local_size))
        _check_ranks(ranks, world_size)
        rows, cols = param.shape
        rects = grid(_evenly(rows, local_size), [cols], ranks)
        return _sharding(param, rects, ShardingType.TABLE_ROW_WISE, local_size, device_type, sharder)

    return generate


def grid_shard(host_indexes: list[int]) -> ParameterShardingGenerator:
    """Columns over hosts, each column piece cut into rows over the ranks of its host."""

    def generate(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> ParameterSharding:
        rows, cols = param.shape
        if cols % len(host_indexes):
            raise ConfigError(f"grid_shard: {cols} columns do not divide over {len(host_indexes)} hosts")
        width = cols // len(host_indexes)
        ranks = [rank for host in host_indexes for rank in range(host * local_size, (host + 1) * local_size)]
        _check_ranks(ranks, world_size)
        rects = grid(_evenly(rows, local_size), [width] * len(host_indexes), ranks)
        return _sharding(param, rects, ShardingType.GRID_SHARD, local_size, device_type, sharder)

    return generate


def get_sharding_constructor_from_type(sharding_type: ShardingType) -> Callable[..., ParameterShardingGenerator]:
    """The generator for a sharding type; raises ConfigError for a type without one."""
    constructors: dict[ShardingType, Callable[..., ParameterShardingGenerator]] = {
        ShardingType.DATA_PARALLEL: data_parallel,
        ShardingType.TABLE_WISE: table_wise,
        ShardingType.ROW_WISE: row_wise,
        ShardingType.COLUMN_WISE: column_wise,
        ShardingType.TABLE_ROW_WISE: table_row_wise,
        ShardingType.GRID_SHARD: grid_shard,
    }
    if sharding_type not in constructors:
        raise ConfigError(f"no generator for {sharding_type}; expected one of {[t.value for t in constructors]}")
    return constructors[sharding_type]


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[nn.Module] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """A dictionary with the generator for every table of ``module``."""
    chosen = sharder or _default_sharder(module)
    return dict.fromkeys(chosen.shardable_parameters(module), parameter_sharding_generator)


def _default_sharder(module: nn.Module) -> ModuleSharder[nn.Module]:
    sharders = get_module_to_default_sharders()
    if type(module) not in sharders:
        raise ConfigError(f"no default sharder for {type(module).__name__}; pass sharder=")
    return sharders[type(module)]


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: dict[str, ParameterShardingGenerator],
    sharder: ModuleSharder[nn.Module] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one module.

    A generator that names no kernel plans a table ``fused`` when its optimizer runs in the backward
    (:func:`~recinfer.optim.apply_optimizer_in_backward.apply_optimizer_in_backward` was called for it, or the sharder's
    ``fused_params`` name one), else ``dense``: then the caller's own optimizer steps its parameter.

    Args:
        module: the embedding module.
        per_param_sharding: table -> generator (:func:`table_wise` ...).
        sharder: default: that of the module's class.
        local_size, world_size: ranks per host and in all; default those of the process group.
        device_type: default ``cuda`` if there is one.

    Raises:
        ConfigError: unknown or missing tables, or a sharding that the sharder or the number of ranks does not allow.

    Example::

        plan = construct_module_sharding_plan(
            ebc,
            per_param_sharding={"table_0": table_wise(rank=0), "table_1": row_wise()},
            world_size=2,
            local_size=2,
            device_type="cpu",
        )
    """
    import torch.distributed as dist

    chosen = sharder or _default_sharder(module)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    local = local_size or env.local_world_size(world_size)
    tables = chosen.shardable_parameters(module)
    missing, unknown = (
        sorted(tables.keys() - per_param_sharding.keys()),
        sorted(per_param_sharding.keys() - tables.keys()),
    )
    if missing or unknown:
        raise ConfigError(
            f"per_param_sharding lacks tables {missing} and names unknown tables {unknown}; expected one entry for "
            "each table"
        )
    plan = EmbeddingModuleShardingPlan()
    for name, generate in per_param_sharding.items():
        plan[name] = generate(tables[name], local, world_size, device_type, chosen)
    return plan
