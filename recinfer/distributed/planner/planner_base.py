"""Base of planners: their parts, planning once for all ranks, and conversion of placed options to TorchRec's plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recinfer import env
from recinfer.distributed.planner.constants import BATCH_SIZE
from recinfer.distributed.planner.enumerator import EmbeddingEnumerator
from recinfer.distributed.planner.interfaces import Enumerator, Stats, StorageReservation
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.facts import TableFacts
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.stats import EmbeddingStats
from recinfer.distributed.planner.storage_reservations import HeuristicalStorageReservation
from recinfer.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingPlanner,
    ShardingType,
)
from recinfer.distributed.types.default_sharders import get_default_sharders
from recinfer.distributed.types.edges import placement, sharding_spec
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Callbacks", "EmbeddingPlannerBase", "to_sharding_plan"]

# All fields of the table facts except objects; constraints are hashed separately.
_TABLE_FACTS = [f.name for f in fields(TableFacts) if f.name not in ("module", "tensor", "constraints", "sharder")]

Callbacks = list[Callable[[list[ShardingOption]], list[ShardingOption]]]


def to_sharding_plan(sharding_options: list[ShardingOption], topology: Topology) -> ShardingPlan:
    """Convert placed options to TorchRec's plan."""
    plan: dict[str, Any] = {}
    for option in sharding_options:
        rects = [shard.rect(option.name) for shard in option.shards]
        spec = None
        if option.sharding_type != ShardingType.DATA_PARALLEL.value:
            places = [placement(topology.compute_device, r.rank, topology.local_world_size) for r in rects]
            spec = sharding_spec(rects, places)
        module_plan = plan.setdefault(option.path, EmbeddingModuleShardingPlan())
        module_plan[option.name] = ParameterSharding(
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            ranks=[r.rank for r in rects],
            sharding_spec=spec,
            cache_params=option.cache_params,
            enforce_hbm=option.enforce_hbm,
            stochastic_rounding=option.stochastic_rounding,
            bounds_check_mode=option.bounds_check_mode,
            output_dtype=option.output_dtype,
            key_value_params=option.key_value_params,
        )
    return ShardingPlan(plan)


def _default_topology() -> Topology:
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Topology(world_size=world, compute_device=device, local_world_size=env.local_world_size(world))


class EmbeddingPlannerBase(ShardingPlanner):
    """Base of planners: their parts, and planning once for all ranks."""

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Callbacks | None = None,
        timeout_seconds: int | None = None,
        heuristical_storage_reservation_percentage: float = 0.15,
    ) -> None:
        self._topology = topology or _default_topology()
        self._batch_size = batch_size or BATCH_SIZE
        self._constraints = constraints
        self._enumerator = enumerator or EmbeddingEnumerator(self._topology, self._batch_size, constraints)
        self._storage_reservation = storage_reservation or HeuristicalStorageReservation(
            percentage=heuristical_storage_reservation_percentage
        )
        self._stats = [EmbeddingStats()] if stats is None else stats if isinstance(stats, list) else [stats]
        self._debug = debug
        self._callbacks = callbacks or []
        self._timeout_seconds = timeout_seconds

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 of ``pg`` (default: the world) and return the result, or raise rank 0's error, on every
        rank."""
        import torch.distributed as dist

        group: Any = pg if pg is not None else dist.group.WORLD
        if sharders is None:
            sharders = get_default_sharders()
        message: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                message[0] = self.plan(module, sharders)
            except Exception as error:  # all ranks must fail, otherwise the others would wait forever
                message[0] = error
        source = dist.get_global_rank(group, 0) if group is not dist.group.WORLD else 0
        dist.broadcast_object_list(message, src=source, group=group)
        if isinstance(message[0], Exception):
            raise message[0]
        return message[0]

    def hash_planner_context_inputs(self) -> int:
        """Hash, as an integer, of the tables, topology, hardware profile, batch size, reservation and constraints.

        Raises:
            ConfigError: before :meth:`plan`, or the enumerator's ``enumerate``, has read the tables of a model.
        """
        return int(self.hash_planner_context_inputs_str()[:15], 16)

    def hash_planner_context_inputs_str(self) -> str:
        """sha256 (hex) of the same inputs."""
        limits = sorted((n, repr(c)) for n, c in (self._constraints or {}).items())
        reservation = self._storage_reservation
        facts = {k: v for k, v in vars(reservation).items() if isinstance(v, int | float | str)}
        parts = (
            self._topology.signature(),
            self._batch_size,
            type(reservation).__name__,
            sorted(facts.items()),
            limits,
            self._table_facts(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _table_facts(self) -> list[tuple[Any, ...]]:
        """The tables that the enumerator found, as plain data."""
        if isinstance(self._enumerator, EmbeddingEnumerator):
            tables = self._enumerator.last_tables
            if tables is not None:
                return [tuple(getattr(table, name) for name in _TABLE_FACTS) for table in tables]
        options = getattr(self._enumerator, "last_stored_search_space", None)
        if options is None:
            raise ConfigError(
                "the hash of a planner's inputs covers the tables, which are not known yet; call plan(module, "
                "sharders) or the enumerator's enumerate(module, sharders) first"
            )
        return [
            (
                o.fqn,
                tuple(o.tensor.shape),
                str(o.tensor.dtype),
                o.sharding_type,
                o.compute_kernel,
                tuple(o.input_lengths),
            )
            for o in options
        ]
