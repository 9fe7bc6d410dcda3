"""The interfaces of the planner's parts: enumerator, estimator, proposer, partitioner, perf model, storage reservation,
stats and plan loader."""

from __future__ import annotations

import abc

from torch import nn

from recinfer.distributed.planner.constants import BATCH_SIZE
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.solve.search_report import SearchReport
from recinfer.distributed.types import ModuleSharder, ShardingPlan

__all__ = [
    "Enumerator",
    "Partitioner",
    "PerfModel",
    "PlanLoader",
    "Proposer",
    "ShardEstimator",
    "Stats",
    "StorageReservation",
]


class StorageReservation(abc.ABC):
    """Subtracts the memory that is not for tables from a topology."""

    @abc.abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """A copy of ``topology`` with the remaining memory."""

    @property
    @abc.abstractmethod
    def last_reserved_topology(self) -> Topology | None:
        """The result of the last :meth:`reserve`."""


class PerfModel(abc.ABC):
    """Rates a placed plan; lower is better."""

    @abc.abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """The rating."""


class ShardEstimator(abc.ABC):
    """Fills in perf or storage of the shards of options."""

    @abc.abstractmethod
    def __init__(self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None) -> None: ...

    @abc.abstractmethod
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_map: dict[str, ModuleSharder[nn.Module]] | None = None,
    ) -> None:
        """Change the shards in place."""


class Enumerator(abc.ABC):
    """Lists the options of a model."""

    @abc.abstractmethod
    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None: ...

    @abc.abstractmethod
    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Estimated options of every table."""

    @abc.abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate ``sharding_options`` (again)."""


class Proposer(abc.ABC):
    """Proposes one option per table in each round, using the feedback on the last proposal."""

    @abc.abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Start with these options."""

    @abc.abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Report the result of the last proposal."""

    @abc.abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """The next proposal, or None at the end."""


class Partitioner(abc.ABC):
    """Assigns the shards of a proposal to ranks."""

    @abc.abstractmethod
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """``proposal`` with ranks; raises PlannerError when it does not fit."""


class Stats(abc.ABC):
    """Reports a plan."""

    @abc.abstractmethod
    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = False,
        report: SearchReport | None = None,
    ) -> None:
        """Report; ``report`` carries the lower bound and the gap when the default search ran."""


class PlanLoader(abc.ABC):
    """Loads an earlier plan."""

    @abc.abstractmethod
    def load(self) -> dict[int, ShardingOption] | None:
        """Load options by ``hash``; None if no plan is stored."""

    @abc.abstractmethod
    def plan_context_hash(self) -> str | None:
        """Hash of the inputs that the plan was made from."""
