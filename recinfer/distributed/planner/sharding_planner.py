"""The planner itself: enumerate, reserve, search (or run the given proposers and partitioner), report."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recinfer import env
from recinfer.distributed.planner.enumerator import EmbeddingEnumerator, option_object
from recinfer.distributed.planner.interfaces import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    Stats,
    StorageReservation,
)
from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.model.walk import sharded_modules
from recinfer.distributed.planner.partitioners import GreedyPerfPartitioner
from recinfer.distributed.planner.perf_models import NoopPerfModel
from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.plan.table_plan import TablePlan
from recinfer.distributed.planner.planner_base import Callbacks, EmbeddingPlannerBase, to_sharding_plan
from recinfer.distributed.planner.proposers import GreedyProposer, UniformProposer
from recinfer.distributed.planner.solve.explain import error_type, explain
from recinfer.distributed.planner.solve.outcome import build_plan, chosen_options, pin_tables
from recinfer.distributed.planner.solve.problem import lower_bound, make_problem
from recinfer.distributed.planner.solve.search import search
from recinfer.distributed.planner.solve.search_report import SearchReport
from recinfer.distributed.planner.solve.space import SearchSpace
from recinfer.distributed.planner.stats import EmbeddingStats
from recinfer.distributed.planner.storage_reservations import HeuristicalStorageReservation
from recinfer.distributed.types import (
    ModuleSharder,
    ShardingPlan,
)
from recinfer.errors import ConfigError

__all__ = ["EmbeddingShardingPlanner", "create_planner"]

logger = logging.getLogger(__name__)

_MAX_PROPOSALS = 10_000


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """Plans embedding tables for a topology.

    With no ``proposer``, ``partitioner`` or ``performance_model`` given, the default search runs: all options as arrays,
    starts near the lower bound, then a local search on the bottleneck rank. With any of them given, they run as
    documented: proposals are partitioned and rated one by one.

    Args:
        topology: hardware; default: one topology for the process group.
        batch_size: samples per rank, default 512.
        enumerator, storage_reservation, proposer, partitioner, performance_model, stats: parts to use instead.
        constraints: by table name.
        debug: print the tables too.
        callbacks: functions that may change the best plan before it is returned.
        timeout_seconds: time limit of the search, which then returns the best plan found.
        plan_loader: loads an earlier plan, which must be made from the same inputs.
        pinned: (ours) entries of an earlier :class:`Plan` to leave where they are.

    After :meth:`plan`, ``report`` has the lower bound and gap of the plan, and ``last_plan`` is the plan as data; it is
    None if proposals were partitioned, or with ``callbacks``, which may have changed the plan.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Callbacks | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        pinned: Plan | Sequence[TablePlan] | None = None,
    ) -> None:
        super().__init__(
            topology,
            batch_size,
            enumerator,
            storage_reservation,
            stats,
            constraints,
            debug,
            callbacks,
            timeout_seconds,
        )
        self._plug_ins = any(part is not None for part in (proposer, partitioner, performance_model))
        if proposer is None:
            self._proposers: list[Proposer] = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]
        else:
            self._proposers = proposer if isinstance(proposer, list) else [proposer]
        self._partitioner = partitioner or GreedyPerfPartitioner()
        self._performance_model = performance_model or NoopPerfModel(self._topology)
        self._plan_loader = plan_loader
        self._pinned = list(pinned.tables) if isinstance(pinned, Plan) else list(pinned or [])
        if self._pinned and self._plug_ins:
            raise ConfigError(
                "pinned tables need the default search; leave out proposer, partitioner and performance_model"
            )
        self.report: SearchReport | None = None
        self.last_plan: Plan | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan of every table that ``sharders`` can shard; an empty one when there is none.

        Raises:
            PlannerError: no plan fits; the message names the limiting memory and a change that helps.
            ConfigError: inputs that contradict each other.
        """
        begin = time.monotonic()
        deadline = begin + self._timeout_seconds if self._timeout_seconds is not None else float("inf")
        self._check_constraints(module, sharders)
        reserved = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        space = self._enumerator.space(module, sharders) if isinstance(self._enumerator, EmbeddingEnumerator) else None
        loaded = self._load(module, sharders) if self._plan_loader is not None else None
        if loaded is not None:
            best, self.report = loaded, None
            self.last_plan = None
            proposals = plans = 1
        elif space is None or self._plug_ins:
            best, proposals, plans = self._run_proposers(module, sharders, reserved, deadline, space)
        else:
            best, proposals, plans = self._run_search(space, reserved, deadline)
        for callback in self._callbacks:
            best, self.last_plan = callback(best), None
        sharding_plan = to_sharding_plan(best, self._topology)
        seconds = time.monotonic() - begin
        if self.report is not None:
            self.report.seconds = seconds
        for stats in self._stats:
            extra: dict[str, Any] = {"report": self.report} if isinstance(stats, EmbeddingStats) else {}
            stats.log(
                sharding_plan=sharding_plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=proposals,
                num_plans=plans,
                run_time=seconds,
                best_plan=best,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
                **extra,
            )
        return sharding_plan

    def _check_constraints(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> None:
        names = {n for _, m, s in sharded_modules(module, sharders) for n in s.shardable_parameters(m)}
        unknown = sorted(set(self._constraints or {}) - names)
        if unknown and names:
            logger.warning("constraints for tables that the model does not have: %s", ", ".join(unknown[:20]))

    # ------------------------------------------------------------------ the default search

    def _run_search(
        self, space: SearchSpace, reserved: Topology, deadline: float
    ) -> tuple[list[ShardingOption], int, int]:
        pins = pin_tables(space, self._pinned, self._topology) if self._pinned else None
        problem = make_problem(space, reserved, pins)
        found, report = search(problem, deadline=deadline)
        if found is None:
            enumerator = self._enumerator
            assert isinstance(enumerator, EmbeddingEnumerator)

            def estimator(topology: Topology) -> Any:
                return enumerator.estimate_of(space.tables, topology)

            raise PlannerError(explain(space, problem, reserved, estimator, pinned=self._pinned), error_type(problem))
        self.report = report
        self.last_plan = build_plan(space, problem, found, report, reserved, batch_size=self._batch_size)
        options = sorted(chosen_options(problem, found), key=lambda pair: int(space.option_table[pair[0]]))
        best = [option_object(space, option, self._batch_size, ranks) for option, ranks in options]
        return best, report.num_proposals, report.num_plans

    # ------------------------------------------------------------------ proposers and partitioner

    def _run_proposers(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        reserved: Topology,
        deadline: float,
        space: SearchSpace | None,
    ) -> tuple[list[ShardingOption], int, int]:
        options = self._enumerator.enumerate(module=module, sharders=sharders)
        if not options:
            self.report = self.last_plan = None
            return [], 0, 0
        best: list[ShardingOption] | None = None
        best_rating, last_error = float("inf"), "there was none"
        last_kind = PlannerErrorType.INSUFFICIENT_STORAGE
        proposals = plans = 0
        seen: dict[tuple[Any, ...], tuple[bool, float | None]] = {}
        for proposer in self._proposers:
            proposer.load(search_space=list(options), enumerator=self._enumerator)
            while (proposal := proposer.propose()) is not None:
                if proposals >= _MAX_PROPOSALS or (time.monotonic() > deadline and best is not None):
                    break
                key = tuple((id(o), o.cache_load_factor) for o in proposal)
                if key in seen:
                    proposer.feedback(*_as_feedback(seen[key], proposal, reserved))
                    continue
                proposals += 1
                trial = copy.deepcopy(proposal)
                rating: float | None = None
                try:
                    placed = self._partitioner.partition(trial, reserved)
                    rating = self._performance_model.rate(placed)
                    plans += 1
                    if best is None or rating < best_rating:
                        best, best_rating = copy.deepcopy(placed), rating
                except PlannerError as error:
                    last_error, last_kind = str(error), error.error_type
                seen[key] = (rating is not None, rating)
                proposer.feedback(*_as_feedback(seen[key], proposal, reserved))
        if best is None:
            kind = last_kind if space is None else error_type(make_problem(space, reserved))
            raise PlannerError(self._reason(space, reserved, last_error), kind)
        bound = lower_bound(make_problem(space, reserved)).value if space is not None else float("nan")
        worst = NoopPerfModel(self._topology).rate(best)
        self.report = SearchReport(worst, bound, num_proposals=proposals, num_plans=plans, source="proposers")
        self.last_plan = None
        return best, proposals, plans

    def _reason(self, space: SearchSpace | None, reserved: Topology, last_error: str) -> str:
        if space is None or not isinstance(self._enumerator, EmbeddingEnumerator):
            return f"No proposal could be placed ({last_error})"
        enumerator = self._enumerator
        problem = make_problem(space, reserved)
        if search(problem, max_moves=0)[0] is not None:
            return f"None of the proposals could be placed ({last_error}); the default search finds a plan"
        return explain(space, problem, reserved, lambda t: enumerator.estimate_of(space.tables, t) or _unreachable())

    # ------------------------------------------------------------------ earlier plans

    def _load(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption] | None:
        assert self._plan_loader is not None
        if not isinstance(self._enumerator, EmbeddingEnumerator):
            self._enumerator.enumerate(module=module, sharders=sharders)  # the hash covers the tables found
        wanted = self._plan_loader.plan_context_hash()
        mine = self.hash_planner_context_inputs_str()
        if wanted is not None and wanted != mine:
            raise PlannerError(
                f"the earlier plan was made from other inputs (hash {wanted}, now {mine}); plan again without "
                "plan_loader",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        options = self._plan_loader.load()
        return list(options.values()) if options is not None else None


def _unreachable() -> Any:
    raise AssertionError("an array search space always has an array estimate")


def _as_feedback(
    result: tuple[bool, float | None], proposal: list[ShardingOption], topology: Topology
) -> tuple[bool, list[ShardingOption], float | None, Topology]:
    return result[0], proposal, result[1], topology


def create_planner(device: torch.device, batch_size: int, world_size: int | None = None) -> EmbeddingShardingPlanner:
    """A planner for this process group, like TorchEasyRec's ``create_planner``.

    Capacities are those of the device and the host; ``INTRA_NODE_BANDWIDTH``, ``CROSS_NODE_BANDWIDTH`` (bytes per
    millisecond) and ``STORAGE_RESERVE_PERCENT`` (0 to 1, default 0.15) of the environment change the defaults.

    Args:
        device: this rank's device.
        batch_size: samples per rank.
        world_size: ranks; default those of the process group, or 1.
    """
    import torch.distributed as dist

    if world_size is None:
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    local = env.local_world_size(world_size)
    sizes: dict[str, Any] = {"ddr_cap": _host_memory() // local}
    if device.type == "cuda" and torch.cuda.is_available():
        sizes["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    overrides = {"intra_host_bw": env.intra_node_bandwidth(), "inter_host_bw": env.cross_node_bandwidth()}
    sizes.update({k: v for k, v in overrides.items() if v is not None})
    topology = Topology(world_size=world_size, compute_device=device.type, local_world_size=local, **sizes)
    reservation = HeuristicalStorageReservation(percentage=env.storage_reserve_percent())
    return EmbeddingShardingPlanner(topology=topology, batch_size=batch_size, storage_reservation=reservation)


def _host_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
