"""ParameterSharding, ShardingPlan and ShardingEnv: plans as objects, and the ranks on which they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharding_spec import ShardingSpec

from recinfer.distributed.types.cache import CacheParams
from recinfer.distributed.types.enums import BoundsCheckMode
from recinfer.errors import ConfigError
from recinfer.ignored import warn_ignored
from recinfer.modules.embedding_configs import DataType

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "EmbeddingModuleShardingPlan",
    "KeyValueParams",
    "ModuleShardingPlan",
    "ParameterSharding",
    "ShardingEnv",
    "ShardingPlan",
    "rank_device",
]


@dataclass(unsafe_hash=True)
class KeyValueParams:
    """Settings of TorchRec's kernels that keep rows on SSD or in a key-value store.

    recinfer has no such kernel: a plan that names such a kernel is an error. The settings are stored with the plan but
    have no effect, and creating them warns (:mod:`recinfer.ignored`).

    Args:
        ssd_storage_directory ... load_ckpt_without_opt: of the store on SSD; sizes are in GB (l2) and MB (l1).
        ps_hosts ... ps_max_local_index_length: of a parameter server.
    """

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: Any | None = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: Any | None = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None

    def __post_init__(self) -> None:
        warn_ignored("distributed.types.KeyValueParams", "*", True, stacklevel=4)


@dataclass
class ParameterSharding:
    """The sharding of one parameter (a table).

    Args:
        sharding_type: a :class:`ShardingType` value.
        compute_kernel: an ``EmbeddingComputeKernel`` value.
        ranks: the rank of each shard, in the order of ``sharding_spec.shards`` (for table_row_wise the ranks of its
            host; for data_parallel all ranks).
        sharding_spec: a ``ShardMetadata`` (offsets, sizes, placement) per shard; None for data_parallel.
        cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode: kernel settings, passed on.
        output_dtype: element type of the looked-up vectors.
        key_value_params: see :class:`KeyValueParams`.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: ShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: DataType | None = None
    key_value_params: KeyValueParams | None = None

    def __repr__(self) -> str:
        """The first four fields, and all others that are set."""
        first = ("sharding_type", "compute_kernel", "ranks", "sharding_spec")
        shown = {n: v for n, v in vars(self).items() if n in first or v is not None}
        return f"ParameterSharding({', '.join(f'{n}={v!r}' for n, v in shown.items())})"


class ModuleShardingPlan:
    """Base of the plans of one module."""


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
    """The plan of one embedding module: table name -> :class:`ParameterSharding`."""

    def __str__(self) -> str:
        """A table of parameters, then a table of shards."""
        heads = ["param", "sharding type", "compute kernel", "ranks"]
        rows = [[n, p.sharding_type, p.compute_kernel, str(p.ranks)] for n, p in self.items()]
        shard_rows = [
            [n, str(s.shard_offsets), str(s.shard_sizes), str(s.placement)]
            for n, p in self.items()
            for s in getattr(p.sharding_spec, "shards", [])
        ]
        shard_heads = ["param", "shard offsets", "shard sizes", "placement"]
        return f"{_text_table(heads, rows)}\n\n{_text_table(shard_heads, shard_rows)}"


def _text_table(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [heads, ["-" * w for w in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


@dataclass
class ShardingPlan:
    """The plan of a model: module path -> plan of that module. The path is that of the module in the wrapped model."""

    plan: dict[str, ModuleShardingPlan]

    def get_plan_for_module(self, module_path: str) -> ModuleShardingPlan | None:
        """The plan of ``module_path``, or None when that module is not planned."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}\n\n{plan}" for path, plan in self.plan.items())


class ShardingEnv:
    """The ranks of a sharded module: their number, this rank, and the process group if there is one.

    Args:
        world_size: ranks in total.
        rank: this rank.
        pg: the process group; None when all ranks live in this process (inference).
        output_dtensor: state dicts of sharded modules and of their optimizers hold DTensors over :attr:`device_mesh`
            instead of ShardedTensors.

    Raises:
        ConfigError: a rank outside the world; ``output_dtensor`` without a process group.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        pg: dist.ProcessGroup | None = None,
        output_dtensor: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is outside the world of {world_size} ranks; expected 0 <= rank < world_size"
            )
        if output_dtensor and pg is None:
            raise ConfigError("output_dtensor=True without a process group: DTensors need one; pass pg")
        self.world_size = world_size
        self.rank = rank
        self.process_group = pg
        self.output_dtensor = output_dtensor
        self._device_mesh: DeviceMesh | None = None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks of the process group as a mesh; None without a process group."""
        if self._device_mesh is None and self.process_group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            from recinfer.group_device import group_device

            self._device_mesh = DeviceMesh.from_group(self.process_group, group_device(self.process_group).type)
        return self._device_mesh

    @property
    def state_mesh(self) -> DeviceMesh | None:
        """The mesh of the DTensors that state dicts hold; None when they hold ShardedTensors."""
        return self.device_mesh if self.output_dtensor else None

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """The environment of this process in ``pg``."""
        import torch.distributed as dist

        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """All ranks in this process: no process group."""
        return cls(world_size, rank, None)

    def __repr__(self) -> str:
        return f"ShardingEnv(world_size={self.world_size}, rank={self.rank}, pg={self.process_group})"


def rank_device(device_type: str, rank: int) -> torch.device:
    """The torch device of a local rank: ``cpu`` for CPU, else ``<type>:<rank>``."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(f"{device_type}:{rank}")
